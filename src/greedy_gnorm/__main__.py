"""The `gnorm` command, and `python -m greedy_gnorm`, which is the same."""

import sys


def run() -> None:
    """Run the command line; the libraries below take seconds to load, and Ctrl-C may come meanwhile."""
    try:
        from greedy_gnorm.cli.app import main

        code = main()
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    run()
