"""Text files that a drafter drafts from, as tokens."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specjax import text
from specjax.errors import InputError
from specjax.plain_text import PlainText, tags_of

LARGEST_CORPUS = 16 * 2**20
"""The maximum number of bytes of all files together."""

_PIECE = 2**18  # characters: tokenizers take many times the memory of a text


def as_files(corpus: Any) -> tuple[str | Path, ...]:
    """Return the argument ``corpus`` as a tuple of paths. A single path is one file.

    Raises:
        InputError: It is neither a path nor a sequence of paths.

    Examples:
        >>> from specjax.drafters.corpus import as_files
        >>> as_files("notes.txt")
        ('notes.txt',)
        >>> as_files(5)
        Traceback (most recent call last):
        specjax.errors.InputError: corpus=5: give paths of text files, or () for none
    """
    if isinstance(corpus, str | Path):
        return (corpus,)
    is_sequence = isinstance(corpus, Sequence) and not isinstance(corpus, bytes | bytearray)
    if not is_sequence or not all(isinstance(file, str | Path) for file in corpus):
        raise InputError(f"corpus={corpus!r}: give paths of text files, or () for none")
    return tuple(corpus)


def files_for(corpus: Any, drafter: Any) -> tuple[str | Path, ...]:
    """Return the argument ``corpus`` as a tuple of paths, which a drafter that is named may read.

    Raises:
        InputError: The paths are invalid, or there are some for a drafter that is loaded already.

    Examples:
        >>> from specjax.drafters.corpus import files_for
        >>> files_for("notes.txt", "suffix")
        ('notes.txt',)
        >>> files_for("notes.txt", specjax.PromptLookup())
        Traceback (most recent call last):
        specjax.errors.InputError: corpus=['notes.txt']: it applies to drafters by name; give ...
    """
    files = as_files(corpus)
    if files and (not isinstance(drafter, str | Path) or str(drafter) == "none"):
        raise InputError(
            f"corpus={[str(file) for file in files]}: it applies to drafters by name; give"
            " drafter='suffix', or leave it out"
        )
    return files


def read_corpus(files: Sequence[str | Path], tokenizer: Any, vocab_size: int) -> list[list[int]]:
    """Return the token ids of some text files, one list for each.

    What spells a special token in a file is characters, as it is in a message.

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
    encode = _encoder(tokenizer)
    texts, budget = [], LARGEST_CORPUS
    for file in files:
        content = _read(file, budget)
        budget -= len(content)
        texts.append(_encode(file, content, encode, vocab_size))
    return texts


def _size(file: str | Path) -> int:
    try:
        path = Path(file).expanduser()
        is_directory, size = path.is_dir(), path.stat().st_size
    except (OSError, ValueError, RuntimeError) as error:
        raise _unreadable(file, error) from error
    if is_directory:
        raise InputError(f"corpus={str(file)!r}: a directory; give text files")
    return size


def _read(file: str | Path, budget: int) -> bytes:
    """Return the content of a file that may have ``budget`` bytes."""
    try:
        with Path(file).expanduser().open("rb") as stream:
            content = stream.read(budget + 1)
    except OSError as error:
        raise _unreadable(file, error) from error
    if len(content) > budget:  # the file has grown, or its size is not stated
        raise InputError(
            f"corpus={str(file)!r}: with it the files have more than {LARGEST_CORPUS:,} bytes"
            " together; give at most as many, those that answers resemble most"
        )
    return content


def _encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Return the function that encodes text as messages are encoded: without special tokens."""
    if tags_of(tokenizer) is None:  # nothing says which texts are special tokens
        return lambda piece: text.encode_continuation(tokenizer, piece)
    return PlainText(tokenizer).encode


def _encode(
    file: str | Path, content: bytes, encode: Callable[[str], list[int]], vocab_size: int
) -> list[int]:
    """Return the token ids of the content of a file."""
    try:
        characters = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"corpus={str(file)!r}: no UTF-8 text at byte {error.start}; give text files"
        ) from error
    tokens = []
    for start in range(0, len(characters), _PIECE):
        # A word that is cut here has other tokens, which only costs a draft.
        tokens += encode(characters[start : start + _PIECE])
    if max(tokens, default=0) >= vocab_size:
        raise InputError(
            f"corpus={str(file)!r}: its largest token id is {max(tokens)}, but the target has"
            f" {vocab_size} tokens; give the target's own tokenizer"
        )
    return tokens


def _unreadable(file: str | Path, error: Exception) -> InputError:
    reason = getattr(error, "strerror", None) or error
    return InputError(f"corpus={str(file)!r}: {reason}; give text files")
