"""The command line, one file a command; ``plan`` is a folder of commands."""
