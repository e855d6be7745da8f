"""The command line: `jpaged COMMAND`, one module for each command, with its flags and what it does."""
