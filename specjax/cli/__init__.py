"""The command line, one file a command; ``plan`` has one more for each way to reckon."""
