"""The methods of drafting, one file each."""
