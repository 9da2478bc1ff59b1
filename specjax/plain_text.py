"""Text in which no tag has a meaning: what spells a special token is encoded as its characters."""

import re
import secrets
from bisect import bisect_right
from collections.abc import Collection, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from specjax.errors import InputError

Span = tuple[int, int]
"""The start and the end of a part of a text, in characters."""


def check_unicode(prompt: str) -> None:
    r"""Refuse, with an InputError, a text with a lone surrogate.

    Examples:
        >>> from specjax.plain_text import check_unicode
        >>> check_unicode("a\ud800")
        Traceback (most recent call last):
        specjax.errors.InputError: prompt: character 1 is not valid Unicode (surrogates not ...
    """
    try:
        prompt.encode()
    # A lone surrogate: bytes of a command line that are not UTF-8.
    except UnicodeEncodeError as error:
        raise InputError(
            f"prompt: character {error.start} is not valid Unicode ({error.reason}); give UTF-8"
        ) from None


class Tags:
    """The tokens of a tokenizer that structure a prompt: special tokens, and tags of templates.

    An added token that is not special is a tag if the ordinary vocabulary lacks it, such as Qwen's
    ``<tool_call>``, or if the chat template writes it. Others, such as Gemma's tokens for two line
    ends and for ``<table>``, are pieces of ordinary text.

    Attributes:
        special: the ids of those that the tokenizer calls special.
        ids: the ids of all.
        texts: the texts of all.

    Examples:
        >>> from specjax.plain_text import tags_of
        >>> tags = tags_of(specjax.load("embedded").tokenizer)
        >>> tags.spans("one <|endoftext|> two")
        [(4, 17)]
    """

    def __init__(self, tokenizer: Any) -> None:
        """Read the tags of a tokenizer with a tokenizer.json."""
        self._backend = tokenizer.backend_tokenizer
        template = str(tokenizer.chat_template or "")

        def is_tag(token: Any) -> bool:
            text = token.content
            return bool(text.strip()) and (
                token.special
                or self._backend.model.token_to_id(text) is None
                or (text.isascii() and text in template)
            )

        tags = {i: token for i, token in tokenizer.added_tokens_decoder.items() if is_tag(token)}
        self.special = frozenset(i for i, token in tags.items() if token.special)
        self.ids = frozenset(tags)
        self.texts = frozenset(token.content for token in tags.values())
        self.pattern = _any_of(self.texts)
        self._special_pattern = _any_of({it.content for it in tags.values() if it.special})
        self._are_normalized = any(token.normalized for token in tags.values())

    def spans(self, text: str, only_special: bool = False) -> list[Span]:
        """Return where a text has tags.

        Args:
            text: the text.
            only_special: whether to leave out those that the tokenizer does not call special.
        """
        if not self._may_be_changed(text):
            pattern = self._special_pattern if only_special else self.pattern
            return [match.span() for match in pattern.finditer(text)]
        ids = self.special if only_special else self.ids
        encoding = self._backend.encode(text, add_special_tokens=False)
        return [
            _stripped(text, span)
            for token, span in zip(encoding.ids, encoding.offsets, strict=True)
            if token in ids
        ]

    def _may_be_changed(self, text: str) -> bool:
        """Return True if a normalizer changes the text: fullwidth letters, say, become a tag."""
        normalizer = self._backend.normalizer
        return (
            self._are_normalized
            and normalizer is not None
            and normalizer.normalize_str(text) != text
        )


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    """Return a pattern of any of the texts; they share beginnings, which are compared once."""
    groups: dict[str, list[str]] = {}
    for text in sorted(texts, key=lambda it: (-len(it), it)):
        groups.setdefault(text[:3], []).append(re.escape(text[3:]))
    heads = sorted(groups, key=len, reverse=True)
    branches = (f"{re.escape(head)}(?:{'|'.join(groups[head])})" for head in heads)
    return re.compile("|".join(branches) or "(?!)")  # the latter matches nothing


def _stripped(text: str, span: Span) -> Span:
    """Return a span without the space around it, which some tokens take to themselves."""
    start, end = span
    part = text[start:end]
    return start + len(part) - len(part.lstrip()), end - len(part) + len(part.rstrip())


_TAGS: WeakKeyDictionary[Any, tuple[tuple[int, Any], Tags]] = WeakKeyDictionary()


def tags_of(tokenizer: Any) -> Tags | None:
    """Return the tags of a tokenizer; None if it has no tokenizer.json, which would list them.

    Examples:
        >>> from specjax.plain_text import tags_of
        >>> sorted(tags_of(specjax.load("embedded").tokenizer).texts)
        ['<|endoftext|>']
    """
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return None
    state = (len(tokenizer), tokenizer.chat_template)  # tokens may be added, and the template set
    if (stored := _TAGS.get(tokenizer)) is None or stored[0] != state:
        stored = _TAGS[tokenizer] = state, Tags(tokenizer)
    return stored[1]


class PlainText:
    """Encodes text in which tags have no meaning: what spells one is characters.

    It has a tokenizer of its own. transformers' ``split_special_tokens`` would change the one that
    other threads are using.

    Args:
        tokenizer: a tokenizer of transformers, with a tokenizer.json.
        more: added tokens that have no meaning either, although they are no `Tags`.

    Raises:
        InputError: the tokenizer has no tokenizer.json.

    Examples:
        >>> from specjax.plain_text import PlainText
        >>> from specjax.text import encode_continuation
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> len(encode_continuation(tokenizer, "<|endoftext|>"))
        1
        >>> len(PlainText(tokenizer).encode("<|endoftext|>"))
        7
    """

    def __init__(self, tokenizer: Any, more: Collection[str] = ()) -> None:
        tags = tags_of(tokenizer)
        if tags is None:
            raise InputError(
                "tokenizer: without a tokenizer.json, special tokens in a text cannot be ignored;"
                " convert it"
            )
        from tokenizers import AddedToken, Tokenizer

        without = tags.texts | set(more)
        self._pattern = _any_of(without)
        self._ids = tags.ids | {tokenizer.convert_tokens_to_ids(text) for text in more}
        backend = tokenizer.backend_tokenizer
        self._backend = Tokenizer(backend.model)  # the vocabulary is shared, not copied
        if backend.normalizer is not None:
            self._backend.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._backend.pre_tokenizer = backend.pre_tokenizer
        added = tokenizer.added_tokens_decoder.values()
        self._backend.add_tokens([token for token in added if token.content not in without])
        # Nobody can write this token, because it is random. It stands where a text goes on.
        self._cut = f"<{secrets.token_hex(16)}>"
        self._backend.add_special_tokens([AddedToken(self._cut, normalized=False, special=True)])
        self._cut_id = self._backend.token_to_id(self._cut)

    def encode(self, text: str, begins: bool = False) -> list[int]:
        """Return the token ids of a text.

        Args:
            text: the text.
            begins: whether nothing is before the text. Some tokenizers put a space before it then.

        Raises:
            InputError: the text is not valid Unicode.
        """
        return self.encode_with_places(text, begins)[0]

    def encode_with_places(self, text: str, begins: bool = False) -> tuple[list[int], list[Span]]:
        """Return the token ids of a text as `encode`, and the part of the text of each."""
        check_unicode(text)
        before = "" if begins else self._cut
        ids, places = self._encode(before + text)
        if self._ids.isdisjoint(ids):
            return ids, places
        # The tag is in the ordinary vocabulary too, so it is cut behind its first character.
        return self._encode(
            before + self._pattern.sub(lambda tag: f"{tag[0][:1]}{self._cut}{tag[0][1:]}", text)
        )

    def _encode(self, text: str) -> tuple[list[int], list[Span]]:
        """Return the tokens of a text, and their places if nothing were cut."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        ids, places, cut = [], [], 0
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token == self._cut_id:
                cut += len(self._cut)
            else:
                ids.append(token)
                places.append((start - cut, end - cut))
        return ids, places


_PLAIN: WeakKeyDictionary[Any, tuple[Tags, PlainText]] = WeakKeyDictionary()


def encode_with_plain(
    tokenizer: Any, text: str, spans: Sequence[Span]
) -> tuple[list[int], list[Span]]:
    """Return the token ids of a text in which tags at some places are text, and their places.

    Only the text from the tag before such a place to the tag after it is encoded in another way
    than the tokenizer would.

    Args:
        tokenizer: a tokenizer of transformers, with a tokenizer.json.
        text: the text.
        spans: these places, in order.

    Examples:
        >>> from specjax.plain_text import encode_with_plain
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> ids, _ = encode_with_plain(tokenizer, "<|endoftext|>a <|endoftext|>", [(15, 28)])
        >>> ids.count(tokenizer.bos_token_id), tokenizer.decode(ids)
        (1, '<|endoftext|>a <|endoftext|>')
    """
    tags = tags_of(tokenizer)
    assert tags is not None
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, places = list(encoding["input_ids"]), list(encoding["offset_mapping"])
    ends = [end for _, end in spans]

    def is_plain(start: int, end: int) -> bool:
        index = bisect_right(ends, start)
        return index < len(spans) and spans[index][0] < end

    cuts = [i for i, token in enumerate(ids) if token in tags.ids and not is_plain(*places[i])]
    result: list[int] = []
    result_places: list[Span] = []
    first, begin = 0, 0  # of the text behind the last tag, in tokens and in characters
    for cut in [*cuts, len(ids)]:
        between, between_places = ids[first:cut], places[first:cut]
        start, end = places[cut] if cut < len(ids) else (len(text), len(text))
        if not tags.ids.isdisjoint(between):
            plain = _plain(tokenizer, tags)
            between, inside = plain.encode_with_places(text[begin:start], begins=begin == 0)
            between_places = [(begin + low, begin + high) for low, high in inside]
        result += between + ids[cut : cut + 1]
        result_places += between_places + places[cut : cut + 1]
        first, begin = cut + 1, end
    return result, result_places


def _plain(tokenizer: Any, tags: Tags) -> PlainText:
    """Return a tokenizer's plain text; it is made once for a tokenizer."""
    if (stored := _PLAIN.get(tokenizer)) is None or stored[0] is not tags:
        stored = _PLAIN[tokenizer] = tags, PlainText(tokenizer)
    return stored[1]
