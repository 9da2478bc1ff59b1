"""Files that options of several commands name."""

from pathlib import Path

from specjax.errors import InputError


def read_lines(name: str, path: str) -> tuple[str, ...]:
    """Return the lines of a file that are not blank; no lines if no file is named."""
    if not path:
        return ()
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name}={path!r}: cannot be read ({error})") from None
    if not (texts := tuple(line for line in lines if line.strip())):
        raise InputError(
            f"{name}={path!r}: the file is empty; write a line, or leave the option out"
        )
    return texts
