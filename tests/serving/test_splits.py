"""The split of a union that an engine ends at, with the accepted tokens of real drafters.

Only the times are made up, so that nothing depends on the machine. In tests/serving/test_choice.py
acceptance is made up, too.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import specjax
from specjax.assets import embedded
from specjax.drafters import Suffix, Together
from specjax.drafts.shapes import Chain, DraftShape, UnionTree
from specjax.serving import Engine
from specjax.serving.choice import DraftChoice, RowResults

WHOLE = UnionTree((Chain(4), Chain(8)))
TOKENS = 64
PROSE: dict[str, Any] = {
    "prompt": '"""Read a file of measurements, and print the mean."""\n\nimport ',
    "temperature": 1.0,
}
"""A text that seldom repeats anything."""

COPYING: dict[str, Any] = {"prompt": "import os\nimport sys\n" * 10, "temperature": 0.05}
"""A text that repeats a passage of its prompt."""


class Served:
    """An engine with the embedded pair: a draft model, and a part that copies.

    Attributes:
        engine: the engine, which has one row.
        seconds: the made-up seconds of a step with each draft. A level of the draft model takes
            1 ms, and a node 0.2 ms.
    """

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.loop = engine._loop
        drafts = self.loop.choice.drafts
        few, none = WHOLE.splits[1:]
        assert drafts == (None, WHOLE, Chain(4), few, none)
        levels = [0, 4, 4, 1, 0]
        nodes = [0 if draft is None else draft.nodes - 1 for draft in drafts]
        self.seconds = [
            0.01 + 0.001 * level + 0.0002 * count
            for level, count in zip(levels, nodes, strict=True)
        ]
        record = DraftChoice.record

        def with_made_up_time(
            choice: DraftChoice, width: int, index: int, results: RowResults, **options: Any
        ) -> None:
            times = {"seconds": options["steps"] * self.seconds[index], "is_upper_bound": False}
            record(choice, width, index, results, **options | times)

        monkeypatch.setattr(DraftChoice, "record", with_made_up_time)

    def begin(self) -> DraftChoice:
        """Let the engine begin without measured acceptance, and return its choice."""
        times = {(1, index): seconds for index, seconds in enumerate(self.seconds)}
        self.loop.choice = DraftChoice(self.loop.choice.drafts, times)
        return self.loop.choice

    def write(self, text: dict[str, Any], seeds: Sequence[int], **options: Any) -> list[Any]:
        """Return the texts of some seeds, one after the other."""
        options = {"max_new_tokens": TOKENS, "eos_token_ids": (), **options}
        return [self.engine.submit(**text, seed=seed, **options).result(300) for seed in seeds]

    def rates(self, text: dict[str, Any], seeds: Sequence[int]) -> list[float]:
        """Return the real tokens per made-up second with each of the drafts alone.

        The texts must be those of plain decoding, whatever drafts.
        """
        rates, expected = [], None
        for index, draft in enumerate(self.loop.choice.drafts):
            stated = "off" if draft is None else draft
            generations = self.write(text, seeds, speculation=stated)
            texts = [generation.tokens for generation in generations]
            expected = expected or texts
            assert texts == expected
            steps = sum(generation.statistics.steps for generation in generations)
            rates.append(len(seeds) * TOKENS / steps / self.seconds[index])
        return rates


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    target = specjax.Target.from_pretrained(embedded("target"), dtype=np.float32)
    model = specjax.DraftModel.from_pretrained(embedded("draft"), dtype=np.float32, draft=Chain(4))
    union = Together((model, Suffix(draft=Chain(8))))
    tokenizer = specjax.text.load_tokenizer(embedded("target"))
    sizes: dict[str, Any] = {"rows": 1, "widths": (1,), "capacity": 512, "steps": 4, "warm": True}
    drafts = (None, WHOLE, *WHOLE.splits)
    with (
        pytest.MonkeyPatch.context() as patch,
        Engine(target, union, drafts=drafts, tokenizer=tokenizer, **sizes) as engine,
    ):
        yield Served(engine, patch)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("text", "best"),
    [
        pytest.param(PROSE, WHOLE.splits[0], id="prose"),  # no node for the part that copies
        pytest.param(COPYING, WHOLE.splits[-1], id="copying"),  # none for the draft model
    ],
)
def test_an_engine_ends_at_the_best_split_for_what_is_written(
    served: Served, text: dict[str, Any], best: DraftShape
) -> None:
    rates = served.rates(text, range(8))
    index = int(np.argmax(rates))
    assert served.loop.choice.drafts[index] == best
    assert rates[index] > 1.05 * sorted(rates)[-2]  # so that the best is no matter of chance
    choice = served.begin()
    served.write(text, range(8))
    before = Counter(choice.decisions)
    served.write(text, range(8))
    late = Counter(choice.decisions) - before
    assert late.total() > 20
    assert late[1, index] >= 0.8 * late.total()
    assert choice.rate(1, index) == pytest.approx(rates[index], rel=0.15)
