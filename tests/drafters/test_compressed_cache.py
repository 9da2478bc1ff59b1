"""Check which tokens a compressed cache keeps, and what the target therefore drafts over it."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import CompressedCache, DraftModel, SnapKV, Streaming, decoding
from specjax.decoding.options import GenerationOptions
from specjax.demo import OnInflated
from specjax.drafters import cache_schemes
from specjax.drafters.methods.compressed_cache import choose
from specjax.drafts.shapes import Chain, DynamicTree, StaticTree
from specjax.errors import InputError
from specjax.models.attention import by_device, plain
from specjax.models.cache import KVCache
from tests.conftest import LAYERED, MIXTURES, blocks, tiny_target

LENGTHS = np.array([60, 9, 37])
PROMPTS = np.random.default_rng(0).integers(0, 11, (3, 60)).astype(np.int32)
GREEDY = GenerationOptions(max_new_tokens=30, eos_token_ids=())


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_layers=3)


def started(target, drafter, **options):
    return decoding.start(target, drafter, PROMPTS, LENGTHS, replace(GREEDY, **options))


@pytest.mark.full
@pytest.mark.thorough_except("draft0-scheme0")
@pytest.mark.parametrize("scheme", [Streaming(), SnapKV(window=8)])
@pytest.mark.parametrize("draft", [Chain(3), StaticTree(((0,), (1,), (0, 0), (0, 0, 0)))])
def test_a_budget_that_holds_everything_drafts_the_targets_own_tokens(
    target, scheme, draft
) -> None:
    drafter = CompressedCache(budget=100, scheme=scheme, draft=draft)
    result = specjax.generate(
        target, drafter, PROMPTS, LENGTHS, max_new_tokens=32, eos_token_ids=()
    )
    np.testing.assert_array_equal(result.stats.accepted, 3 * result.stats.steps)
    assert result.stats.steps.tolist() == [8, 8, 8]


@pytest.mark.full
@pytest.mark.parametrize("steps", [0, 5])
def test_streaming_drafts_as_the_target_does_when_it_sees_only_those_tokens(target, steps) -> None:
    """Compare the first node's logits with the target's over its whole cache.

    A mask shows the target only the sinks and the ring.
    """
    drafter = CompressedCache(budget=12, scheme=Streaming(sinks=3), draft=Chain(2))
    _, state = started(target, drafter)
    state = decoding.decode(target, drafter, state, jnp.asarray(steps))
    roots = state.roots[:, None]
    drafted, _ = target.score(roots, state.drafter)
    slots = np.arange(state.cache.capacity)
    committed = np.asarray(state.cache.length)[:, None]
    visible = (slots < committed) & ((slots < 3) | (slots >= committed - 9))
    assert visible.sum(axis=1).tolist() == np.minimum(committed[:, 0], 12).tolist()
    expected, _ = target.score(
        roots,
        positions=state.cache.length[:, None],
        scratch=[(state.cache.layers, jnp.asarray(visible)[:, None])],
    )
    np.testing.assert_allclose(drafted.logits, expected.logits, atol=1e-4)


@pytest.mark.full
def test_accepted_tokens_are_copied_exactly(target) -> None:
    """Check after many steps that slots equal the target's cache at their positions bit for bit."""
    drafter = CompressedCache(
        budget=12, scheme=Streaming(sinks=3), draft=DynamicTree(top_k=3, depth=3, nodes=8)
    )
    _, state = started(target, drafter)
    state = decoding.decode(target, drafter, state, jnp.asarray(7))
    np.testing.assert_array_equal(state.drafter.length, state.cache.length)
    positions = np.asarray(state.drafter.positions_by_slot(state.drafter.length))
    for compressed, whole in zip(state.drafter.layers, state.cache.layers, strict=True):
        for row in range(3):
            slots = int(state.drafter.filled[row])
            for small, large in zip(compressed, whole, strict=True):
                np.testing.assert_array_equal(
                    small[row, :, :slots], large[row][:, positions[row, :slots]]
                )


def attention_of_last_tokens(target, row: np.ndarray, window: int) -> dict[int, np.ndarray]:
    """Return the attention that the last ``window`` tokens of a ``row`` pay to the others.

    It is computed in NumPy from the states that enter each layer when the whole row is read at
    once, and summed over all layers that read the same keys.

    Returns:
        ``[kv_heads, n - window]`` for each layer that has keys.
    """
    config, n, paid, keys = target.config, len(row), {}, {}
    _, entering, _ = target.run(target.embed(jnp.asarray(row)[None]), taps=range(config.num_layers))
    for i, params in enumerate(target.params["layers"]):
        layer, source = config.of_layer(i), config.entries_of(i)
        group = layer.num_heads // layer.num_kv_heads
        x = np.asarray(entering[0, :, i], np.float64)
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps)
        x = x / scale * np.asarray(params["input_norm"])

        def heads(name, count, x=x, params=params, layer=layer):
            y = (x @ np.asarray(params[name], np.float64)).reshape(n, count, layer.head_dim)
            half = layer.head_dim // 2
            angle = np.arange(n)[:, None] / layer.rope.theta ** (np.arange(half) / half)
            cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
            first, second = y[..., :half], y[..., half:]
            return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

        q = heads("q", layer.num_heads)
        k = heads("k", layer.num_kv_heads) if source == i else keys[source]
        keys[i], total = k, paid.setdefault(source, np.zeros((layer.num_kv_heads, n - window)))
        for head in range(layer.num_heads):
            for t in range(n - window, n):
                scores = k[: t + 1, head // group] @ q[t, head] * layer.head_dim**-0.5
                weights = np.exp(scores - scores.max())
                total[head // group] += (weights / weights.sum())[: n - window]
    return paid


@pytest.mark.full
@pytest.mark.thorough_except("16-changes1", "512-changes0")
@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize(
    ("block", "changes"), [(512, {}), (16, {}), (16, LAYERED["sharing"] | {"windowed_layers": ()})]
)
def test_snapkv_keeps_what_a_slow_reference_keeps(block, changes, monkeypatch) -> None:
    """Compare each row, layer and head; a row that fits the budget keeps everything."""
    target = tiny_target(**changes)
    for module in (by_device, plain):
        monkeypatch.setattr(module, "BLOCK", block)
    budget, window, pool = 20, 6, 5
    drafter = CompressedCache(
        budget=budget, scheme=SnapKV(window=window, pool=pool), draft=Chain(2)
    )
    _, state = started(target, drafter)
    for row, length in enumerate(LENGTHS - 1):
        whole = [np.asarray(entry[0][row]) for entry in state.cache.layers if entry]
        compressed = [np.asarray(entry[0][row]) for entry in state.drafter.layers if entry]
        if length <= budget:
            for small, large in zip(compressed, whole, strict=True):
                np.testing.assert_array_equal(small[:, :length], large[:, :length])
            continue
        for small, large, paid in zip(
            compressed,
            whole,
            attention_of_last_tokens(target, PROMPTS[row, :length], window).values(),
            strict=True,
        ):
            padded = np.pad(paid, ((0, 0), (pool // 2, pool // 2)))
            pools = [padded[:, i : i + pool] for i in range(paid.shape[1])]
            pooled = np.stack(pools, axis=1).mean(axis=-1)
            for head in range(len(paid)):
                best = np.argsort(-pooled[head], kind="stable")[: budget - window]
                margin = np.sort(pooled[head])[::-1][budget - window - 1 : budget - window + 1]
                assert margin[0] - margin[1] > 1e-6  # otherwise rounding may decide
                np.testing.assert_array_equal(
                    small[head, : budget - window], large[head, np.sort(best)]
                )
                np.testing.assert_array_equal(
                    small[head, budget - window :], large[head, length - window : length]
                )


@pytest.mark.full
def test_snapkv_has_nothing_to_choose_in_a_layer_of_an_mlp_alone() -> None:
    target = tiny_target(**blocks("*-*-"))
    drafter = CompressedCache(budget=8, scheme=SnapKV(window=3, pool=1), draft=Chain(2))
    _, state = started(target, drafter)
    assert [len(entry) for entry in state.drafter.layers] == [2, 0, 2, 0]


def test_the_choice_prefers_neighbourhoods_and_never_what_comes_later() -> None:
    share = (
        jnp.zeros((1, 1, 20))
        .at[0, 0, jnp.array([4, 5, 6, 12, 19])]
        .set(jnp.array([0.3, 0.3, 0.3, 0.5, 9.0]))
    )
    assert choose(share, jnp.array([18]), 3, pool=3)[0, 0].tolist() == [4, 5, 6]
    assert choose(share, jnp.array([18]), 4, pool=1)[0, 0].tolist() == [4, 5, 6, 12]


@pytest.mark.full
def test_after_the_prompt_snapkv_replaces_only_its_newest(target) -> None:
    drafter = CompressedCache(budget=20, scheme=SnapKV(window=6), draft=Chain(2))
    _, state = started(target, drafter)
    before = [np.asarray(entry[0]) for entry in state.drafter.layers]
    state = decoding.decode(target, drafter, state, jnp.asarray(9))
    for old, entry, whole in zip(before, state.drafter.layers, state.cache.layers, strict=True):
        new = np.asarray(entry[0])
        np.testing.assert_array_equal(new[0, :, :14], old[0, :, :14])
        length = int(state.cache.length[0])
        newest = np.asarray(whole[0])[0, :, length - 6 : length]
        assert {new[0, 0, i].tobytes() for i in range(14, 20)} == {
            newest[0, i].tobytes() for i in range(6)
        }


@pytest.mark.thorough
def test_a_draft_model_with_a_ring_is_itself_while_all_fits(target) -> None:
    model = tiny_target(seed=5, num_layers=1)
    plain = specjax.generate(
        target, DraftModel(model), PROMPTS, LENGTHS, max_new_tokens=25, eos_token_ids=()
    )
    ringed = DraftModel(model, cache=Streaming(sinks=2), budget=128)
    same = specjax.generate(target, ringed, PROMPTS, LENGTHS, max_new_tokens=25, eos_token_ids=())
    np.testing.assert_array_equal(plain.stats.histogram, same.stats.histogram)
    small = replace(ringed, budget=12)
    _, state = started(target, small)
    assert state.drafter.cache.layers[0][0].shape[2] == 12
    compressed = specjax.generate(
        target, small, PROMPTS, LENGTHS, max_new_tokens=25, eos_token_ids=()
    )
    np.testing.assert_array_equal(plain.tokens, compressed.tokens)
    assert compressed.stats.histogram.tolist() != plain.stats.histogram.tolist()


@pytest.mark.full
def test_a_draft_models_ring_holds_what_it_read(target) -> None:
    """Check that the ring holds the first and the newest of the draft model's own tokens.

    This is after chunks of a prompt and some steps. The keys of the first layer depend on nothing
    but the token and its position.
    """
    model = tiny_target(seed=5, num_layers=1)
    drafter = DraftModel(model, cache=Streaming(sinks=2), budget=12, draft=Chain(3))
    _, state = started(target, drafter)
    state = decoding.decode(target, drafter, state, jnp.asarray(6))
    ring = state.drafter.cache
    _, whole = model.forward(
        state.tokens, KVCache.create([model.config.entry_parts(0)], batch=3, capacity=128)
    )
    positions = np.asarray(ring.positions_by_slot(ring.length))
    for row in range(3):
        slots = int(ring.filled[row])
        np.testing.assert_allclose(
            ring.layers[0][0][row, :, :slots],
            whole.layers[0][0][row][:, positions[row, :slots]],
            atol=1e-5,
        )


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (CompressedCache(budget=4), r"budget=4: the 4 sinks and the newest token need 5"),
        (
            CompressedCache(budget=32, scheme=SnapKV()),
            r"budget=32: the window of 32 and one chosen token need 33",
        ),
        (CompressedCache(scheme=SnapKV(pool=4)), r"pool=4"),
        (CompressedCache(scheme=Streaming(sinks=-1)), r"sinks=-1"),
        (
            DraftModel(tiny_target(seed=5), cache=Streaming(sinks=8), budget=8),
            r"budget=8: the 8 sinks",
        ),
        (
            DraftModel(tiny_target(seed=5), cache=SnapKV()),
            r"DraftModel\(cache=SnapKV\(window=32, pool=5\)\): give Streaming",
        ),
        (
            CompressedCache(scheme="streaming"),
            r"CompressedCache\(scheme='streaming'\): give Streaming\(\) or SnapKV\(\)",
        ),
        (
            OnInflated.of(CompressedCache(), tiny_target()),
            r"OnInflated: CompressedCache keeps the target's cache",
        ),
    ],
)
def test_what_cannot_be_is_refused(target, drafter, message) -> None:
    with pytest.raises(InputError, match=message):
        started(target, drafter)


def test_latents_are_refused() -> None:
    latent = tiny_target(**MIXTURES["deepseek_v3"])
    with pytest.raises(InputError, match=r"CompressedCache.*deepseek_v3.*latents"):
        started(latent, CompressedCache())


def test_it_has_names() -> None:
    from specjax.drafters.registry import load_drafter

    config = tiny_target().config
    assert load_drafter("streaming:64", Chain(2), config) == CompressedCache(
        64, Streaming(), Chain(2)
    )
    assert load_drafter("snapkv", None, config) == CompressedCache(256, SnapKV())
    with pytest.raises(InputError, match=r"streaming:BUDGET"):
        load_drafter("streaming:many", None, config)
    assert cache_schemes.Streaming().kept(10) == 4 and cache_schemes.SnapKV(window=3).kept(10) == 7
