"""A target and a drafter of one's own, put to the test: is what comes out the target's, and nothing but the target's?

    verdict = losslessness.check(target, drafter, tokens, lengths)
    verdict.lossless

`specjax.evaluation.conformance` asks the same of tiny models, exactly, and of what a drafter owes the engine. This takes any
models, of any vocabulary, on any device and in any dtype, and asks by what is generated.
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
from specjax.evaluation.drawn_texts import Distribution
from specjax.evaluation.same_texts import ROWS, SameTexts
from specjax.models.transformer import Target
from specjax.progress import waiting
from specjax.sampling import Rule, Sampling

PROMPTS = (
    "import os\nimport sys\n\n\nclass Error(Exception):\n    pass\n\n\ndef main(args=None):\n    try",
    'def read_config(path, encoding="utf-8"):\n    """Read the configuration file and return a dictionary."""\n    with',
    "def walk(self, node):\n    for",
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):",
    "The capital of France is Paris. The capital of Italy is",
    "Once upon a time there was a girl who",
    "Question: A train leaves at nine and arrives at noon. How long does it take?\nAnswer:",
    "1, 1, 2, 3, 5, 8, 13,",
)
"""What is continued where nobody names prompts: code and prose, as any language model has read."""

DRAWS = 50_000
"""Tokens that are drawn unless told otherwise."""


@dataclass(frozen=True)
class LosslessnessVerdict:
    """What came of the three checks.

    Attributes:
        greedy: texts at temperature 0, with the drafter and without.
        distribution: of drawn texts.
        coupled: texts drawn with coupled sampling, with the drafter and without.
    """

    greedy: SameTexts
    distribution: Distribution
    coupled: SameTexts

    @property
    def lossless(self) -> bool:
        """Whether all three pass."""
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
    """Generate with the drafter and without, and compare.

    Args:
        target: the target model.
        drafter: what is put to the test, with its shape of drafts.
        tokens: ``[P, W]`` prompts, right-padded. Texts are compared for all, and the first few are drawn from.
        lengths: ``[P]``; None: all are W.
        settings: to draw texts with: mostly with the first, and in every fourth batch with all of them side by side.
        rule: of the drawn texts; None is the one that suits the shape.
        max_new_tokens: of the texts that are compared.
        draws: of tokens; the more, the smaller a fault is found.
        key: of all that is drawn; None is ``jax.random.key(0)``.

    Raises:
        InputError: an argument cannot be used, as in `specjax.generate`; or ``draws`` are too few for a test.

    Examples:
        >>> from specjax.evaluation import losslessness
        >>> verdict = losslessness.check(target, specjax.PromptLookup(draft=2), prompts, max_new_tokens=8, draws=2000)
        >>> verdict.lossless, verdict.greedy.passes, verdict.distribution.passes
        (True, True, True)
    """
    if draws < LEAST_DRAWS:
        raise InputError(f"draws={draws}: too few to tell anything; give at least {LEAST_DRAWS}")
    if any(setting.temperature == 0 for setting in settings):
        raise InputError("settings: temperature 0 draws nothing; greedy text is compared anyway")
    tokens = np.asarray(tokens)
    lengths = np.full(len(tokens), tokens.shape[1]) if lengths is None else np.asarray(lengths)
    prompts = [(tokens[i : i + ROWS], lengths[i : i + ROWS]) for i in range(0, len(tokens), ROWS)]
    greedy_key, draw_key, coupled_key = jax.random.split(as_key(key), 3)
    with waiting("measuring rounding"):
        rounding = same_texts.measure_rounding(target, prompts, (drafter.draft_shape.nodes,), drawn_texts.NEW_TOKENS)
    compare = partial(same_texts.compare, target, drafter, prompts, max_new_tokens=max_new_tokens, rounding=rounding)
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
"""Fewer could not show an error of a quarter."""
