"""Draft for a target with another tokenizer: with the tokens that both vocabularies have.

The method is token-level intersection (Timor et al. 2025, arXiv 2502.05202). The drafter's logits
are reduced to the tokens that the target has too. Their softmax is a distribution over the target's
tokens, so every verification rule stays exact. The drafter's input is translated token by token,
although its own tokenizer might split the text in another way. Both lower the acceptance, but never
change the output's distribution.
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
"""The value that allows two tokenizers with any overlap."""

LEAST_OVERLAP = 0.5
"""The smallest allowed share of the smaller vocabulary, unless the user asks for "intersect"."""


@struct.dataclass
class SharedVocabulary:
    """The tokens that a target and a draft model both have, with the ids in both vocabularies.

    Attributes:
        to_draft: ``[R]`` int32, what the draft model reads for each of the target's ids. It is the
            draft model's id of the same token. If the draft model lacks the token, it is the id of
            the longest token that the target's token ends with. For special tokens, and for ids
            from R on, it is `unknown`.
        columns: ``[Vd]`` int32, the draft model's ids of the shared tokens.
        ids: ``[Vd]`` int32, the target's ids of the same tokens, ascending. Both have no
            duplicates.
        unknown: static, the id that the draft model reads for a token that it lacks.
        sizes: static, the number of different tokens of the target and of the draft model. Tokens
            with the same text count once.
        least: static, the smallest vocabulary sizes of target and draft model that include all of
            these ids.

    Examples:
        >>> from specjax.drafters.shared_vocabulary import SharedVocabulary
        >>> from specjax.vocabularies import VocabularyTokens, texts_of
        >>> target = VocabularyTokens(texts_of({"Ġthe": 0, "Ġcats": 1, "Ċ": 2}), {})
        >>> draft = VocabularyTokens(texts_of({"<0x0A>": 0, "▁the": 1, "s": 2}), {}, unknown=3)
        >>> shared = SharedVocabulary.of(target, draft)
        >>> shared.narrow(jnp.array([0.25, 0.5, 0.75, 1.0]))  # " the" and a line end
        Array([0.5 , 0.25], dtype=float32)
        >>> shared.read(jnp.array([2, 1, 7]))  # a line end, the end of " cats", and an unknown id
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
        """Return the shared vocabulary of two tokenizers.

        Raises:
            InputError: They have no token in common.
        """
        shared = vocabularies.shared_tokens(target, draft)
        if shared.keys() <= target.special:
            raise InputError(
                "tokenizers: target and drafter have no token in common: take a drafter of the"
                " target's family"
            )
        ids, columns = (
            np.fromiter(token_ids, np.int32) for token_ids in (shared.keys(), shared.values())
        )
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
        """The share of the shared tokens in the smaller vocabulary, from 0 to 1."""
        return self.ids.shape[0] / min(self.sizes)

    def __str__(self) -> str:
        count, (target, draft) = self.ids.shape[0], self.sizes
        shares = (
            f"{count / draft:.0%} of the drafter's {draft:,}, {count / target:.0%} of the target's"
            f" {target:,}"
        )
        return f"{count:,} tokens that both have: {shares}"

    def check(self, draft: ModelConfig, target: ModelConfig) -> None:
        """Raise an InputError if one of the two models lacks some of the ids."""
        for name, config, least in (
            ("target", target, self.least[0]),
            ("drafter", draft, self.least[1]),
        ):
            if config.vocab_size < least:
                raise InputError(
                    f"tokenizer: {name} has a vocabulary of {config.vocab_size} tokens, but its"
                    f" tokenizer has an id {least - 1}: give the target's own tokenizer"
                )

    def vocabulary(self, size: int) -> Vocabulary:
        """Return the vocabulary of logits from `narrow`; ``size`` is the target's V."""
        return Vocabulary(ids=self.ids, size=size)

    def read(self, tokens: jax.Array) -> jax.Array:
        """Translate the target's ``tokens`` to the ids that the draft model reads."""
        return self.to_draft.at[tokens].get(mode="fill", fill_value=self.unknown)

    def narrow(self, logits: jax.Array) -> jax.Array:
        """Select the logits ``[..., Vd]`` of the shared tokens from those of the draft model."""
        return jnp.take(logits, self.columns, axis=-1)


def share(
    target: Any,
    draft: Any,
    allowed: Asked | None = None,
    sizes: tuple[int | None, int | None] = (None, None),
) -> SharedVocabulary | None:
    """Return the vocabulary that the tokenizers of a target and of a draft model share.

    It is None if the tokenizers are equal. Otherwise a line on the terminal says how much they
    share.

    Args:
        target: the target's tokenizer, of transformers.
        draft: the draft model's tokenizer.
        allowed: "intersect" allows any overlap; None requires half of the smaller vocabulary.
        sizes: the vocabulary sizes of the two models, if known, because a tokenizer may have more
            ids.

    Raises:
        InputError: They share too little.

    Examples:
        >>> from specjax.assets import embedded
        >>> from specjax.drafters.shared_vocabulary import share
        >>> tokenizer = specjax.text.load_tokenizer(embedded("target"))
        >>> share(tokenizer, specjax.text.load_tokenizer(embedded("draft")))  # equal: None
    """
    if text.difference(target, draft) is None:
        return None
    shared = SharedVocabulary.of(
        VocabularyTokens.of(target, sizes[0]), VocabularyTokens.of(draft, sizes[1])
    )
    if allowed is None and shared.overlap < LEAST_OVERLAP:
        raise InputError(
            f"tokenizers: {shared}. Below {LEAST_OVERLAP:.0%} of the smaller vocabulary few drafts"
            " are accepted: take a drafter of the target's family, or ask for this one by name,"
            ' --drafter draft-model-intersect:WHERE (vocabulary="intersect" in Python)'
        )
    progress.say(f"tokenizers differ: drafting with {shared}", unasked=allowed is None)
    return shared
