"""What speculation should gain, computed or measured, and which draft to take."""
