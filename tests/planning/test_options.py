"""Check which options of a generation planning functions refuse."""

from collections.abc import Callable
from typing import Any

import pytest

import specjax
from specjax.decoding.options import GenerationOptions
from specjax.errors import InputError
from specjax.planning.choice import (
    TrialAcceptance,
    chain_survival,
    compare_drafts,
    fastest_drafter,
    measure_acceptance,
)
from specjax.planning.contexts import measure_contexts
from specjax.planning.costs import trial_speedup
from specjax.reports.snapshot import take_snapshot

PROMPTS = [[1, 2, 3, 4, 5, 6]]
SIZES = {"contexts": (4,), "batches": (1,), "budgets": (3,)}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "compare_drafts": lambda target, drafter, **options: compare_drafts(
        target, drafter, PROMPTS, acceptance=TrialAcceptance((0.5,), (), {}), **options
    ),
    "fastest_drafter": lambda target, drafter, **options: fastest_drafter(
        target, drafter, PROMPTS, **options
    ),
    "measure_acceptance": lambda target, drafter, **options: measure_acceptance(
        target, drafter, PROMPTS, **options
    ),
    "chain_survival": lambda target, drafter, **options: chain_survival(
        target, drafter, PROMPTS, **options
    ),
    "trial_speedup": lambda target, drafter, **options: trial_speedup(
        target, drafter, PROMPTS, **options
    ),
    "measure_contexts": lambda target, drafter, **options: measure_contexts(
        target, specjax.CompressedCache(), PROMPTS, **SIZES, **options
    ),
    "take_snapshot": lambda target, drafter, **options: take_snapshot(
        target, drafter, PROMPTS[0], **options
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_decode_free_text_refuse_a_grammar(target, name) -> None:
    options = GenerationOptions(grammar=specjax.Regex("a"), max_new_tokens=4)
    with pytest.raises(InputError, match=r"decodes free text; leave out grammar"):
        FUNCTIONS[name](target, specjax.EarlyExit(layers=1), options=options)
