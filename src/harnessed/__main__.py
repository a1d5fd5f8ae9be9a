"""`python -m harnessed` is the command `harnessed`."""

from harnessed.cli import main

main()
