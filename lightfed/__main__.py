"""`python -m lightfed` is the command `lightfed`."""

from lightfed.cli.command_line import main

if __name__ == "__main__":
    main()
