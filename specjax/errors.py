"""The one kind of error that a user can mend."""


class InputError(ValueError):
    """An argument, file or setting that cannot be used. The message names it, its value, and the mend."""
