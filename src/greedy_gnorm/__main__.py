"""`python -m greedy_gnorm ...` is the same as `gnorm ...`."""

from greedy_gnorm.cli import run

run()
