"""The commands ``specjax plan``, one module each: what speculative decoding should gain."""
