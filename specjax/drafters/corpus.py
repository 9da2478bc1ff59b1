"""Text files that a drafter drafts from, as tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specjax import text
from specjax.errors import InputError

LARGEST_CORPUS = 16 * 2**20
"""The maximum number of bytes of all files together."""

_PIECE = 2**18  # characters: tokenizers take many times the memory of a text


def read_corpus(files: Sequence[str | Path], tokenizer: Any, vocab_size: int) -> list[list[int]]:
    """Return the token ids of some text files, one list for each.

    Args:
        files: the paths of UTF-8 files, of at most `LARGEST_CORPUS` bytes together.
        tokenizer: the target's tokenizer; None if it is not known.
        vocab_size: the number of the target's tokens.

    Raises:
        InputError: A file cannot be read, or the files are too large, or there is no tokenizer.

    Examples:
        >>> import pathlib, tempfile
        >>> from specjax.assets import embedded
        >>> from specjax.drafters.corpus import read_corpus
        >>> tokenizer = specjax.text.load_tokenizer(embedded("target"))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     file = pathlib.Path(directory, "notes.txt")
        ...     _ = file.write_text("import os")
        ...     tokens = read_corpus([file], tokenizer, vocab_size=3072)
        >>> tokenizer.decode(tokens[0])
        'import os'
        >>> read_corpus(["nowhere.txt"], tokenizer, vocab_size=3072)
        Traceback (most recent call last):
        specjax.errors.InputError: corpus='nowhere.txt': No such file or directory; give text files
    """
    if not files:
        return []
    if tokenizer is None:
        raise InputError(
            f"corpus={str(files[0])!r}: there is no tokenizer to read it with; give the target's"
            " tokenizer, or pass token ids to specjax.Suffix.of_texts"
        )
    sizes = [_size(file) for file in files]
    if sum(sizes) > LARGEST_CORPUS:
        largest = files[max(range(len(files)), key=sizes.__getitem__)]
        raise InputError(
            f"corpus={str(largest)!r}: the files have {sum(sizes):,} bytes together, and this is"
            f" the largest; give at most {LARGEST_CORPUS:,}, those that answers resemble most"
        )
    return [_read(file, tokenizer, vocab_size) for file in files]


def _size(file: str | Path) -> int:
    try:
        path = Path(file).expanduser()
        if path.is_dir():
            raise InputError(f"corpus={str(file)!r}: a directory; give text files")
        return path.stat().st_size
    except (OSError, ValueError, RuntimeError) as error:
        raise _unreadable(file, error) from error


def _read(file: str | Path, tokenizer: Any, vocab_size: int) -> list[int]:
    try:
        with Path(file).expanduser().open("rb") as stream:
            # No more than was allowed: a file may have grown, or have no size at all.
            content = stream.read(LARGEST_CORPUS).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"corpus={str(file)!r}: no UTF-8 text at byte {error.start}; give text files"
        ) from error
    except OSError as error:
        raise _unreadable(file, error) from error
    tokens = []
    for start in range(0, len(content), _PIECE):
        # A word that is cut here has other tokens, which only costs a draft.
        tokens += text.encode_continuation(tokenizer, content[start : start + _PIECE])
    if max(tokens, default=0) >= vocab_size:
        raise InputError(
            f"corpus={str(file)!r}: its largest token id is {max(tokens)}, but the target has"
            f" {vocab_size} tokens; give the target's own tokenizer"
        )
    return tokens


def _unreadable(file: str | Path, error: Exception) -> InputError:
    reason = getattr(error, "strerror", None) or error
    return InputError(f"corpus={str(file)!r}: {reason}; give text files")
