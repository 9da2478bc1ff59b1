"""Tests of a compressed cache's gain by context and batch.

The arithmetic is tested on made-up times, the measuring on a tiny model.
"""

from dataclasses import replace

import numpy as np
import pytest

from specjax import CompressedCache, SnapKV, Streaming
from specjax.decoding.options import GenerationOptions
from specjax.drafters import DraftModel
from specjax.drafts.shapes import Chain
from specjax.errors import InputError
from specjax.planning import choice, theory
from specjax.planning.choice import Candidate, DraftComparison, TrialAcceptance, fastest_drafter
from specjax.planning.contexts import MeasuredContexts, measure_contexts
from specjax.planning.costs import Costs
from tests.conftest import tiny_target


def example() -> MeasuredContexts:
    """Return made-up measurements.

    A pass takes 10 ms for the weights, 1 ms per node and row for arithmetic, and 1 ms per 1,024
    tokens and row for keys and values.
    """

    def costs(context: int, batch: int) -> Costs:
        times = {n: 10 + n * batch + batch * context / 1024 for n in (1, 2, 4, 7)}
        return Costs(verify=times, draft_time=0.0)

    contexts, batches, budgets = (512, 4096, 32_768), (1, 4, 16), (128, 512)
    return MeasuredContexts(
        costs={(c, b): costs(c, b) for c in contexts for b in batches},
        draft_times={
            (budget, b): 10 + b + b * budget / 1024 for budget in budgets for b in batches
        },
        survival={
            (c, budget): tuple((0.8 if budget == 128 else 0.9) ** i for i in range(1, 7))
            for c in contexts
            for budget in budgets
        },
    )


def test_gains_are_magicdecs_equation() -> None:
    measured = example()
    gain = measured.gain(4096, 4, 512, 3)
    t_t, t_d, t_v = 10 + 4 + 16, 10 + 4 + 2, 10 + 4 * 4 + 16
    assert gain.tokens == pytest.approx(1 + 0.9 + 0.81 + 0.729)
    assert gain.speedup == pytest.approx(gain.tokens * t_t / (3 * t_d + t_v))
    assert gain.speedup == pytest.approx(theory.expected_tokens(0.9, 3) * t_t / (3 * t_d + t_v))


def test_more_rows_gain_more_with_long_contexts_and_less_with_short_ones() -> None:
    measured = example()

    def best(context: int) -> list[float]:
        return [measured.gains(context, batch)[0].speedup for batch in measured.batches]

    assert best(512) == sorted(best(512), reverse=True)
    assert best(32_768) == sorted(best(32_768))
    critical = measured.critical_context()
    assert critical is not None and 512 < critical < 32_768
    short = replace(
        measured, costs={key: costs for key, costs in measured.costs.items() if key[0] == 512}
    )
    assert short.critical_context() is None


@pytest.mark.thorough  # it compiles and times dozens of programs
def test_a_tiny_model_is_measured() -> None:
    texts = np.random.default_rng(0).integers(0, 11, (3, 48)).astype(np.int32)
    target = tiny_target(num_layers=1)
    options = GenerationOptions(max_new_tokens=16, eos_token_ids=())
    measured = measure_contexts(
        target,
        CompressedCache(),
        texts,
        contexts=(16, 48),
        batches=(2,),
        budgets=(8, 20),
        longest=2,
        options=options,
    )
    assert set(measured.costs) == {(16, 2), (48, 2)}
    # (16, 20) is not measured: a budget of 20 holds a whole context of 16.
    assert set(measured.survival) == {(16, 8), (48, 8), (48, 20)}
    assert all(
        len(survival) == 2 and 1 >= survival[0] >= survival[1] >= 0
        for survival in measured.survival.values()
    )
    assert all(seconds > 0 for seconds in measured.draft_times.values())
    speedups = [gain.speedup for gain in measured.gains(48, 2)]
    assert speedups == sorted(speedups, reverse=True)
    sizes = {"contexts": (49,), "batches": (1,), "budgets": (8,)}
    message = "texts: they have 48 tokens; the longest context needs 49"
    with pytest.raises(InputError, match=message):
        measure_contexts(target, CompressedCache(), texts, **sizes)


def test_auto_tries_budgets_of_a_compressed_cache(monkeypatch) -> None:
    tried = []

    def compare(target, drafter, tokens, lengths=None, **_):
        tried.append(getattr(drafter, "budget", None))
        best = Candidate(Chain(3), 2.0, 1.0, {128: 1.2, 256: 1.5, None: 1.1}.get(tried[-1], 0.9))
        return DraftComparison(TrialAcceptance((), (), {}), {}, {}, (best,))

    monkeypatch.setattr(choice, "compare_drafts", compare)
    target, texts = tiny_target(), np.ones((1, 300), np.int32)
    drafter, best = fastest_drafter(target, CompressedCache(budget=999, scheme=SnapKV()), texts)
    assert tried == [128, 256, 999]  # 512 holds the whole text; 999 is the drafter's
    assert drafter == CompressedCache(256, SnapKV(), Chain(3)) and best.speedup == 1.5
    tried.clear()
    fastest_drafter(target, CompressedCache(budget=64, scheme=Streaming()), texts[:, :100])
    assert tried == [64]  # the drafter's: all others hold the whole text
    tried.clear()
    fastest_drafter(target, CompressedCache(budget=210, scheme=SnapKV(window=200)), texts)
    assert tried == [210, 256]
    draft_model, _ = fastest_drafter(target, DraftModel(target), texts)
    assert isinstance(draft_model, DraftModel) and draft_model.draft == Chain(3)
