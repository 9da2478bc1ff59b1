"""The decoding loop: engine, verification, and what it counts."""
