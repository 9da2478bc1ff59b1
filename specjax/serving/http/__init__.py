"""The engine behind HTTP, as OpenAI's clients know it."""
