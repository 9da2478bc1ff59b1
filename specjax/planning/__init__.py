"""What speculation should gain, reckoned or measured, and which draft to take."""
