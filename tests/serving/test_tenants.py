"""Tenants share nothing that another tenant could notice: no pages, and no text to draft from."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.drafters import DraftModel, PromptLookup, Suffix, TokenRecycling
from specjax.drafters.text_search import RowTexts
from specjax.drafts.shapes import Chain, DynamicTree
from specjax.serving import Engine
from specjax.serving.pages import Tenant
from tests.conftest import tiny_target
from tests.serving.test_scheduler import finish, make_scheduler, pages_of, read_all

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6]
ALL_PAIRS = [
    [first, second, token] for first in range(11) for second in range(11) for token in (1, 4, 8)
]
DRAFTERS = {
    "prompt lookup": lambda target: PromptLookup(draft=3),
    "token recycling": lambda target: TokenRecycling(draft=DynamicTree(3, 3, 8)),
    "suffix": lambda target: Suffix.of_texts(
        ALL_PAIRS, least_share=0.0, draft=DynamicTree(3, 2, 10)
    ),
    "draft model": lambda target: DraftModel(tiny_target(seed=5, num_layers=1), draft=Chain(3)),
    "eagle3": lambda target: specjax.Eagle3.init(target, jax.random.key(5), draft=Chain(3)),
}
TENANTS = [Tenant(), Tenant("a"), Tenant("b"), Tenant("a", "b"), Tenant("", "a"), Tenant("ab")]


def engine(target, drafter: str) -> Engine:
    """Return an engine that always drafts, so that the accepted tokens do not depend on time."""
    served = Engine(
        target, DRAFTERS[drafter](target), rows=2, capacity=48, page=8, chunk=8, steps=4
    )
    served._loop.choice.choose = lambda *_, **__: 1
    return served


def submit(served: Engine, **options: Any) -> Any:
    return served.submit(PROMPT, max_new_tokens=20, eos_token_ids=(), seed=1, **options)


def test_each_tenant_has_prefixes_of_its_own() -> None:
    scheduler = make_scheduler(pages=64)

    def shared(tenant: Tenant) -> int:
        request = scheduler.submit(list(range(11)), max_new_tokens=2, tenant=tenant)
        read_all(scheduler)
        finish(scheduler, request)
        return request.cached

    assert [shared(tenant) for tenant in TENANTS] == [0] * len(TENANTS)
    assert [shared(tenant) for tenant in TENANTS] == [8] * len(TENANTS)


def test_rows_of_two_tenants_have_no_page_in_common() -> None:
    scheduler = make_scheduler(rows=3, pages=64)
    for tenant in (Tenant("a"), Tenant("b"), Tenant("a")):
        scheduler.submit(list(range(11)), max_new_tokens=2, tenant=tenant)
        read_all(scheduler)
    first, foreign, second = (set(pages_of(scheduler, row)) for row in range(3))
    assert not first & foreign
    assert len(first & second) == 4  # two chunks of two pages


@pytest.mark.full
@pytest.mark.thorough_except("prompt lookup", "token recycling", "eagle3")
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_text_of_another_tenant_changes_no_draft(target, name) -> None:
    """Compare a text after the same text of another tenant with one on a new engine.

    The rows are used again, so what a drafter has of the text before must not be drafted from.
    """

    def drafted(handle: Any) -> list[tuple[int, bool]]:
        """Return each token, and whether it was drafted and accepted."""
        pieces = list(handle)
        return [pair for piece in pieces for pair in zip(piece.tokens, piece.accepted, strict=True)]

    with engine(target, name) as served:
        expected = drafted(submit(served, tenant="b"))
        assert any(accepted for _, accepted in expected)
        again = submit(served, tenant="b")
        assert drafted(again) == expected
        assert again.cached_tokens == 16
    with engine(target, name) as served:
        for _ in range(2):  # in both rows
            submit(served, tenant="a").result(timeout=60)
        handle = submit(served, tenant="b")
        assert drafted(handle) == expected
        assert handle.cached_tokens == 0


def test_prompt_lookup_drafts_nothing_of_the_text_that_had_the_row_before(target) -> None:
    drafter = PromptLookup(max_ngram=2, draft=Chain(4))
    lengths = jnp.array([6, 3])
    text = np.array([[1, 2, 3, 1, 2, 3], [4, 4, 4, 0, 0, 0]])
    rng, drafts = np.random.default_rng(0), []
    for _ in range(8):
        tokens = rng.integers(0, 11, (2, 24))
        tokens[0, :6], tokens[1, :3] = text[0], text[1, :3]
        draft, _ = drafter.propose(
            target,
            RowTexts(tokens=jnp.asarray(tokens, jnp.int32), lengths=lengths),
            jnp.array([1, 4]),
            specjax.Sampling(temperature=0).rows(2, "coupled"),
            jax.random.split(jax.random.key(0), 2),
            jnp.array([True, True]),
        )
        drafts.append((draft.tokens.tolist(), np.asarray(draft.valid).tolist()))
    assert all(draft == drafts[0] for draft in drafts)
    assert drafts[0][0] == [[1, 2, 3, 1, 2], [4, 4, 4, 4, 4]]
