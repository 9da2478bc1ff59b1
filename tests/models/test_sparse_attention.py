"""Sparse attention: what an indexer selects, in a text, in pieces, in pages and in trees."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

import specjax
from specjax import sharding
from specjax.drafters import DraftModel, EarlyExit
from specjax.errors import InputError
from specjax.models import config_json, params
from specjax.models.attention import BLOCK, GATHERED, Filled, Sparse, attend
from specjax.models.cache import PagedCache, groups_of
from specjax.models.config import MLA
from specjax.models.quantized_cache import quantize
from specjax.models.sparse_attention import (
    Selection,
    highest,
    reach,
    scores_in_blocks,
    selected,
)
from specjax.models.transformer import Target
from specjax.training.objectives.windows import read_student
from tests.conftest import SHAPES, SPARSE, tiny_config, tiny_target
from tests.models.families import zoo

INDEXER = SPARSE["indexer"]


def test_the_highest_are_those_of_a_stable_sort() -> None:
    """Many scores are equal, some are hidden, and half of the zeros are negative."""
    random = np.random.default_rng(0)
    scores = random.integers(-2, 3, (50, 12)).astype(np.float32)
    scores[scores == -2] = -np.inf
    scores[0, 2:] = -np.inf  # fewer than are selected
    scores[(scores == 0) & (random.random(scores.shape) < 0.5)] = -0.0
    expected, expected_indices = np.zeros(scores.shape, bool), np.full((50, 4), 12)
    for row, values in enumerate(scores):
        first = sorted(range(12), key=lambda i: -values[i])[:4]
        first = [i for i in first if values[i] > -np.inf]
        expected[row, first] = True
        expected_indices[row, : len(first)] = first
    mask, indices = highest(jnp.asarray(scores), 4)
    np.testing.assert_array_equal(mask, expected)
    np.testing.assert_array_equal(indices, expected_indices)
    assert (expected_indices == 12).any()
    assert (np.signbit(scores) & (scores == 0)).any()


# --- two ways to read a cache --------------------------------------------------------------------

COUNTS = (0, 3, 40, 41, 96)
"""The filled slots of rows: none, fewer than are selected, up to `REACH`, and more."""
REACH = 40


def cache_of(kind: str, counts: tuple[int, ...], slots: int = 96) -> tuple[Filled, Filled]:
    """Return a cache of latents and rotated keys, and the same without pages.

    Unfilled slots of pages hold NaN.
    """
    rows, page = len(counts), 8
    parts = [
        jax.random.normal(jax.random.key(i), (rows, 1, slots, dim)) for i, dim in enumerate((12, 4))
    ]
    entry = tuple(map(quantize, parts)) if "int8" in kind else tuple(parts)
    plain = Filled(entry, jnp.asarray(counts))
    if "pages" not in kind:
        return plain, plain
    table = np.random.default_rng(0).permutation(rows * slots // page).reshape(rows, -1)
    is_filled = np.arange(slots) < np.asarray(counts)[:, None]

    def pool(part):
        hidden = np.where(is_filled.reshape(rows, 1, slots, *(1,) * (part.ndim - 3)), part, np.nan)
        if part.dtype == jnp.int8:
            hidden = part  # their scales are NaN
        by_page = hidden.reshape(rows, 1, slots // page, page, *part.shape[3:])
        pages = np.moveaxis(by_page, 2, 1).reshape(-1, 1, page, *part.shape[3:])
        return jnp.asarray(pages[np.argsort(table.reshape(-1))], part.dtype)

    return replace(plain, entry=jax.tree.map(pool, entry), table=jnp.asarray(table)), plain


def read_both_ways(
    cache: Filled, oracle: Filled, queries: int, topk: int, reach: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the attention output over a cache and a draft, and that with masks alone."""
    rows, slots = cache.count.shape[0], cache.slots
    random = np.random.default_rng(1)
    scores = random.normal(size=(rows, queries, slots + queries)).astype(np.float32)
    is_empty = np.arange(slots) >= np.asarray(cache.count)[:, None, None]
    scores[..., :slots] = np.where(is_empty, -np.inf, scores[..., :slots])
    mask, tokens = highest(jnp.asarray(scores), topk)
    is_here = tokens < slots
    drafted = tuple(jnp.asarray(random.normal(size=(rows, 1, queries, dim))) for dim in (12, 4))
    q = tuple(jnp.asarray(random.normal(size=(rows, queries, 5, dim))) for dim in (12, 4))
    masked = replace(oracle, selected=mask[..., :slots])
    sparse = Sparse(
        replace(cache, selected=mask[..., :slots]), jnp.where(is_here, tokens, 0), is_here, reach
    )
    draft = drafted, mask[..., slots:]
    outputs = (attend(q, [piece, draft], values_part=0) for piece in (sparse, masked))
    output, expected = map(np.asarray, outputs)
    return output, expected


@pytest.mark.full_except("1-pages")
@pytest.mark.thorough_except("1-slots", "7-int8")
@pytest.mark.parametrize("kind", ["slots", "int8", "pages", "int8 pages"])
@pytest.mark.parametrize("queries", [1, 7])
def test_copies_are_attended_to_as_masked_slots_are(kind, queries) -> None:
    output, expected = read_both_ways(*cache_of(kind, COUNTS), queries, topk=16, reach=REACH)
    np.testing.assert_allclose(output, expected, atol=2e-6)


@pytest.mark.full
def test_many_copies_are_made_for_some_queries_at_a_time() -> None:
    """The last group of queries is not full."""
    topk, queries = 301, 61
    assert GATHERED < topk * queries < 2 * GATHERED
    output, expected = read_both_ways(
        *cache_of("slots", (350, 400), slots=400), queries, topk, reach=10
    )
    np.testing.assert_allclose(output, expected, atol=2e-6)


@pytest.mark.full
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("is_copied", [True, False])
def test_a_selection_is_read_wherever_the_cache_stands(is_first, is_copied) -> None:
    """Compare the tokens that are read with the mask of the selection."""
    config = tiny_config(**SPARSE)
    slots, queries = reach(config, queries=2) + is_copied, 2
    parts = jnp.ones((1, 1, slots, 12)), jnp.ones((1, 1, slots, 4)), jnp.ones((1, 1, slots, 6))
    cache = Filled(parts, jnp.array([slots]))
    draft = tuple(part[:, :, :queries] for part in parts), jnp.eye(queries, dtype=bool)[None]
    pieces, sizes = (
        ([cache, draft], [slots, queries]) if is_first else ([draft, cache], [queries, slots])
    )
    scores = jax.random.normal(jax.random.key(0), (1, queries, sum(sizes)))
    mask, tokens = highest(scores, INDEXER.topk)
    masks = tuple(jnp.split(mask, [sizes[0]], axis=-1))
    restricted = selected(config, pieces, Selection(masks, tokens))
    piece, (entry, of_draft) = restricted if is_first else restricted[::-1]
    assert len(entry) == len(piece.entry) == 2  # without index keys
    of_cache, of_other = masks if is_first else masks[::-1]
    np.testing.assert_array_equal(of_draft, of_other)
    if not is_copied:
        assert isinstance(piece, Filled)
        np.testing.assert_array_equal(piece.selected, of_cache)
        return
    assert isinstance(piece, Sparse)
    is_read = np.zeros((1, queries, slots), bool)
    rows, places, _ = np.nonzero(piece.visible)
    is_read[rows, places, np.asarray(piece.slots)[np.asarray(piece.visible)]] = True
    np.testing.assert_array_equal(is_read, of_cache)
    assert 0 < is_read.sum() < INDEXER.topk * queries or of_other.sum() == 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("row", "counts", "long", "reach"),
    [
        (2, COUNTS, 96, REACH),
        (3, COUNTS, 96, REACH),
        (1, (3, 600, 601), 1024, 600),  # read as a whole in blocks
        (2, (3, 600, 601), 1024, 600),
    ],
)
def test_a_row_is_read_in_a_way_of_its_own(row, counts, long, reach) -> None:
    """Compare the bits of a row beside long rows, beside short rows, and beside empty rows."""
    outputs = []
    for neighbor in (long, 20, 0):
        changed = [neighbor] * len(counts)
        changed[row] = counts[row]
        cache = cache_of("slots", tuple(changed), slots=long)
        outputs.append(read_both_ways(*cache, queries=2, topk=16, reach=reach)[0][row])
    np.testing.assert_array_equal(outputs[1], outputs[0])
    np.testing.assert_array_equal(outputs[2], outputs[0])


@pytest.mark.full
@pytest.mark.parametrize(("reach", "is_whole"), [(599, False), (700, True)])
def test_long_rows_beside_long_rows_are_never_read_as_a_whole(reach, is_whole) -> None:
    """Entries that no query has selected are NaN, and a weight of 0 does not remove NaN."""
    cache, _ = cache_of("slots", (600, 700), slots=1024)
    assert cache.block_width(BLOCK) < cache.slots
    entry = tuple(part.at[:, :, 8:].set(jnp.nan) for part in cache.entry)
    slots = jnp.broadcast_to(jnp.arange(8), (2, 1, 8))
    mask = jnp.broadcast_to(jnp.arange(1024) < 8, (2, 1, 1024))
    sparse = Sparse(replace(cache, entry=entry, selected=mask), slots, slots >= 0, reach)
    queries = jnp.ones((2, 1, 2, 12)), jnp.ones((2, 1, 2, 4))
    output = np.asarray(attend(queries, [sparse], values_part=0))
    assert np.isnan(output).all() if is_whole else np.isfinite(output).all()


# --- transformers --------------------------------------------------------------------------------


LENGTH = 40


@pytest.mark.full
@pytest.mark.parametrize("topk", [7, 39, 40, 50])
def test_one_layer_is_that_of_transformers(tmp_path, topk) -> None:
    """Count the tokens whose selection rounding decides, and compare the others.

    With few heads the scores of many keys are 0, and which of these are selected is open. In a
    single layer such a token changes no other token.
    """
    fields = zoo.INDEXED | {"num_hidden_layers": 1, "index_n_heads": 4, "index_topk": topk}
    model = zoo.build("DeepseekV32", fields)
    model.save_pretrained(tmp_path)
    tokens = np.random.default_rng(1).integers(0, zoo.VOCABULARY, (4, LENGTH))
    expected = zoo.logits(model, tokens)
    (is_open,) = zoo.open_selections(model, tokens)
    target = Target.from_pretrained(tmp_path, dtype=np.float32)
    logits = np.asarray(target.forward(jnp.asarray(tokens))[0].logits)
    print(f"topk={topk}: {is_open.sum()} of {is_open.size} tokens are left out")
    assert is_open.mean() < 0.25
    assert (np.abs(logits - expected).max(axis=-1)[~is_open] < 1e-4).all()
    everything = replace(target.config, indexer=replace(target.config.indexer, topk=LENGTH))
    dense = target.replace(config=everything).forward(jnp.asarray(tokens))[0].logits
    if topk == 39:  # the last token alone leaves one out
        np.testing.assert_allclose(dense[:, :-1], logits[:, :-1], atol=1e-4)
    else:
        assert (np.abs(dense - logits).max() > 0.1) == (topk < LENGTH)


# --- pieces, pages, trees ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(**SPARSE)


def on_mesh(target: Target, mesh: Mesh) -> Target:
    """Return ``target`` with its parameters split over ``mesh``."""
    places = params.shardings(params.declare(target.config), mesh, target.config.axis_units)
    return target.replace(params=jax.device_put(target.params, places), mesh=mesh)


PROMPT = np.random.default_rng(2).integers(0, 11, (2, 13)).astype(np.int32)
PARENTS = (-1, 0, 0, 1, 1, 2, 3)


@jax.jit
def forward(target, tokens):
    return target.forward(tokens)[0].logits


@jax.jit
def read_on(target, tokens, cache):
    output, cache = target.forward(tokens, cache)
    return output.logits, cache


def paths() -> list[list[int]]:
    """Return the nodes from the root to each node."""
    all_paths: list[list[int]] = []
    for node, parent in enumerate(PARENTS):
        all_paths.append([*(all_paths[parent] if parent >= 0 else []), node])
    return all_paths


def tree_logits(target, cache, drafted):
    mask = np.zeros((1, len(PARENTS), len(PARENTS)), bool)
    for node, path in enumerate(paths()):
        mask[0, node, path] = True
    depths = np.array([len(path) - 1 for path in paths()])

    @jax.jit
    def score(target, tokens, cache):
        positions = cache.length[:, None] + depths
        return target.score(tokens, cache, positions=positions, mask=mask)

    output, entries = score(target, jnp.asarray(drafted), cache)
    return output.logits, entries


@pytest.mark.full_except("13")
@pytest.mark.represents("trees below a text whose keys are selected")
@pytest.mark.parametrize("length", [3, 5, 13])
def test_a_tree_is_as_each_path_alone(target, length) -> None:
    """The prompt is shorter than topk, as long, or longer. It is read in chunks of 2 tokens.

    Then one path is accepted, and the text goes on.
    """
    drafted = np.random.default_rng(3).integers(0, 11, (2, len(PARENTS)))
    cache = target.new_cache(2, 24)
    for start in range(0, length, 2):
        _, cache = read_on(target, jnp.asarray(PROMPT[:, start : min(start + 2, length)]), cache)
    logits, entries = tree_logits(target, cache, drafted)
    texts = np.zeros((2, len(PARENTS), length + 4), np.int32)
    for node, path in enumerate(paths()):
        texts[:, node, :length] = PROMPT[:, :length]
        texts[:, node, length : length + len(path)] = drafted[:, path]
    alone = forward(target, jnp.asarray(texts.reshape(-1, length + 4)))
    alone = np.asarray(alone).reshape(2, len(PARENTS), length + 4, -1)
    for node, path in enumerate(paths()):
        np.testing.assert_allclose(
            logits[:, node], alone[:, node, length + len(path) - 1], atol=1e-4
        )
    deepest = max(paths(), key=len)
    accepted = jax.tree.map(lambda part: part[:, :, np.array(deepest)], entries)
    cache = cache.append(accepted, jnp.full(2, len(deepest)), after=logits)
    following, _ = read_on(target, jnp.asarray(PROMPT[:, :1]), cache)
    text = np.concatenate([PROMPT[:, :length], drafted[:, deepest], PROMPT[:, :1]], axis=1)
    np.testing.assert_allclose(
        following[:, 0], forward(target, jnp.asarray(text))[:, -1], atol=1e-4
    )


@pytest.mark.full
def test_pages_hold_index_keys_and_stale_ones_are_not_selected(target) -> None:
    """Unfilled slots of pages hold NaN, as those of an earlier text may."""
    parts = [len(entry) for entry in target.new_cache(1, 8).layers]
    assert parts == [3, 2, 3]
    cache = PagedCache.like(target.new_cache(2, 24), pages=12, page=4)
    cache = replace(cache, layers=jax.tree.map(lambda pool: pool * jnp.nan, cache.layers))
    table = np.random.default_rng(4).permutation(12).reshape(2, 6)
    cache, pieces = cache.with_table(jnp.asarray(table, jnp.int32)), []
    for token in range(13):
        logits, cache = read_on(target, jnp.asarray(PROMPT[:, token : token + 1]), cache)
        pieces.append(logits)
    np.testing.assert_allclose(
        np.concatenate(pieces, axis=1), forward(target, jnp.asarray(PROMPT)), atol=1e-4
    )


@pytest.mark.parametrize("slots", [1024, 1300])
def test_each_filled_slot_of_several_blocks_has_its_score(slots) -> None:
    """The last of 1,300 slots are in a block that begins within the one before.

    The second row has one token more than fits.
    """
    counts = jnp.array([600, slots + 1])
    keys = jax.random.normal(jax.random.key(0), (2, 1, slots, 1))
    scores = jax.jit(
        lambda filled: scores_in_blocks(
            lambda part: jnp.broadcast_to(part[:, 0, :, 0][:, None], (2, 3, part.shape[2])),
            filled,
            queries=3,
        )
    )(Filled((keys,), counts))
    is_filled = np.arange(slots) < np.asarray(counts)[:, None]
    expected = np.where(is_filled, keys[:, 0, :, 0], -np.inf)
    np.testing.assert_array_equal(scores, np.stack([expected] * 3, axis=1))


@pytest.mark.full
def test_long_caches_are_scored_in_blocks(target) -> None:
    """The cache has several blocks, the last of which begins within the one before."""
    tokens = np.random.default_rng(5).integers(0, 11, (2, 1100)).astype(np.int32)
    logits, cache = read_on(target, jnp.asarray(tokens[:, :-5]), target.new_cache(2, 1300))
    logits, _ = read_on(target, jnp.asarray(tokens[:, -5:]), cache)
    expected = forward(target, jnp.asarray(tokens))[:, -5:]
    np.testing.assert_allclose(logits, expected, atol=1e-4)


@pytest.mark.full
@pytest.mark.thorough_except("13")
@pytest.mark.parametrize("length", [13, 150])
def test_in_an_8_bit_cache_a_tree_is_as_each_path_alone(target, length) -> None:
    """The entries that a tree selects in the long text are copied."""
    narrow = target.replace(cache_dtype="int8")
    text = np.random.default_rng(7).integers(0, 11, (2, length)).astype(np.int32)
    drafted = np.random.default_rng(3).integers(0, 11, (2, len(PARENTS)))
    _, cache = read_on(narrow, jnp.asarray(text), narrow.new_cache(2, 160))
    logits, _ = tree_logits(narrow, cache, drafted)
    for node, path in enumerate(paths()):
        alone = cache
        for token in path:
            newest, alone = read_on(narrow, jnp.asarray(drafted[:, token : token + 1]), alone)
        np.testing.assert_allclose(logits[:, node], newest[:, 0], atol=1e-4)


@pytest.mark.full
def test_on_a_mesh_it_has_the_same_logits(target, tmp_path) -> None:
    target.save_pretrained(tmp_path)
    split = Target.from_pretrained(tmp_path, dtype=np.float32, mesh=sharding.make_mesh(2, 2))
    _, cache = read_on(split, jnp.asarray(PROMPT[:, :9]), split.new_cache(2, 24))
    logits, _ = read_on(split, jnp.asarray(PROMPT[:, 9:]), cache)
    np.testing.assert_allclose(logits, forward(target, jnp.asarray(PROMPT))[:, 9:], atol=1e-4)


@pytest.mark.full
@pytest.mark.thorough_except("None")
@pytest.mark.parametrize("sizes", [None, (1, 2), (2, 1)])
def test_a_tree_below_several_blocks_of_pages_is_as_each_path_alone(target, sizes) -> None:
    """The last block of slots begins within the one before. Unfilled slots of pages hold NaN."""
    mesh = None if sizes is None else sharding.make_mesh(*sizes)
    groups, length, page, columns = groups_of(mesh), 290, 16, 19
    split = target if mesh is None else on_mesh(target, mesh)
    random = np.random.default_rng(6)
    text = random.integers(0, 11, (2, length)).astype(np.int32)
    drafted = random.integers(0, 11, (2, len(PARENTS)))
    like = split.new_cache(2, page * columns)
    cache = PagedCache.like(like, pages=2 * columns // groups, page=page, mesh=mesh)
    filled = Filled.of(cache.with_table(jnp.zeros((2, columns), jnp.int32)), 0, mesh=mesh)
    assert 2 * filled.block_width(BLOCK) < filled.slots < 3 * filled.block_width(BLOCK)
    # Each group counts its pages from 0.
    table = [random.permutation(2 * columns // groups) for _ in range(groups)]
    table = np.reshape(table, (2, columns)).astype(np.int32)
    cache = replace(cache, layers=jax.tree.map(lambda pool: pool * jnp.nan, cache.layers))
    cache = cache.with_table(jnp.asarray(table))
    for tokens in (text[:, :280], text[:, 280:]):
        _, cache = read_on(split, jnp.asarray(tokens), cache)
    logits, _ = tree_logits(split, cache, drafted)
    for node, path in enumerate(paths()):
        alone = np.concatenate([text, drafted[:, path]], axis=1)
        expected = forward(target, jnp.asarray(np.pad(alone, ((0, 0), (0, 4 - len(path))))))
        np.testing.assert_allclose(
            logits[:, node], expected[:, length + len(path) - 1], atol=1e-4, err_msg=str(path)
        )


# --- whole texts ---------------------------------------------------------------------------------

DRAFTERS = {
    "itself": lambda target: DraftModel(target, draft=SHAPES["chain"]),
    "itself, dynamic tree": lambda target: DraftModel(target, draft=SHAPES["dynamic"]),
    "early exit": lambda target: EarlyExit(layers=2, draft=SHAPES["static"]),
}


@pytest.mark.full
@pytest.mark.thorough_except("itself, dynamic tree")
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_texts_are_those_of_one_token_after_the_other(target, drafter) -> None:
    options = {"max_new_tokens": 24, "sampling": specjax.Sampling(temperature=0.0)}
    lengths = np.array([13, 4])
    plain = specjax.generate(target, None, PROMPT, lengths, **options)
    drafted = specjax.generate(target, DRAFTERS[drafter](target), PROMPT, lengths, **options)
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    if drafter.startswith("itself"):
        assert np.sum(drafted.stats.accepted) > 0.5 * np.sum(drafted.stats.steps)
    for row, length in enumerate(lengths):
        text = PROMPT[row, :length].tolist()
        padded = np.zeros((1, 37), np.int32)
        for _ in range(24):
            padded[0, : len(text)] = text
            text.append(int(forward(target, jnp.asarray(padded))[0, len(text) - 1].argmax()))
        assert text == np.asarray(plain.tokens)[row, : length + 24].tolist()


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.full
def test_an_indexer_in_fp8_is_read_as_it_is_published(target, tmp_path) -> None:
    """DeepSeek-V3.2 has two matrices of an indexer in FP8, and the weights of heads in floats."""
    target.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    prefix = "model.layers.0.self_attn.indexer."
    for name in (f"{prefix}wq_b.weight", f"{prefix}wk.weight"):
        tensors[name] = (tensors[name] / 0.5).astype(jnp.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = np.full((1, 1), 0.5, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    read = Target.from_pretrained(tmp_path, dtype=jnp.bfloat16).params["layers"][0]["indexer"]
    for ours, stored in {"q": "wq_b", "k": "wk"}.items():
        expected = tensors[f"{prefix}{stored}.weight"].astype(np.float32).T * 0.5
        np.testing.assert_array_equal(read[ours].astype(np.float32), expected)
    assert read["weights"].dtype == np.float32
    original = target.params["layers"][0]["indexer"]
    np.testing.assert_array_equal(read["weights"], original["weights"])


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"index_topk_freq": 4},
        {"index_topk_freq": 4, "index_skip_topk_offset": 3},
        {"index_topk_freq": 0, "index_topk_pattern": "FSSFSSFSF"},
        {"index_topk_pattern": ["full", "shared"] * 4 + ["full"], "index_topk_freq": 3},
        {"indexer_types": ["full"] + ["shared"] * 8, "index_topk_pattern": "FSSFSSFSF"},
        {"num_experts": 12, "first_k_dense_replace": 5},
    ],
)
def test_layers_share_as_in_transformers(changes) -> None:
    from transformers import GlmMoeDsaConfig

    raw = zoo.INDEXED | {"model_type": "glm_moe_dsa", "num_hidden_layers": 9} | changes
    theirs, ours = GlmMoeDsaConfig(**raw), config_json.parse_config(raw)
    shared = [not ours.has_indexer(layer) for layer in range(9)]
    assert shared == [kind == "shared" for kind in theirs.indexer_types]
    sparse = [ours.is_sparse(layer) for layer in range(9)]
    assert sparse == [kind == "sparse" for kind in theirs.mlp_layer_types]
    assert ours.moe is not None and ours.moe.num_experts == theirs.n_routed_experts
    config = ours.first(4)
    assert config.indexer.shared_layers == tuple(i for i in range(4) if shared[i])


# --- what is refused -----------------------------------------------------------------------------


def test_a_slice_does_not_begin_with_a_layer_that_shares(target) -> None:
    x = target.embed(jnp.asarray(PROMPT))
    with pytest.raises(InputError, match=r"begins with layer 1, .* that layer 0 selects"):
        target.run(x, layers=(1, 3))
    target.run(x, layers=(2, 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mla": None, "num_kv_heads": 2}, "indexer: it reads the latents of queries"),
        ({"mla": MLA(6, 6, 4, 8)}, "indexer: it reads the latents of queries"),
        ({"indexer": replace(INDEXER, head_dim=3)}, "indexer.head_dim=3: must be at least"),
        ({"sliding_window": 4, "windowed_layers": (1,)}, "indexer: cannot be combined with"),
        (
            {"indexer": replace(INDEXER, shared_layers=(1, 9))},
            "shared_layers=.1, 9.: the model has",
        ),
    ],
)
def test_what_an_indexer_needs_is_checked(changes, message) -> None:
    with pytest.raises(InputError, match=message):
        tiny_config(**SPARSE | changes)


def test_the_first_layer_cannot_share() -> None:
    with pytest.raises(InputError, match=r"shared_layers=\(0, 1\): give each once"):
        replace(INDEXER, shared_layers=(0, 1))


def test_the_highest_scores_are_chosen_without_a_sort() -> None:
    scores = jnp.zeros((4, 4096))
    compiled = jax.jit(lambda scores: highest(scores, 64)).lower(scores).compile().as_text()
    assert " sort(" not in compiled
    assert "TopK" in compiled


@pytest.mark.full
def test_layers_that_share_a_selection_are_recomputed_together(target) -> None:
    tokens = jnp.arange(50).reshape(2, 25) % 11
    batch = {"tokens": tokens, "segments": jnp.zeros_like(tokens)}
    plain, again = (read_student(target, batch, remat) for remat in (False, True))
    np.testing.assert_allclose(again, plain, atol=1e-5)
