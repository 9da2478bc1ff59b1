"""Run the conformance suite over every drafter for a target with layers that keep a state.

Wrong states must fail it.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters import (
    MTP,
    DFlash,
    DraftModel,
    DSpark,
    Eagle,
    Eagle3,
    EarlyExit,
    Gemma4Assistant,
    Medusa,
    MixtureOfAttentions,
    NoDraft,
    PEagle,
    PromptLookup,
    Streaming,
    Together,
    TokenRecycling,
    WithPrediction,
)
from specjax.drafts.shapes import Chain, DynamicTree, SampledTree, StaticTree
from specjax.evaluation import conformance
from specjax.models import delta_rule, linear_attention
from specjax.models.config import LinearAttention
from specjax.models.states import State
from tests.conftest import FEW_TOKENS, HYBRID, SHAPES, tiny_target
from tests.evaluation.test_conformance import LOOKED_UP, of_dflash2, of_texts

# This drafter runs the last layer of the target, which must have attention then.
OTHERWISE = {"moa": {"linear_layers": (0, 1)}}


@cache
def target_for(method: str = ""):
    return lively_hybrid(**OTHERWISE.get(method, {}))


@pytest.fixture(scope="module")
def target():
    return target_for()


FEW = FEW_TOKENS | {
    "linear": LinearAttention(key_heads=1, value_heads=2, key_dim=4, value_dim=4, kernel=3)
}


def lively_hybrid(seed: int = 0, **changes):
    """Return a hybrid whose heads forget at different paces, so that old tokens count too."""
    model = tiny_target(seed, **HYBRID | changes)
    for number in model.config.linear_layers:
        layer = model.params["layers"][number]
        layer["log_rate"] = jnp.linspace(-4.0, 0.0, layer["log_rate"].shape[0])
    return model


IDS = np.array([0, 1, 3, 4, 7, 8, 10])
METHODS = {
    "plain": lambda target, shape: NoDraft(),
    "prompt lookup": lambda target, shape: PromptLookup(draft=shape),
    "token recycling": lambda target, shape: TokenRecycling(draft=shape),
    "suffix": lambda target, shape: of_texts(shape, target.config.vocab_size),
    # Its only layer keeps a state.
    "early exit": lambda target, shape: EarlyExit(layers=1, draft=shape),
    "draft model": lambda target, shape: DraftModel(hybrid_like(target), draft=shape),
    "dense draft model": lambda target, shape: DraftModel(dense_like(target), draft=shape),
    "draft model in a ring": lambda target, shape: DraftModel(
        hybrid_like(target), draft=shape, cache=Streaming(sinks=1), budget=5
    ),
    "eagle": lambda target, shape: Eagle.init(target, jax.random.key(3), shape),
    "eagle3": lambda target, shape: Eagle3.init(
        target, jax.random.key(3), shape, ids=known_to(target)
    ),
    "mtp": lambda target, shape: MTP.init(target, jax.random.key(3), shape),
    "two modules": lambda target, shape: MTP.init(target, jax.random.key(3), shape, modules=2),
    "medusa": lambda target, shape: Medusa.init(target, jax.random.key(3), shape),
    "moa": lambda target, shape: MixtureOfAttentions.init(
        target, jax.random.key(3), shape, lsa=False, tli=1
    ),
    "peagle": lambda target, shape: PEagle.init(
        target, jax.random.key(3), shape, ids=known_to(target)
    ),
    "dflash": lambda target, shape: DFlash.init(target, jax.random.key(3), shape, block_size=4),
    "jetspec": lambda target, shape: DFlash.init(
        target, jax.random.key(3), shape, block_size=4, variant={"causal": True}
    ),
    "dspark": lambda target, shape: DSpark.init(
        target, jax.random.key(3), shape, block_size=4, markov_rank=4
    ),
    "dflash2": lambda target, shape: of_dflash2(
        target, shape, block_size=4, conv_group_size=8, selector_top_k=3
    ),
    "together": lambda target, shape: Together(
        (DraftModel(hybrid_like(target), draft=shape), PromptLookup(draft=3))
    ),
    "assistant": lambda target, shape: Gemma4Assistant.init(target, jax.random.key(3), shape),
    "prediction": lambda target, shape: WithPrediction(
        PromptLookup(draft=shape), jnp.arange(9) % 4, longest=3
    ),
}


def hybrid_like(target):
    return lively_hybrid(seed=5, **{name: getattr(target.config, name) for name in FEW})


def dense_like(target):
    return tiny_target(
        seed=5, num_layers=1, **{name: getattr(target.config, name) for name in FEW_TOKENS}
    )


def known_to(target):
    return IDS[target.config.vocab_size > IDS]


ALL = [
    (m, s)
    for m in METHODS
    for s in SHAPES
    if (m not in ("plain", "prompt lookup", "prediction") or s == "chain")
    and (m not in LOOKED_UP or s != "sampled")
]


@pytest.mark.thorough
@pytest.mark.parametrize(("method", "shape"), ALL)
def test_every_drafter_with_every_shape(method, shape) -> None:
    target = target_for(method)
    conformance.check(target, METHODS[method](target, SHAPES[shape]), come_and_go=False)


@pytest.mark.thorough
@pytest.mark.parametrize("method", METHODS)
def test_texts_of_every_drafter_may_come_and_go(method) -> None:
    target = target_for(method)
    conformance.check_rows_that_come_and_go(target, METHODS[method](target, Chain(1)))


# --- distributions --------------------------------------------------------------------------------

SMALL = {
    "chain": Chain(2),
    "static": StaticTree(((0,), (0, 0), (1,), (1, 0), (2,))),
    "dynamic": DynamicTree(top_k=3, depth=2, nodes=7),
    "sampled": SampledTree((3, 2)),
}
DRAWN_OFTEN = [("prompt lookup", "chain")]
DRAWN_WITH = ("draft model", "early exit", "mtp", "eagle3", "medusa", "dense draft model")
DRAWN = [(method, shape) for method in DRAWN_WITH for shape in SMALL]
DRAWN += [("prompt lookup", "chain"), ("moa", "sampled"), ("peagle", "static"), ("dspark", "chain")]
DRAWN += [("suffix", "chain"), ("suffix", "dynamic"), ("token recycling", "dynamic")]
DRAWN += [("together", "chain")]


def distribution_target(**changes):
    return lively_hybrid(seed=2, **FEW | changes)


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "shape"),
    [
        pytest.param(*case, marks=[pytest.mark.thorough] * (case not in DRAWN_OFTEN))
        for case in DRAWN
    ],
)
def test_three_generated_tokens_have_the_exact_joint_distribution(method, shape) -> None:
    target = distribution_target(**OTHERWISE.get(method, {}))
    conformance.check_distribution(target, METHODS[method](target, SMALL[shape]), draws=25_000)


@pytest.mark.full
def test_the_state_matters_to_the_distribution() -> None:
    """Check that the tests above depend on the state."""
    target = distribution_target()
    frozen = jax.tree.map(lambda leaf: leaf, target.params)
    frozen["layers"][0]["o"] = jnp.zeros_like(frozen["layers"][0]["o"])
    for sampling in conformance.SETTINGS:
        exact, without = (
            conformance.exact_joint(model, np.array([1, 3, 0, 1]), 3, sampling)
            for model in (target, target.replace(params=frozen))
        )
        assert 0.05 < exact.max() < 0.9 and np.abs(exact - without).sum() > 0.1


# --- states that are wrong ------------------------------------------------------------------------


def writes_a_rejected_node(append):
    def wrong(self, entry, count):
        return append(
            self, entry, jnp.where(count > 0, jnp.minimum(count + 1, entry[0].shape[2]), 0)
        )

    return wrong


def ignores_the_count(append):
    def wrong(self, entry, count):
        return append(self, entry, jnp.where(count > 0, entry[0].shape[2], 0))

    return wrong


def keeps_the_convolutions_newest(append):
    def wrong(self, entry, count):
        return replace(append(self, entry, count), newest=self.newest)

    return wrong


def forgets_nothing(append):
    def wrong(self, entry, count):
        return append(self, (entry[0], entry[1], jnp.zeros_like(entry[2]), *entry[3:]), count)

    return wrong


WRONG = [writes_a_rejected_node, ignores_the_count, keeps_the_convolutions_newest, forgets_nothing]


@pytest.mark.full
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(append, marks=[pytest.mark.thorough] * (append != writes_a_rejected_node))
        for append in WRONG
    ],
)
@pytest.mark.usefixtures("compiled_anew")
def test_a_state_that_takes_more_than_was_accepted_changes_the_text(
    monkeypatch, target, wrong
) -> None:
    monkeypatch.setattr(State, "append", wrong(State.append))
    with pytest.raises(AssertionError, match=r"greedy tokens .* are not plain decoding's"):
        conformance.check_greedy(target, PromptLookup(draft=Chain(3)))


@pytest.mark.parametrize(
    "wrong", [pytest.param(append, marks=pytest.mark.thorough) for append in WRONG]
)
@pytest.mark.usefixtures("compiled_anew")
def test_a_state_that_takes_more_than_was_accepted_fails_the_distribution(
    monkeypatch, wrong
) -> None:
    monkeypatch.setattr(State, "append", wrong(State.append))
    target = distribution_target()
    drafter = PromptLookup(draft=Chain(2))
    assert min(conformance.p_values(target, drafter, draws=25_000)) < conformance.FALSE_ALARM


@pytest.mark.full
@pytest.mark.parametrize(
    "forgotten", ["rule", pytest.param("convolution", marks=pytest.mark.thorough)]
)
@pytest.mark.usefixtures("compiled_anew")
def test_nodes_that_see_those_of_other_branches_change_the_text(
    monkeypatch, target, forgotten
) -> None:
    read, of = delta_rule.read_tree, linear_attention.Ancestry.of

    def everything(state, tokens, mask, before=None, **options):
        count = tokens.q.shape[2]
        return read(
            state,
            tokens,
            None if mask is None else jnp.tril(jnp.ones((1, count, count), bool)),
            before,
            **options,
        )

    def in_order(mask, drafted, kernel):
        ancestry = of(mask, drafted, kernel)
        return (
            ancestry
            if ancestry.newest is None
            else replace(ancestry, newest=jnp.sort(_last(ancestry.newest, kernel), axis=-1))
        )

    def _last(newest, kernel):
        count = newest.shape[1]
        return jnp.arange(kernel - 1)[None, None] + jnp.arange(count)[None, :, None]

    if forgotten == "rule":
        monkeypatch.setattr(linear_attention, "read_tree", everything)
    else:
        monkeypatch.setattr(linear_attention.Ancestry, "of", in_order)
    with pytest.raises(AssertionError, match=r"greedy tokens .* are not plain decoding's"):
        conformance.check_greedy(target, METHODS["dense draft model"](target, SHAPES["dynamic"]))
