"""Drafting for a target whose tokenizer is another one: with the tokens that both vocabularies have.

Token-level intersection (Timor et al. 2025, arXiv 2502.05202). The drafter's logits are cut to the tokens that the target has
too, and what is left of them is a distribution over the target's tokens like any other drafter's: every rule of verification is
as exact as ever. What the drafter reads is translated token by token, where its own tokenizer might cut the text otherwise. It
costs acceptance alone, never the distribution.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import progress, text, vocabularies
from specjax.drafters.candidates import Vocabulary
from specjax.errors import InputError
from specjax.models.config import ModelConfig
from specjax.vocabularies import VocabularyTokens

Asked = Literal["intersect"]
"""What may be asked for where the tokenizers differ."""

LEAST_OVERLAP = 0.5
"""The share of the smaller vocabulary below which a drafter is refused, unless it is asked for by name."""


@struct.dataclass
class SharedVocabulary:
    """The tokens that a target and a draft model both have, and how each of them numbers them.

    Attributes:
        to_draft: ``[R]`` int32, what the draft model reads for each of the target's ids: its own id of the same token; where it
            lacks the token, of the longest end of it; for special tokens and ids from R on, `unknown`.
        columns: ``[Vd]`` int32, its ids of the shared tokens.
        ids: ``[Vd]`` int32, the target's ids of the same tokens, ascending; no two alike, in neither.
        unknown: static, the id that it reads for what it lacks.
        sizes: static, how many tokens the target has, and how many the draft model; several with one text are one.
        least: static, the smallest vocabularies of two models that have all of these ids.

    Examples:
        >>> from specjax.drafters.shared_vocabulary import SharedVocabulary
        >>> from specjax.vocabularies import VocabularyTokens, texts_of
        >>> target = VocabularyTokens(texts_of({"Ġthe": 0, "Ġcats": 1, "Ċ": 2}), {})
        >>> draft = VocabularyTokens(texts_of({"<0x0A>": 0, "▁the": 1, "s": 2}), {}, unknown=3)
        >>> shared = SharedVocabulary.of(target, draft)
        >>> shared.narrow(jnp.array([0.25, 0.5, 0.75, 1.0]))  # " the" and a line end
        Array([0.5 , 0.25], dtype=float32)
        >>> shared.read(jnp.array([2, 1, 7]))  # a line end, the end of " cats", and what it has never seen
        Array([0, 2, 3], dtype=int32)
        >>> print(shared)
        2 tokens that both have: 67% of the drafter's 3, 67% of the target's 3
    """

    to_draft: jax.Array
    columns: jax.Array
    ids: jax.Array
    unknown: int = struct.field(pytree_node=False)
    sizes: tuple[int, int] = struct.field(pytree_node=False)
    least: tuple[int, int] = struct.field(pytree_node=False)

    @classmethod
    def of(cls, target: VocabularyTokens, draft: VocabularyTokens) -> "SharedVocabulary":
        """Of the tokens of two tokenizers. Raises `InputError` where they share no text."""
        shared = vocabularies.shared_tokens(target, draft)
        if shared.keys() <= target.special:
            raise InputError("tokenizers: target and drafter have no token in common: take a drafter of the target's family")
        ids, columns = (np.fromiter(each, np.int32) for each in (shared.keys(), shared.values()))
        read = vocabularies.read_as(target, draft)
        to_draft = np.full(max(read) + 1, draft.unknown, np.int32)
        to_draft[list(read.keys())] = list(read.values())
        return cls(
            to_draft=jnp.asarray(to_draft),
            columns=jnp.asarray(columns),
            ids=jnp.asarray(ids),
            unknown=draft.unknown,
            sizes=(len(target), len(draft)),
            least=(int(ids.max()) + 1, max(int(to_draft.max()), draft.unknown) + 1),
        )

    @property
    def overlap(self) -> float:
        """The share of the smaller of the two vocabularies, from 0 to 1."""
        return self.ids.shape[0] / min(self.sizes)

    def __str__(self) -> str:
        count, (theirs, own) = self.ids.shape[0], self.sizes
        of_each = f"{count / own:.0%} of the drafter's {own:,}, {count / theirs:.0%} of the target's {theirs:,}"
        return f"{count:,} tokens that both have: {of_each}"

    def check(self, own: ModelConfig, target: ModelConfig) -> None:
        """Refuse, with an InputError, models that lack some of the ids."""
        for name, config, least in (("target", target, self.least[0]), ("drafter", own, self.least[1])):
            if config.vocab_size < least:
                raise InputError(
                    f"tokenizer: {name} has a vocabulary of {config.vocab_size} tokens, and its tokenizer was said to have an "
                    f"id {least - 1}: give the target's own tokenizer"
                )

    def vocabulary(self, size: int) -> Vocabulary:
        """That of narrowed logits; ``size`` is the target's V."""
        return Vocabulary(ids=self.ids, size=size)

    def read(self, tokens: jax.Array) -> jax.Array:
        """What the draft model reads for the target's ``tokens``."""
        return self.to_draft.at[tokens].get(mode="fill", fill_value=self.unknown)

    def narrow(self, logits: jax.Array) -> jax.Array:
        """``[..., Vd]`` those of the draft model's ``logits [..., own V]`` that the target has a token for."""
        return jnp.take(logits, self.columns, axis=-1)


def share(
    target: Any,
    draft: Any,
    asked: Asked | None = None,
    sizes: tuple[int | None, int | None] = (None, None),
) -> SharedVocabulary | None:
    """What the tokenizers of a target and of a draft model share; None where they are one. Says it in a line.

    Args:
        target: a tokenizer of transformers.
        draft: another.
        asked: "intersect" takes any overlap, and None no less than half of the smaller vocabulary.
        sizes: of the two models' vocabularies, where they are known: their tokenizers may have more ids.

    Raises:
        InputError: they share too little.

    Examples:
        >>> from specjax.assets import embedded
        >>> from specjax.drafters.shared_vocabulary import share
        >>> tokenizer = specjax.text.load_tokenizer(embedded("target"))
        >>> share(tokenizer, specjax.text.load_tokenizer(embedded("draft")))  # one tokenizer
    """
    if text.difference(target, draft) is None:
        return None
    shared = SharedVocabulary.of(*(VocabularyTokens.of(each, size) for each, size in zip((target, draft), sizes, strict=True)))
    if asked is None and shared.overlap < LEAST_OVERLAP:
        raise InputError(
            f"tokenizers: {shared}. Below {LEAST_OVERLAP:.0%} of the smaller vocabulary few drafts are accepted: take a "
            "drafter of the target's family, or ask for this one by name, --drafter draft-model-intersect:WHERE "
            '(vocabulary="intersect" in Python)'
        )
    progress.say(f"tokenizers differ: drafting with {shared}", unasked=asked is None)
    return shared
