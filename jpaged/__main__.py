"""`python -m jpaged` is `jpaged`."""

from jpaged.cli.main import main

main()
