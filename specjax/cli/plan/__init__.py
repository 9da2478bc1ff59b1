"""``specjax plan``: what speculation should gain, before anything is generated. A file a command."""
