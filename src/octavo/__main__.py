"""The command `octavo`, which is also `python -m octavo`."""

import sys


def main() -> None:
    """Run the command line. Ctrl-C is quiet from here on, also while the libraries of the terminal are imported."""
    try:
        from octavo.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
