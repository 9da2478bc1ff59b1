"""A test whether any target and drafter together generate text with the target's distribution.

    verdict = losslessness.check(target, drafter, tokens, lengths)
    verdict.lossless

It tests generated text, for models with any vocabulary, on any device and with any dtype.
`specjax.evaluation.conformance` tests tiny models exactly, and also the drafter's contract.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from specjax.decoding.options import as_key
from specjax.drafters.base import Drafter
from specjax.errors import InputError
from specjax.evaluation import drawn_texts, same_texts
from specjax.evaluation.conformance import SETTINGS
from specjax.evaluation.drawn_texts import DistributionResult
from specjax.evaluation.same_texts import ROWS, SameTexts
from specjax.models.transformer import Target
from specjax.progress import waiting
from specjax.sampling import Rule, Sampling

PROMPTS = (
    (
        "import os\nimport sys\n\n\nclass Error(Exception):\n    pass\n\n\ndef main(args=None):\n  "
        "  try"
    ),
    (
        'def read_config(path, encoding="utf-8"):\n    """Read the configuration file and return a'
        ' dictionary."""\n    with'
    ),
    "def walk(self, node):\n    for",
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):",
    "The capital of France is Paris. The capital of Italy is",
    "Once upon a time there was a girl who",
    "Question: A train leaves at nine and arrives at noon. How long does it take?\nAnswer:",
    "1, 1, 2, 3, 5, 8, 13,",
)
"""The default prompts: code and prose that any language model can continue."""

DRAWS = 50_000
"""The default number of sampled tokens."""


@dataclass(frozen=True)
class LosslessnessVerdict:
    """The results of the three tests.

    Attributes:
        greedy: the comparison of greedy texts with the drafter and without.
        distribution: the test of the distribution of sampled texts.
        coupled: the comparison of texts by coupled sampling with the drafter and without.
    """

    greedy: SameTexts
    distribution: DistributionResult
    coupled: SameTexts

    @property
    def lossless(self) -> bool:
        """True if all three tests pass."""
        return self.greedy.passes and self.distribution.passes and self.coupled.passes


def check(
    target: Target,
    drafter: Drafter,
    tokens: np.ndarray,
    lengths: np.ndarray | None = None,
    *,
    settings: Sequence[Sampling] = SETTINGS,
    rule: Rule | None = None,
    max_new_tokens: int = 64,
    draws: int = DRAWS,
    key: jax.Array | None = None,
) -> LosslessnessVerdict:
    """Generate texts with the drafter and without, and compare them.

    Args:
        target: the target.
        drafter: the drafter to test, with its draft shape.
        tokens: ``[P, W]`` right-padded prompts. All are used for comparisons, and the first few for
            sampling.
        lengths: ``[P]`` the length of each prompt; None if all have length W.
        settings: the sampling parameters. Most batches use the first; every fourth batch uses all
            of them, in different rows.
        rule: the verification rule of sampled texts; None for the default of the draft shape.
        max_new_tokens: the maximum number of new tokens of the texts that are compared.
        draws: the number of sampled tokens. More of them reveal smaller errors.
        key: the random key; None for ``jax.random.key(0)``.

    Raises:
        InputError: An argument is invalid, as in `specjax.generate`, or ``draws`` is too small.

    Examples:
        >>> from specjax.evaluation import losslessness
        >>> drafter = specjax.PromptLookup(draft=2)
        >>> verdict = losslessness.check(target, drafter, prompts, max_new_tokens=8, draws=2000)
        >>> verdict.lossless, verdict.greedy.passes, verdict.distribution.passes
        (True, True, True)
    """
    if draws < LEAST_DRAWS:
        raise InputError(f"draws={draws}: this is too few for a test; give at least {LEAST_DRAWS}")
    if any(setting.temperature == 0 for setting in settings):
        raise InputError(
            "settings: temperature 0 samples nothing; give others (greedy text is compared in any"
            " case)"
        )
    tokens = np.asarray(tokens)
    lengths = np.full(len(tokens), tokens.shape[1]) if lengths is None else np.asarray(lengths)
    prompts = [(tokens[i : i + ROWS], lengths[i : i + ROWS]) for i in range(0, len(tokens), ROWS)]
    greedy_key, draw_key, coupled_key = jax.random.split(as_key(key), 3)
    with waiting("measuring rounding"):
        rounding = same_texts.measure_rounding(
            target, prompts, (drafter.draft_shape.nodes,), drawn_texts.NEW_TOKENS
        )
    compare = partial(
        same_texts.compare,
        target,
        drafter,
        prompts,
        max_new_tokens=max_new_tokens,
        rounding=rounding,
    )
    greedy = compare(temperature=0.0, key=greedy_key)
    coupled = compare(temperature=settings[0].temperature, key=coupled_key)
    distribution = drawn_texts.draw_and_test(
        target,
        drafter,
        *prompts[0],
        settings=settings,
        rule=rule,
        draws=draws,
        key=draw_key,
        rounding=rounding,
    )
    return LosslessnessVerdict(greedy=greedy, distribution=distribution, coupled=coupled)


LEAST_DRAWS = 2_000
"""The minimum number of sampled tokens. Fewer would not reveal an error of a quarter."""
