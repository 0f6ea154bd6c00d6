"""`python -m splitveil` is the command line."""

from splitveil.cli.app import main

if __name__ == "__main__":
    main()
