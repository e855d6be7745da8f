"""The command line: `jpaged COMMAND`, one module for each command."""
