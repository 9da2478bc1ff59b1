"""Compilation of grammars for a tokenizer."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from specjax.errors import InputError
from specjax.grammars.check_process import ROW_LIMITS, build_tokenizer, compile_source, first_line
from specjax.grammars.grammar import Grammar, check_grammar
from specjax.grammars.matcher import Matcher
from specjax.grammars.structure import AddedTokens, tokenized_source

MAX_COMPILED = 128
"""The number of compiled grammars that a compiler keeps: those that were used last."""

MAX_COMPILED_MEGABYTES = 1000.0
"""The memory that these may take in all, in megabytes of 10**6 bytes, as far as it is known."""


@dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """A grammar that is compiled for a tokenizer. `GrammarCompiler.compile` makes it.

    Attributes:
        grammar: the grammar.
        vocab_size: the number of tokens of the target.

    Examples:
        >>> import specjax
        >>> generate = specjax.load("embedded", "embedded:eagle3")
        >>> compiled = generate.grammar_compiler.compile(specjax.Regex("[0-9]{3}"))
        >>> prompt = [generate.encode("x = ")]
        >>> result = specjax.generate(generate.target, None, prompt, grammar=compiled)
        >>> output = result.tokens[0, len(prompt[0]) : result.lengths[0] - 1]
        >>> text = generate.tokenizer.decode(output)
        >>> len(text), text.isdigit(), result.grammar_completed.tolist()
        (3, True, [True])
    """

    grammar: Grammar
    vocab_size: int
    _template: Any = field(repr=False)
    _end_ids: tuple[int, ...] = field(repr=False)
    _lacks_bytes: bool = field(repr=False)

    def matcher(self, stop_token_ids: tuple[int, ...]) -> Matcher:
        """Return a matcher for one text, which these token ids end."""
        template = self._template.deep_copy()
        return Matcher(
            template,
            self.vocab_size,
            self._end_ids,
            stop_token_ids,
            self._lacks_bytes,
            compiled=self,
        )


class GrammarCompiler:
    """Compiles grammars for one tokenizer, each of them once.

    Building it takes 0.03 s for 3,000 tokens and 3 s for 130,000. The grammars that were used last
    are kept, at most `MAX_COMPILED`. If their sizes are stated, they take at most
    `MAX_COMPILED_MEGABYTES`, or the last one is larger. Any thread may call `compile`. Threads that
    need the same grammar at a time compile it once.

    Args:
        tokenizer: a fast tokenizer of transformers.
        vocab_size: the number of tokens of the target. Ids that the tokenizer does not know are
            never legal.

    Raises:
        InputError: grammars are not supported for this tokenizer.

    Examples:
        >>> import specjax
        >>> from specjax.grammars import GrammarCompiler
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> compiled = GrammarCompiler(tokenizer, 3072).compile(specjax.Choice(["yes", "no"]))
        >>> matcher = compiled.matcher(stop_token_ids=(0,))
        >>> matcher.append(tokenizer.encode("yes", add_special_tokens=False))
        >>> matcher.is_complete
        True
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """Build llguidance's tokenizer."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise InputError(
                f"grammar: it needs a fast tokenizer (tokenizer.json), not"
                f" {type(tokenizer).__name__}"
            )
        # A copy: padding and truncation are settings of the tokenizer that others use.
        copied = type(backend).from_str(backend.to_str())
        copied.no_padding()
        copied.no_truncation()
        end_id = getattr(tokenizer, "eos_token_id", None)
        added = backend.get_added_tokens_decoder()
        self._contents = {index: token.content for index, token in added.items()}
        self._known_ids = sorted(backend.get_vocab(with_added_tokens=False).values())
        text = copied.to_str()
        self._build(text, vocab_size, end_id)
        self._recipe = {"tokenizer": text, "vocab_size": vocab_size, "end_id": end_id}

    @classmethod
    def of_tokens(cls, tokens: Sequence[bytes], end_id: int) -> "GrammarCompiler":
        """Return a compiler for a vocabulary without a tokenizer, whose tokens have these bytes.

        Forced text is written with the longest tokens that fit.

        Args:
            tokens: ``[V]`` the bytes of each token.
            end_id: the token that ends a text.

        Examples:
            >>> import specjax
            >>> from specjax.grammars import GrammarCompiler
            >>> compiler = GrammarCompiler.of_tokens([b"a", b"b", b"ab", b""], end_id=3)
            >>> compiler.compile(specjax.Regex("(ab)*c?a")).matcher((3,)).mask().tolist()
            [5]
        """
        from llguidance import TokenizerWrapper

        compiler = cls.__new__(cls)
        compiler._contents = {}
        compiler._known_ids = [index for index, token in enumerate(tokens) if token]
        compiler._build(TokenizerWrapper(_Tokens(tokens, end_id)), len(tokens), end_id)
        return compiler

    @property
    def recipe(self) -> dict[str, Any] | None:
        """The arguments of `check_process.build_tokenizer`; None if JSON cannot hold them."""
        return self._recipe

    def _build(self, tokenizer: Any, vocab_size: int, end_id: int | None) -> None:
        try:
            self._tokenizer = build_tokenizer(tokenizer, vocab_size, end_id)
        except ValueError as error:
            raise InputError(f"grammar: this tokenizer is not supported: {error}") from None
        self._vocab_size = vocab_size
        self._recipe: dict[str, Any] | None = None
        self._compiled: dict[_Key, tuple[CompiledGrammar, float]] = {}  # with its megabytes
        self._running: dict[_Key, Future[CompiledGrammar]] = {}
        self._lock = threading.Lock()
        self._lacks_bytes = not all(map(self._can_write, range(0xF5)))  # the bytes of UTF-8

    def _can_write(self, byte: int) -> bool:
        """Return whether the tokenizer has a token for a byte."""
        text = bytes([byte])
        return self._tokenizer.decode_bytes(self._tokenizer.tokenize_bytes(text)) == text

    def compile(
        self, grammar: Grammar, *, is_bounded: bool = False, megabytes: float = 0.0
    ) -> CompiledGrammar:
        """Return the compiled grammar.

        Args:
            grammar: the grammar.
            is_bounded: whether a text ends with a `specjax.errors.GrammarLimitError` where a mask
                would take more than some 10 ms, as in an engine. It bounds the size of very large
                grammars, too.
            megabytes: the memory that the compiled grammar takes, as `GrammarChecker.check` returns
                it. It counts for `MAX_COMPILED_MEGABYTES`.

        Raises:
            InputError: the grammar is wrong, or has a part that is not supported. The message
                names it.
        """
        check_grammar(grammar)
        key = grammar, is_bounded
        with self._lock:
            if (before := self._compiled.pop(key, None)) is not None:
                compiled, size = before
                self._keep(key, compiled, max(size, megabytes))
                return compiled
            running = self._running.get(key)
            if is_first := running is None:
                running = self._running[key] = Future()
        if not is_first:
            return running.result()  # another thread compiles it
        try:
            compiled = self._compile(*key)
        except BaseException as error:
            with self._lock:
                del self._running[key]
            running.set_exception(error)
            raise
        with self._lock:
            del self._running[key]
            self._keep(key, compiled, megabytes)
        running.set_result(compiled)
        return compiled

    def compiled(self, grammar: Grammar, *, is_bounded: bool = False) -> CompiledGrammar | None:
        """Return what `compile` returns if it is there already; None: it must be compiled.

        Examples:
            >>> import specjax
            >>> from specjax.grammars import GrammarCompiler
            >>> compiler = GrammarCompiler(specjax.load("embedded").tokenizer, 3072)
            >>> compiler.compiled(specjax.Regex("[0-9]")) is None
            True
        """
        with self._lock:
            if (before := self._compiled.pop((grammar, is_bounded), None)) is None:
                return None
            self._compiled[grammar, is_bounded] = before  # the newest is the last
            return before[0]

    def _keep(self, key: "_Key", compiled: CompiledGrammar, megabytes: float) -> None:
        """Keep a grammar as the newest, and forget the oldest beyond the bounds. Needs the lock."""
        self._compiled[key] = compiled, megabytes
        in_all = sum(size for _, size in self._compiled.values())
        while len(self._compiled) > 1 and (
            len(self._compiled) > MAX_COMPILED or in_all > MAX_COMPILED_MEGABYTES
        ):
            _, size = self._compiled.pop(next(iter(self._compiled)))
            in_all -= size

    def source(self, grammar: Grammar) -> str:
        """Return a grammar in the form that llguidance reads, for this tokenizer.

        Raises:
            InputError: the grammar cannot be written for this tokenizer. The message says why.
        """
        try:
            return tokenized_source(grammar.source, self._added_tokens)
        except InputError as error:
            raise InputError(f"grammar={grammar!r}: {error}") from None

    @cached_property
    def _added_tokens(self) -> AddedTokens:
        """The tokens that llguidance does not take for text: added ones, and bytes 0xFF."""
        contents = {
            index: content
            for index, content in self._contents.items()
            if index < self._vocab_size
            and index not in self._tokenizer.eos_tokens
            and self._tokenizer.is_special_token(index)
        }
        raw = [
            index
            for index in self._known_ids
            if index < self._vocab_size
            and index not in self._contents
            and index not in self._tokenizer.eos_tokens
            and self._tokenizer.is_special_token(index)
        ]
        return AddedTokens(contents, raw)

    def _compile(self, grammar: Grammar, is_bounded: bool) -> CompiledGrammar:
        limits = ROW_LIMITS if is_bounded else None
        template = compile_source(self._tokenizer, self.source(grammar), limits)
        if template.is_error():
            raise InputError(f"grammar={grammar!r}: {first_line(template.get_error())}")
        end_ids = tuple(self._tokenizer.eos_tokens)
        compiled = CompiledGrammar(grammar, self._vocab_size, template, end_ids, self._lacks_bytes)
        matcher = compiled.matcher(stop_token_ids=())
        if matcher.is_stuck:
            raise InputError(f"grammar={grammar!r}: no text satisfies it")
        return compiled


_Key = tuple[Grammar, bool]
"""A grammar, and whether it is bounded."""


class _Tokens:
    """A vocabulary in the form that llguidance reads."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], end_id: int) -> None:
        self.tokens = list(tokens)
        self.eos_token_id, self.special_token_ids = end_id, [end_id]
        self._ids = {token: index for index, token in enumerate(tokens) if token}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes) -> list[int]:
        """Return the ids of a text, by the longest match. Bytes without a token are left out."""
        ids, start = [], 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), None)
            if end is not None:
                ids.append(self._ids[text[start:end]])
            start = start + 1 if end is None else end
        return ids
