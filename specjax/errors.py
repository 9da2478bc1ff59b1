"""The one kind of error that a user can put right."""


class InputError(ValueError):
    """An argument, file or setting that cannot be used. The message names it, its value, and what to do."""
