"""Run the conformance suite over every drafter with every shape of draft.

Drafters that break the contract must fail it.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from specjax import sharding
from specjax.drafters import (
    MTP,
    CompressedCache,
    DFlash,
    DFlash2,
    Drafter,
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
    SnapKV,
    Streaming,
    Suffix,
    TokenRecycling,
)
from specjax.drafters.pausable import ROOM
from specjax.drafts.shapes import Chain, DraftShape, DynamicTree, SampledTree, StaticTree
from specjax.errors import InputError
from specjax.evaluation import conformance
from specjax.models import cache, params
from specjax.sampling import Sampling
from tests.conftest import FEW_TOKENS, LAYERED, SHAPES, tiny_target
from tests.drafters.test_dflash2 import lively


def of_dflash2(target, shape, **sizes) -> DFlash2:
    return lively(DFlash2.init(target, jax.random.key(3), shape, selector_rank=4, **sizes))


def of_texts(shape: DraftShape, vocab: int = 11) -> Suffix:
    """Return a drafter with an index of texts in which all pairs of tokens occur."""
    texts = np.random.default_rng(0).integers(0, vocab, (3, 100)).tolist()
    return Suffix.of_texts(texts, least_share=0.02, samples=5, draft=shape)


METHODS = {
    "plain": lambda shape: NoDraft(),
    "draft model": lambda shape: DraftModel(tiny_target(seed=5, num_layers=1), draft=shape),
    "early exit": lambda shape: EarlyExit(layers=1, draft=shape),
    "eagle": lambda shape: Eagle.init(tiny_target(), jax.random.key(3), shape),
    "eagle3": lambda shape: Eagle3.init(
        tiny_target(), jax.random.key(3), shape, ids=np.array([0, 1, 3, 4, 7, 8, 10])
    ),
    "peagle": lambda shape: PEagle.init(
        tiny_target(), jax.random.key(3), shape, ids=np.array([0, 1, 3, 4, 7, 8, 10])
    ),
    "mtp": lambda shape: MTP.init(tiny_target(), jax.random.key(3), shape, modules=2),
    "medusa": lambda shape: Medusa.init(tiny_target(), jax.random.key(3), shape),
    "moa": lambda shape: MixtureOfAttentions.init(tiny_target(), jax.random.key(3), shape, tli=1),
    "streaming": lambda shape: CompressedCache(budget=6, scheme=Streaming(sinks=2), draft=shape),
    "snapkv": lambda shape: CompressedCache(budget=4, scheme=SnapKV(window=2, pool=3), draft=shape),
    "draft model in a ring": lambda shape: DraftModel(
        tiny_target(seed=5, num_layers=1), draft=shape, cache=Streaming(sinks=1), budget=5
    ),
    "assistant": lambda shape: Gemma4Assistant.init(tiny_target(), jax.random.key(3), shape),
    "dflash": lambda shape: DFlash.init(tiny_target(), jax.random.key(3), shape, block_size=4),
    "jetspec": lambda shape: DFlash.init(
        tiny_target(), jax.random.key(3), shape, block_size=5, variant={"causal": True}
    ),
    "dspark": lambda shape: DSpark.init(
        tiny_target(), jax.random.key(3), shape, block_size=4, markov_rank=4, markov="rnn"
    ),
    "dflash2": lambda shape: of_dflash2(
        tiny_target(), shape, block_size=4, conv_group_size=8, selector_top_k=4
    ),
    "dflash in a ring": (
        lambda shape: DFlash.init(
            tiny_target(),
            jax.random.key(3),
            shape,
            block_size=4,
            num_layers=2,
            sliding_window=3,
            windowed_layers=(1,),
        ).replace(cache=Streaming(sinks=1), budget=5)
    ),
    "prompt lookup": lambda shape: PromptLookup(draft=shape),
    "token recycling": lambda shape: TokenRecycling(draft=shape),
    "suffix": of_texts,
}
ONE_SHAPE = {"plain", "prompt lookup"}
LOOKED_UP = ("token recycling", "suffix")
ALL_CASES = [
    (method, shape)
    for method in METHODS
    for shape in SHAPES
    if (method not in ONE_SHAPE or shape == "chain")
    and (method not in LOOKED_UP or shape != "sampled")
]
# Cases whose drafts grow by code that other cases test. Every drafter and every shape is among the
# rest.
GROWN_ALIKE = [
    *[("draft model", shape) for shape in SHAPES if shape != "chain"],
    *[("early exit", shape) for shape in SHAPES if shape != "sampled"],
    *[("eagle", shape) for shape in SHAPES if shape != "static"],
    *[("eagle3", shape) for shape in SHAPES if shape != "dynamic"],
    *[("peagle", shape) for shape in SHAPES if shape != "sampled"],
    *[("mtp", shape) for shape in SHAPES if shape != "dynamic"],
    *[("medusa", shape) for shape in SHAPES if shape != "sampled"],
    *[("assistant", shape) for shape in SHAPES],  # its own tests have a tree
    *[("moa", shape) for shape in SHAPES if shape != "dynamic"],
    *[("dflash", shape) for shape in SHAPES if shape != "static"],
    *[("jetspec", shape) for shape in SHAPES],  # as dflash, except for a mask
    *[("dspark", shape) for shape in SHAPES if shape != "adaptive"],
    *[("dflash2", shape) for shape in SHAPES if shape != "sampled"],
    *[("dflash in a ring", shape) for shape in SHAPES],  # as the ring of the draft model
    *[("streaming", shape) for shape in SHAPES if shape != "chain"],
    *[("snapkv", shape) for shape in SHAPES],  # as streaming, except for the entries of a prompt
    *[("token recycling", shape) for shape in SHAPES if shape != "dynamic"],
    *[("suffix", shape) for shape in SHAPES if shape != "dynamic"],
    *[("draft model in a ring", shape) for shape in SHAPES],  # other cases test both parts
]
CASES = [
    pytest.param(*case, marks=[pytest.mark.thorough] * (case in GROWN_ALIKE)) for case in ALL_CASES
]


@pytest.mark.full_except("plain-chain")
@pytest.mark.parametrize(("method", "shape"), CASES)
@pytest.mark.represents("the conformance suite")
def test_every_drafter_with_every_shape(target, method, shape) -> None:
    conformance.check(target, METHODS[method](SHAPES[shape]), come_and_go=False)


# The memory of a drafter does not depend on the shape of its drafts. The shortest draft is compiled
# in the least time. Drafters that are not listed run every time: EAGLE-3 in
# tests/decoding/test_rows.py.
THOROUGHLY = {
    *("plain", "eagle", "eagle3", "early exit", "streaming", "snapkv", "draft model in a ring"),
    *("medusa", "moa", "prompt lookup", "assistant", "dflash", "dflash in a ring"),
    *("dflash2", "jetspec", "peagle", "token recycling", "suffix"),
}
COME_AND_GO = [
    pytest.param(method, Chain(1), marks=[pytest.mark.thorough] * (method in THOROUGHLY))
    for method in METHODS
]
COME_AND_GO += [
    pytest.param(method, SHAPES[shape], marks=pytest.mark.thorough) for method, shape in ALL_CASES
]


@pytest.mark.full
@pytest.mark.parametrize(("method", "shape"), COME_AND_GO)
def test_texts_of_every_drafter_may_come_and_go(target, method, shape) -> None:
    conformance.check_rows_that_come_and_go(target, METHODS[method](shape))


@pytest.mark.thorough  # tests/serving/test_engine.py has a mesh every time
def test_texts_come_and_go_in_every_group_of_a_mesh() -> None:
    mesh, target = sharding.make_mesh(data=2, model=2), tiny_target()
    places = params.shardings(params.declare(target.config), mesh, target.config.axis_units)
    target = target.replace(params=jax.device_put(target.params, places), mesh=mesh)
    conformance.check_rows_that_come_and_go(target, PromptLookup(draft=2))


WINDOWED = [
    pytest.param(m, marks=pytest.mark.thorough)
    for m in ("plain", "draft model", "eagle3", "streaming", "snapkv")
]


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["early exit", *WINDOWED])
def test_a_target_with_windows_is_rolled_back_like_any_other(method) -> None:
    windowed = tiny_target(num_layers=3, sliding_window=4, windowed_layers=(0, 2))
    shape = "chain" if method in ("plain", "early exit") else "dynamic"
    drafter = METHODS[method](SHAPES[shape])
    if method == "eagle3":
        drafter = Eagle3.init(windowed, jax.random.key(3), SHAPES[shape])
    conformance.check(windowed, drafter, come_and_go=method != "early exit")


OVER_LAYERS = {
    "draft model": lambda target: DraftModel.init(
        target, jax.random.key(3), SHAPES["dynamic"], num_layers=3
    ),
    "early exit": lambda target: EarlyExit(
        layers=target.config.num_layers - 1, draft=SHAPES["static"]
    ),
    "eagle3": lambda target: Eagle3.init(target, jax.random.key(3), SHAPES["chain"]),
    "moa": lambda target: MixtureOfAttentions.init(
        target, jax.random.key(3), SHAPES["chain"], lsa=False
    ),
    "streaming": lambda target: CompressedCache(
        budget=6, scheme=Streaming(sinks=2), draft=SHAPES["dynamic"]
    ),
    "snapkv": lambda target: CompressedCache(
        budget=4, scheme=SnapKV(window=2, pool=3), draft=SHAPES["chain"]
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("which", LAYERED)
@pytest.mark.parametrize("method", OVER_LAYERS)
def test_layers_of_a_target_may_differ(which, method) -> None:
    target = tiny_target(**LAYERED[which])
    conformance.check(target, OVER_LAYERS[method](target))


@pytest.mark.full
@pytest.mark.thorough_except("draft model", "early exit")
@pytest.mark.parametrize("method", ["draft model", "early exit", "eagle3", "snapkv"])
def test_greedy_text_over_layers_that_differ_and_share(method) -> None:
    target = tiny_target(**LAYERED["sharing"])
    conformance.check_greedy(target, OVER_LAYERS[method](target))


@pytest.mark.full
def test_target_layer_inference_over_layers_that_differ() -> None:
    target = tiny_target(**LAYERED["differing"])
    conformance.check_greedy(
        target,
        MixtureOfAttentions.init(target, jax.random.key(3), SHAPES["chain"], lsa=False, tli=1),
    )


SMALL = {  # two levels, which make three tokens with the bonus token
    "chain": Chain(2),
    "adaptive": Chain(2, stop_below=0.3),
    "static": StaticTree(((0,), (0, 0), (1,), (1, 0), (2,))),
    "dynamic": DynamicTree(top_k=3, depth=2, nodes=7),
    "sampled": SampledTree((3, 2)),
}
LOSSLESS = [
    ("draft model", "chain", "independent"),
    ("eagle3", "sampled", "independent"),  # a q over fewer tokens than the target has
    ("prompt lookup", "chain", "independent"),
    ("token recycling", "dynamic", "independent"),
]
# The rules have tests of their own. Here the engine must pass them what they need.
LOSSLESS += [
    pytest.param("draft model", shape, "rejection", marks=pytest.mark.thorough)
    for shape in ("chain", "adaptive")
]
OTHERS = [
    *[("draft model", shape) for shape in SMALL if shape != "chain"],
    *[("early exit", shape) for shape in ("chain", "sampled", "dynamic")],
]
OTHERS += [*[("eagle", shape) for shape in SMALL], ("eagle3", "chain"), ("eagle3", "dynamic")]
OTHERS += [
    (method, shape)
    for method in ("assistant", "dflash", "dflash2", "jetspec", "dspark", "peagle")
    for shape in SMALL
]
OTHERS += (
    [("mtp", shape) for shape in SMALL]
    + [("medusa", shape) for shape in SMALL]
    + [("moa", shape) for shape in SMALL]
)
OTHERS += [
    (method, shape)
    for method in ("streaming", "snapkv", "draft model in a ring", "dflash in a ring")
    for shape in SMALL
]
OTHERS += [(method, shape) for method in LOOKED_UP for shape in ("chain", "adaptive", "static")]
OTHERS += [("suffix", "dynamic")]  # its trees grow as those of token recycling
LOSSLESS += [
    pytest.param("suffix", shape, "coupled", marks=pytest.mark.thorough)
    for shape in ("chain", "dynamic")
]
LOSSLESS += [pytest.param(*case, "independent", marks=pytest.mark.thorough) for case in OTHERS]


def distribution_target():
    return tiny_target(seed=2, **FEW_TOKENS)


def small_drafter(method: str, shape: DraftShape) -> Drafter:
    if method == "draft model":
        return DraftModel(tiny_target(seed=5, num_layers=1, **FEW_TOKENS), draft=shape)
    alike = {"eagle": Eagle, "medusa": Medusa, "assistant": Gemma4Assistant}
    if method in alike:
        return alike[method].init(distribution_target(), jax.random.key(3), shape)
    if method == "eagle3":
        return Eagle3.init(distribution_target(), jax.random.key(3), shape, ids=np.array([0, 2, 3]))
    if method == "peagle":
        return PEagle.init(distribution_target(), jax.random.key(3), shape, ids=np.array([0, 2, 3]))
    if method == "mtp":
        return MTP.init(distribution_target(), jax.random.key(3), shape, modules=2)
    if method in ("dflash", "dflash in a ring", "jetspec"):
        variant = {"causal": method == "jetspec"}
        drafter = DFlash.init(
            distribution_target(), jax.random.key(3), shape, block_size=3, variant=variant
        )
        return drafter.replace(
            cache=Streaming(sinks=1) if method == "dflash in a ring" else None, budget=3
        )
    if method == "dflash2":  # one of the four tokens is never a candidate
        return of_dflash2(
            distribution_target(), shape, block_size=3, conv_group_size=4, selector_top_k=3
        )
    if method == "dspark":
        drafter = DSpark.init(
            distribution_target(), jax.random.key(3), shape, block_size=2, markov_rank=3
        )
        heads = {
            name: value * 50
            for name, value in drafter.params.items()
            if name.startswith(("markov", "confidence"))
        }
        return drafter.replace(params=drafter.params | heads)  # they begin almost at zero
    if method == "moa":
        return MixtureOfAttentions.init(distribution_target(), jax.random.key(3), shape, tli=1)
    if method == "draft model in a ring":
        ring = {"cache": Streaming(sinks=1), "budget": 3}
        return DraftModel(tiny_target(seed=5, num_layers=1, **FEW_TOKENS), draft=shape, **ring)
    if method in ("streaming", "snapkv"):  # smaller than the prompt of the test
        scheme = Streaming(sinks=1) if method == "streaming" else SnapKV(window=1, pool=1)
        return CompressedCache(budget=2, scheme=scheme, draft=shape)
    if method == "suffix":
        return of_texts(shape, vocab=4)
    return METHODS[method](shape)


@pytest.mark.full_except("prompt lookup-chain-independent-25000")
@pytest.mark.thorough_except("draft model-chain-independent-25000")
@pytest.mark.parametrize("draws", [25_000, pytest.param(500_000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("method", "shape", "rule"), LOSSLESS)
@pytest.mark.represents("the distribution of several tokens together")
def test_three_generated_tokens_have_the_exact_joint_distribution(
    method, shape, rule, draws
) -> None:
    target = distribution_target()
    conformance.check_distribution(
        target, small_drafter(method, SMALL[shape]), rule=rule, draws=draws
    )


@pytest.mark.full
def test_the_distributions_are_far_from_certain() -> None:
    """Check distributions: the tests above would say little about one that is nearly certain."""
    for sampling in conformance.SETTINGS:
        exact = conformance.exact_joint(distribution_target(), np.array([1, 3, 0, 1]), 3, sampling)
        assert 0.05 < exact.max() < 0.9


# --- drafters that break the contract -------------------------------------------------------------


@struct.dataclass
class Altered(DraftModel):
    """A draft model whose draft is changed."""

    def propose(self, target, state, root, sampling, keys, active):
        draft, state = super().propose(target, state, root, sampling, keys, active)
        return self.alter(draft), state

    def alter(self, draft):
        raise NotImplementedError


@struct.dataclass
class ClaimsToHaveDrawn(Altered):
    """Chosen children with a q, as if they had been drawn.

    This is the wrong pairing.
    """

    def alter(self, draft):
        q = jnp.broadcast_to(jnp.array([0.4, 0.3, 0.2, 0.1]), (*draft.tokens.shape, 4))
        return draft.replace(q=q)


@struct.dataclass
class ForgetsTheRoot(Altered):
    def alter(self, draft):
        return draft.replace(tokens=draft.tokens.at[:, 0].set(0))


@struct.dataclass
class ChildrenFirst(Altered):
    def alter(self, draft):
        return draft.replace(topology=(-1, 2, 0, 1, 3))


@struct.dataclass
class RepeatsItself(Altered):
    """Two siblings with the same token, in a tree with siblings 1 and 2."""

    draft: StaticTree = struct.field(pytree_node=False, default=StaticTree(((0,), (1,), (0, 0))))

    def alter(self, draft):
        return draft.replace(tokens=draft.tokens.at[:, 2].set(draft.tokens[:, 1]))


@struct.dataclass
class DeeperThanItSays(Altered):
    """A draft that is deeper than the depth that masks are made for."""

    draft: DynamicTree = struct.field(
        pytree_node=False, default=DynamicTree(top_k=2, depth=2, nodes=4)
    )

    def alter(self, draft):
        return draft.replace(grown=jnp.broadcast_to(jnp.arange(-1, 3), draft.tokens.shape))


@struct.dataclass
class HalfAq(Altered):
    def alter(self, draft):
        return draft if draft.q is None else draft.replace(q=draft.q / 2)


@struct.dataclass
class GrowingState(DraftModel):
    def update(self, target, state, draft, verdict, committed):
        state = super().update(target, state, draft, verdict, committed)
        return replace(state, last=state.last.astype(jnp.float32))


@struct.dataclass
class ForgetsItsNeighbours(DraftModel):
    """A draft model whose rows all draft with the first row's key."""

    def propose(self, target, state, root, sampling, keys, active):
        return super().propose(
            target, state, root, sampling, jnp.broadcast_to(keys[:, :1], keys.shape), active
        )


@pytest.mark.full
@pytest.mark.thorough_except("ForgetsTheRoot-node 0 must be the root")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ForgetsTheRoot, "node 0 must be the root"),
        (ChildrenFirst, "parents must come before"),
        (RepeatsItself, "two siblings have the same token"),
        (DeeperThanItSays, "a node deeper than 2"),
        (HalfAq, "q must sum to 1"),
        (GrowingState, "(?i)dtype"),
    ],
)
def test_a_broken_contract_is_found(target, kind, message) -> None:
    with pytest.raises(AssertionError, match=message):
        conformance.check_contract(target, kind(tiny_target(seed=5, num_layers=1)))


@pytest.mark.represents("what the conformance suite finds")
def test_rows_that_depend_on_each_other_are_found() -> None:
    # The models are less certain than elsewhere here: another key must make another draft.
    drafter = ForgetsItsNeighbours(tiny_target(seed=5, num_layers=1, scale=8.0), draft=Chain(3))
    with pytest.raises(AssertionError, match="among other rows"):
        conformance.check_rows(tiny_target(scale=8.0), drafter)


@struct.dataclass
class ForgetsPrefixStates(DraftModel):
    """A draft model whose prefix states lack the newest tokens."""

    def to_prefix_state(self, state):
        return replace(
            state, cache=replace(state.cache, length=jnp.maximum(state.cache.length - 4, 0))
        )


@struct.dataclass
class MisreadsACount(DraftModel):
    """A draft model that keeps one token when it catches up, however many count."""

    def update(self, target, state, draft, verdict, committed):
        if committed.tokens.shape[1] == ROOM:
            committed = replace(committed, count=jnp.minimum(committed.count, 1))
        return super().update(target, state, draft, verdict, committed)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ForgetsPrefixStates, "that continues from a prefix state differ"),
        (MisreadsACount, "catches up after several paused steps"),
    ],
)
def test_what_is_forgotten_where_texts_come_and_go_is_found(kind, message) -> None:
    model = tiny_target(num_layers=1)  # it drafts for itself, so that a lack shows at once
    with pytest.raises(AssertionError, match=message):
        conformance.check_rows_that_come_and_go(model, kind(model, draft=Chain(1)))


@pytest.mark.full
@pytest.mark.usefixtures("compiled_anew")
def test_a_cache_that_writes_to_the_last_page_where_it_has_none_is_found(monkeypatch) -> None:
    drop = cache._set_paged

    def write(pool, pages, places, values):
        return drop(pool, jnp.where(pages < pool.shape[0], pages, -1), places, values)

    monkeypatch.setattr(cache, "_set_paged", write)
    with pytest.raises(AssertionError, match="is not plain decoding's"):
        conformance.check_rows_that_come_and_go(tiny_target(num_layers=1), NoDraft())


@pytest.mark.thorough  # a mutant of tests/decoding/test_verification.py has the same pairing
def test_the_wrong_pairing_fails_the_distribution() -> None:
    model = small_drafter("draft model", Chain(1)).model
    drafter = ClaimsToHaveDrawn(model, draft=SMALL["dynamic"])
    assert (
        max(conformance.p_values(distribution_target(), drafter, draws=25_000))
        < conformance.FALSE_ALARM
    )


def test_one_wrong_setting_fails_and_is_named(monkeypatch) -> None:
    monkeypatch.setattr("specjax.evaluation.exact.p_values", lambda *_, **__: [1e-8, 2e-10])
    with pytest.raises(
        AssertionError,
        match=r"top_p=0.9.*: this is not the target's distribution: a G-test .* p = 2.0e-10",
    ):
        conformance.check_distribution(distribution_target(), NoDraft(), draws=7)
    conformance.check_distribution(distribution_target(), NoDraft(), false_alarm=1e-10)


def test_p_values_of_exact_draws_are_as_common_as_they_say() -> None:
    """Check distributions with many rare outcomes, too, and few draws.

    The test notices 2% more of one outcome in five.
    """
    rng = np.random.default_rng(0)
    for exact, draws in (
        (rng.dirichlet(np.full(125, 0.3)), 25_000),
        (np.array([0.2, 0.5, 0.3, 0.0]), 50_000),
    ):
        p_values = np.array(
            [conformance.g_test(counts, exact) for counts in rng.multinomial(draws, exact, 4_000)]
        )
        for level in (0.01, 0.1, 0.5, 0.9):
            deviation = np.sqrt(level * (1 - level) / len(p_values))
            assert np.mean(p_values < level) == pytest.approx(level, abs=5 * deviation)
        more = exact * np.where(np.arange(len(exact)) % 5, 1.0, 1.02)
        assert (
            conformance.g_test(rng.multinomial(10_000_000, more / more.sum()), exact)
            < conformance.FALSE_ALARM
        )


def test_a_draw_of_what_is_impossible_has_no_chance_and_a_certain_one_tells_nothing() -> None:
    exact = np.array([0.0, 1.0, 0.0])
    assert conformance.g_test(np.array([0, 1000, 0]), exact) == 1.0
    assert conformance.g_test(np.array([0, 999, 1]), exact) == 0.0
    # Outcomes that are too rare count as one, and together with the next one if that is still too
    # rare.
    assert conformance.g_test(np.array([1, 1, 998]), np.array([0.001, 0.001, 0.998])) == 1.0


def test_a_vocabulary_too_large_to_enumerate_is_refused() -> None:
    with pytest.raises(InputError, match="target has 30 tokens"):
        conformance.check_distribution(tiny_target(vocab_size=30), NoDraft())


@pytest.mark.full
def test_keys_matter(target) -> None:
    """Check that texts are random: the row check would be empty otherwise."""
    drafter = DraftModel(tiny_target(seed=5, num_layers=1), draft=SHAPES["sampled"])
    import specjax

    def run(seed: int):
        return specjax.generate(
            target, drafter, [[1, 2]], sampling=Sampling(temperature=1.5), key=jax.random.key(seed)
        ).tokens

    assert not np.array_equal(run(0), run(1))
