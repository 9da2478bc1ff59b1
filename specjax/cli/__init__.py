"""The command line: one module per command, and the package ``plan`` for its subcommands."""
