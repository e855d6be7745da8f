"""Entry point of `python -m jpaged`, which is the command `jpaged`."""

from jpaged.cli.main import main

main()
