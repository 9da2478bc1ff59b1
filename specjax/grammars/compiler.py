"""Compilation of grammars for a tokenizer."""

from dataclasses import dataclass, field
from typing import Any

from specjax.errors import InputError
from specjax.grammars.grammar import Grammar
from specjax.grammars.matcher import Matcher


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
        return Matcher(template, self.vocab_size, self._end_ids, stop_token_ids, self._lacks_bytes)


class GrammarCompiler:
    """Compiles grammars for one tokenizer, each of them once.

    Building it takes 0.03 s for 3,000 tokens and 3 s for 130,000. Compiled grammars are cached.

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
        from llguidance import LLTokenizer

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise InputError(
                f"grammar: it needs a fast tokenizer (tokenizer.json), not {type(tokenizer).__name__}"
            )
        # A copy: padding and truncation are settings of the tokenizer that others use.
        copied = type(backend).from_str(backend.to_str())
        copied.no_padding()
        copied.no_truncation()
        end_id = getattr(tokenizer, "eos_token_id", None)
        try:
            self._tokenizer = LLTokenizer(copied.to_str(), n_vocab=vocab_size, eos_token=end_id)
        except ValueError as error:
            raise InputError(f"grammar: this tokenizer is not supported: {error}") from None
        self._vocab_size = vocab_size
        self._lacks_bytes = not all(map(self._can_write, range(0xF5)))  # the bytes of UTF-8
        self._compiled: dict[Grammar, CompiledGrammar] = {}

    def _can_write(self, byte: int) -> bool:
        """Return whether the tokenizer has a token for a byte."""
        text = bytes([byte])
        return self._tokenizer.decode_bytes(self._tokenizer.tokenize_bytes(text)) == text

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Return the compiled grammar.

        Raises:
            InputError: the grammar is wrong, or has a part that is not supported. The message
                names it.
        """
        if not isinstance(grammar, Grammar):
            raise InputError(
                f"grammar={grammar!r}: give specjax.JsonSchema(...), Regex, Choice, Lark or"
                " JsonObject"
            )
        if grammar not in self._compiled:
            self._compiled[grammar] = self._compile(grammar)
        return self._compiled[grammar]

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        from llguidance import LLMatcher

        template = LLMatcher(self._tokenizer, grammar.source, log_level=0)
        if not template.is_error():
            # Some errors, such as cycles of references, appear with the first mask only.
            template.compute_bitmask()
        if template.is_error():
            raise InputError(f"grammar={grammar!r}: {_first_line(template.get_error())}")
        end_ids = tuple(self._tokenizer.eos_tokens)
        compiled = CompiledGrammar(grammar, self._vocab_size, template, end_ids, self._lacks_bytes)
        matcher = compiled.matcher(stop_token_ids=())
        if matcher.is_stuck:
            raise InputError(f"grammar={grammar!r}: no text satisfies it")
        return compiled


def _first_line(error: str) -> str:
    return error.strip().splitlines()[0] if error.strip() else "llguidance refuses it"
