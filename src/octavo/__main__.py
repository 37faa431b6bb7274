"""`python -m octavo` is the command `octavo`."""

from octavo.cli.main import main

if __name__ == "__main__":
    main()
