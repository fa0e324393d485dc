"""The terminal: one thin call for each command, and what is printed.

No logic that Python users would miss.
"""

from greedy_gnorm.cli.app import main

__all__ = ["main"]
