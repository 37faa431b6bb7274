"""The `octavo` command, also available as `python -m octavo`."""

import sys


def main() -> None:
    """Run the command line. From here on, Ctrl-C exits quietly, even while terminal libraries are being imported."""
    try:
        from octavo.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
