"""Test DFlash, JetSpec and DSpark.

The tests compare them with speculators' classes and the slow oracle, in every layout and with every
draft shape.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax.drafters import DFlash, DFlash2, DSpark
from specjax.drafters.base import RemoteFeatures
from specjax.drafters.checkpoints import dflash as dflash_checkpoint
from specjax.drafters.checkpoints.dflash_config import default_taps
from specjax.drafters.registry import load_drafter
from specjax.errors import InputError
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.fields import CheckpointError
from specjax.models.transformer import States, Target
from specjax.sampling import Sampling, split_keys
from tests.conftest import tiny_target
from tests.drafters import block_oracles
from tests.drafters.block_oracles import (
    Text,
    make_drafter,
    make_text,
    needs_speculators,
    slow_of,
    write_as,
)
from tests.drafters.test_block_oracles import ANCHORS, DFLASH, DSPARK


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Text:
    return make_text(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture(scope="module")
def target(text) -> Target:
    return Target.from_pretrained(text.directory, dtype=np.float32)


@jax.jit
def drafted(drafter, target, features, length, root):
    """Return the states of a block, and a greedy chain.

    The block is below ``root [B]``, after the first ``length [B]`` tokens of ``features [B, T, n,
    H]``.
    """
    output = States(hidden=jnp.zeros((*features.shape[:2], 1)), taps=features)
    state = drafter.start(target, len(root), 64)
    state = state.append(
        drafter.context(drafter.features(output), jnp.arange(features.shape[1])[None]),
        length,
        after=features,
    )
    rows = Sampling(0.0).rows(len(root))
    keys = split_keys(jax.random.split(jax.random.key(0), len(root)), drafter.draft_shape.depth)
    draft, _ = drafter.propose(target, state, root, rows, keys, jnp.ones(len(root), bool))
    return drafter.block(target, state, root), draft.tokens[:, 1:]


def of_anchors(drafter, target, text):
    """Return `drafted` with a row for each anchor; all rows have read the same text up to there."""
    features = jnp.broadcast_to(text.features[None], (len(ANCHORS), *text.features.shape))
    return drafted(
        drafter, target, features, jnp.array(ANCHORS), jnp.asarray(text.tokens[list(ANCHORS)])
    )


@pytest.mark.full
@pytest.mark.parametrize("variant", DFLASH)
def test_a_block_of_dflash_is_that_of_speculators(variant, text, target, tmp_path) -> None:
    needs_speculators()
    options, _ = DFLASH[variant]
    model = make_drafter(tmp_path / "drafter", "dflash", text, **options)
    blocks = block_oracles.speculators_blocks(model, text, ANCHORS)
    drafter = load_drafter(str(tmp_path / "drafter"), None, target.config, np.float32)
    assert type(drafter) is DFlash
    states, chains = of_anchors(drafter, target, text)
    np.testing.assert_allclose(states, blocks.states, atol=1e-4)
    np.testing.assert_allclose(drafter.logits(target, states), blocks.logits, atol=1e-4, rtol=1e-4)
    np.testing.assert_array_equal(chains, blocks.chains)


@pytest.mark.full
@pytest.mark.thorough_except("gated")
@pytest.mark.parametrize("variant", DSPARK)
def test_a_chain_of_dspark_is_that_of_speculators(variant, text, target, tmp_path) -> None:
    needs_speculators()
    model = make_drafter(
        tmp_path / "drafter", "dspark", text, **{"markov_rank": 6} | DSPARK[variant]
    )
    blocks = block_oracles.speculators_blocks(model, text, ANCHORS)
    drafter = load_drafter(str(tmp_path / "drafter"), None, target.config, np.float32)
    assert type(drafter) is DSpark
    states, chains = of_anchors(drafter, target, text)
    np.testing.assert_allclose(states, blocks.states, atol=1e-4)
    np.testing.assert_array_equal(chains, blocks.chains)
    if blocks.confidence is None:
        return
    before = np.concatenate([text.tokens[list(ANCHORS)][:, None], blocks.chains[:, :-1]], axis=1)
    slots = states[:, -before.shape[1] :]
    *_, confidence = drafter.after(
        drafter.logits(target, slots), slots, before, drafter.markov_memory(before.shape)
    )
    np.testing.assert_allclose(jax.nn.sigmoid(confidence), blocks.confidence, atol=1e-4)

    # The chains of the rows end at as many different places as possible with this threshold.
    def lengths(threshold: float) -> list[int]:
        return [first_below(row, threshold) for row in blocks.confidence]

    threshold = max(np.unique(blocks.confidence) + 1e-4, key=lambda at: len(set(lengths(at))))
    ending = dataclasses.replace(
        drafter, draft=specjax.Chain(before.shape[1], stop_below=float(threshold))
    )
    assert ended(ending, target, text) == lengths(threshold)
    assert len(set(lengths(threshold))) > 1


def first_below(confidence: np.ndarray, threshold: float) -> int:
    """Return the length of a chain that ends after its first token below a threshold."""
    below = np.flatnonzero(confidence < threshold)
    return int(below[0]) + 1 if len(below) else len(confidence)


def ended(drafter, target, text) -> list[int]:
    features = jnp.broadcast_to(text.features[None], (len(ANCHORS), *text.features.shape))
    output = States(hidden=jnp.zeros((*features.shape[:2], 1)), taps=features)
    state = drafter.start(target, len(ANCHORS), 64)
    entries = drafter.context(drafter.features(output), jnp.arange(features.shape[1])[None])
    state = state.append(entries, jnp.array(ANCHORS), after=features)
    keys = split_keys(jax.random.split(jax.random.key(0), len(ANCHORS)), drafter.draft_shape.depth)
    root, rows = jnp.asarray(text.tokens[list(ANCHORS)]), Sampling(0.0).rows(len(ANCHORS))
    draft, _ = drafter.propose(target, state, root, rows, keys, jnp.ones(len(ANCHORS), bool))
    return (np.asarray(draft.valid).sum(axis=1) - 1).tolist()


@pytest.mark.full
@pytest.mark.parametrize("layout", ["zlab", "jetspec", "deepspec"])
def test_the_other_publishers_layouts_are_read_and_written(layout, text, target, tmp_path) -> None:
    needs_speculators()
    method = "dspark" if layout == "deepspec" else "dflash"
    options = {"markov_rank": 6} if layout == "deepspec" else {}
    make_drafter(tmp_path / "drafter", method, text, **options)
    write_as(layout, tmp_path / "drafter", tmp_path / layout, text)
    slow = slow_of(
        tmp_path / layout,
        text,
        causal={"full_attention": layout == "jetspec"},
        sample_from_anchor=layout == "deepspec",
    )
    drafter = load_drafter(str(tmp_path / layout), None, target.config, np.float32)
    assert (type(drafter), drafter.config.causal) == (
        DSpark if layout == "deepspec" else DFlash,
        layout == "jetspec",
    )
    assert drafter.config.taps == block_oracles.TAPS
    states, chains = of_anchors(drafter, target, text)
    for row, at in enumerate(ANCHORS):
        np.testing.assert_allclose(
            states[row], slow.block(text.features[:at], int(text.tokens[at])), atol=1e-4
        )
        assert chains[row].tolist() == slow.draft(text.features[:at], int(text.tokens[at]))[0]
    ours = dflash_checkpoint.layout_of(CheckpointFiles(tmp_path / layout).raw)
    drafter.save_pretrained(tmp_path / "again", layout=ours)
    published, saved = (
        load_file(tmp_path / place / "model.safetensors") for place in (layout, "again")
    )
    assert published.keys() == saved.keys()
    assert all(np.array_equal(published[name], saved[name]) for name in published)
    again = load_drafter(str(tmp_path / "again"), None, target.config, np.float32)
    assert again.config == drafter.config


# --- without the authors' code ---


def of_tiny(kind: str, **options):
    target = tiny_target()
    if kind == "dspark":
        return DSpark.init(
            target, jax.random.key(1), **{"block_size": 3, "markov_rank": 4} | options
        )
    return DFlash.init(target, jax.random.key(1), **{"block_size": 4} | options)


WINDOWS = {"num_layers": 2, "sliding_window": 3, "windowed_layers": (1,)}
SAVED = {
    "dflash": ("dflash", of_tiny("dflash")),
    "jetspec": ("dflash", of_tiny("dflash", variant={"causal": True}, taps=(0, 2))),
    "windows of tokens": ("dflash", of_tiny("dflash", **WINDOWS)),
    "windows of blocks": (
        "speculators",
        of_tiny("dflash", variant={"window_of_block": True, "causal_in_window": True}, **WINDOWS),
    ),
    "own vocabulary": ("speculators", of_tiny("dflash", ids=np.array([0, 2, 3, 5, 9]))),
    "from the anchor": ("speculators", of_tiny("dflash", variant={"from_anchor": True})),
    "dspark": ("deepspec", of_tiny("dspark")),
    "dspark gated": ("deepspec", of_tiny("dspark", markov="gated", confidence=False)),
    "dspark rnn": (
        "speculators",
        of_tiny("dspark", markov="rnn", variant={"own_embedding": False, "own_head": False}),
    ),
    "confidence alone": ("speculators", of_tiny("dspark", markov_rank=0)),
}


@pytest.mark.full
@pytest.mark.parametrize("which", SAVED)
def test_what_is_saved_is_read_bit_for_bit(which, tmp_path) -> None:
    layout, drafter = SAVED[which]
    drafter.save_pretrained(tmp_path, layout=layout)
    again = load_drafter(str(tmp_path), None, tiny_target().config, np.float32)
    assert (type(again), again.config) == (type(drafter), drafter.config)
    jax.tree.map(np.testing.assert_array_equal, again.params, drafter.params)
    assert again.draft == drafter.draft == specjax.Chain(drafter.config.depth)


NAMES_OF_SPECFORGE = {
    "num_target_layers",
    "block_size",
    "num_hidden_layers",
    "layer_types",
    "vocab_size",
    "hidden_size",
}
"""The fields of config.json that SpecForge's classes read without a default.

These are the classes of DFlash, and of DFlash2 and DSpark, which follow it.
"""


@pytest.mark.parametrize(
    "which",
    [which for which, (layout, _) in SAVED.items() if layout != "speculators"] + ["dflash2"],
)
def test_what_specforge_asks_for_is_written_and_kept(which, tmp_path) -> None:
    target = tiny_target()
    dflash2 = DFlash2.init(target, jax.random.key(1), block_size=4)
    layout, drafter = ("dflash", dflash2) if which == "dflash2" else SAVED[which]
    drafter.save_pretrained(tmp_path / "first", layout=layout)
    load_drafter(str(tmp_path / "first"), None, target.config, np.float32).save_pretrained(
        tmp_path / "again", layout=layout
    )
    for place in ("first", "again"):
        raw = json.loads((tmp_path / place / "config.json").read_text())
        assert raw.keys() >= NAMES_OF_SPECFORGE
        assert raw["num_target_layers"] == target.config.num_layers
        assert raw["block_size"] == drafter.config.block_size


@pytest.mark.parametrize(
    ("which", "layout", "message"),
    [
        (
            "from the anchor",
            "dflash",
            "layout='dflash': it cannot express predictions from the anchor",
        ),
        ("own vocabulary", "dflash", "cannot express a vocabulary of its own"),
        (
            "jetspec",
            "speculators",
            "layout='speculators': it cannot express a block that is causal in every layer",
        ),
        (
            "windows of tokens",
            "speculators",
            "cannot express windows that are counted from each token",
        ),
        ("dflash", "deepspec", "layout='deepspec': it cannot express anchors that predict nothing"),
        (
            "dspark",
            "dflash",
            "a DSpark drafter is written in the layouts 'deepspec', 'speculators'",
        ),
    ],
)
def test_a_layout_that_cannot_say_it_is_refused(which, layout, message, tmp_path) -> None:
    with pytest.raises(InputError, match=message):
        SAVED[which][1].save_pretrained(tmp_path, layout=layout)
    assert not list(tmp_path.iterdir())


def damaged(tmp_path, which, *, without=(), beside=None, **fields):
    """Write a checkpoint of ``SAVED`` with errors, and return its directory.

    Args:
        tmp_path: the directory to write to.
        which: the name in ``SAVED``.
        without: the starts of the names of tensors to leave out.
        beside: tensors to add or to replace.
        fields: fields of config.json to set; "absent" removes one.
    """
    layout, drafter = SAVED[which]
    drafter.save_pretrained(tmp_path, layout=layout)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({k: v for k, v in (raw | fields).items() if v != "absent"})
    )
    tensors = load_file(tmp_path / "model.safetensors")
    remaining = {
        name: value
        for name, value in tensors.items()
        if not any(name.startswith(start) for start in without)
    }
    save_file(remaining | (beside or {}), tmp_path / "model.safetensors")
    return tmp_path


FAULTS = {
    "Markov tensors without a word of them": (
        "dspark",
        {"markov_rank": 0, "confidence_head_with_markov": False},
        (),
        "declares no head",
    ),
    "a Markov head without tensors": (
        "dspark",
        {},
        ("markov_head",),
        "there are no tensors markov_head",
    ),
    "half a Markov head": (
        "dspark",
        {},
        ("markov_head.markov_w2",),
        "'markov_head.markov_w2.weight' .* is missing",
    ),
    "a confidence head without tensors": (
        "dspark",
        {},
        ("confidence_head",),
        "there are no tensors confidence_head",
    ),
    "half a confidence head": (
        "dspark",
        {},
        ("confidence_head.proj.bias",),
        "'confidence_head.proj.bias' .* is missing",
    ),
    "fewer layers than said": (
        "dflash",
        {"num_hidden_layers": 3, "layer_types": "absent"},
        (),
        "num_hidden_layers=3, but there are tensors of 1 layers",
    ),
    "taps that fc does not read": (
        "dflash",
        {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1]}},
        (),
        "fc.weight reads 16",
    ),
    "a mask token that is none": (
        "dflash",
        {"dflash_config": {"mask_token_id": 11, "target_layer_ids": [0]}},
        (),
        "mask_token_id=11",
    ),
    "no mask token": ("dflash", {"dflash_config": {"target_layer_ids": [0]}}, (), "mask_token_id"),
    "layers that are read twice": (
        "dflash",
        {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 1]}},
        (),
        "they must be different layers",
    ),
    "another hidden size": (
        "from the anchor",
        {"target_hidden_size": 8},
        (),
        "target_hidden_size=8",
    ),
    "no table of tokens": ("own vocabulary", {}, ("d2t",), "'d2t' is missing"),
    "no head for its own tokens": ("own vocabulary", {}, ("lm_head",), "lm_head is missing"),
    "no room for a token": (
        "dflash",
        {"block_size": 1},
        (),
        "block_size=1: it leaves no token to draft",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_checkpoint_is_refused_in_a_line(fault, tmp_path) -> None:
    which, fields, without, message = FAULTS[fault]
    place = damaged(tmp_path, which, without=without, **fields)
    with pytest.raises(CheckpointError, match=message) as error:
        type(SAVED[which][1]).from_pretrained(place)
    assert "\n" not in str(error.value)


def test_tables_of_tokens_that_contradict_each_other_are_refused(tmp_path) -> None:
    damaged(tmp_path, "own vocabulary", beside={"t2d": np.arange(11) < 5})
    with pytest.raises(CheckpointError, match="'t2d' and 'd2t' name different tokens"):
        DFlash.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": {"hidden_size": 8}}, "was made for a target of hidden size 16 with 11 tokens"),
        ({"taps": (5,)}, r"reads the target's layers \(5,\), but target has 2"),
        ({"draft": 4}, "4 deep, but a block of this drafter has room for 3"),
    ],
)
def test_what_cannot_serve_the_target_is_refused(changes, message) -> None:
    drafter = of_tiny(
        "dflash", **{name: value for name, value in changes.items() if name != "target"}
    )
    with pytest.raises(InputError, match=message):
        drafter.check(tiny_target(**changes.get("target", {})))


def test_taps_are_spread_as_z_lab_spreads_them() -> None:
    assert default_taps(36, 5) == (2, 10, 18, 26, 34)  # the outputs of layers 1, 9, 17, 25 and 33
    assert default_taps(36, 1) == (19,)
    assert default_taps(2, 5) == (1, 2)


@pytest.mark.full
def test_a_causal_block_is_read_as_far_as_the_draft_is_deep() -> None:
    """Check that the states of a causal block are the same as if it were read whole."""
    target = tiny_target()
    whole, cut = (
        of_tiny("dflash", variant={"causal": True}, block_size=6, draft=depth) for depth in (5, 2)
    )
    state = whole.start(target, 1, 8)
    long, short = (
        whole.block(target, state, jnp.array([3])),
        cut.block(target, state, jnp.array([3])),
    )
    assert (long.shape[1], short.shape[1]) == (6, 3)
    np.testing.assert_allclose(long[:, :3], short, atol=1e-5)
    assert (
        of_tiny("dflash", block_size=6, draft=2).block(target, state, jnp.array([3])).shape[1] == 3
    )


@pytest.mark.full
def test_the_children_of_a_markov_head_s_nodes_differ() -> None:
    target, rows = tiny_target(), Sampling(0.0).rows(1)
    drafter = of_tiny("dspark", draft=specjax.StaticTree(((0,), (1,), (0, 0), (1, 0))))
    drafter = drafter.replace(
        params=drafter.params
        | {name: drafter.params[name] * 200 for name in ("markov_in", "markov_out")}
    )
    keys = split_keys(jax.random.split(jax.random.key(0), 1), 2)
    draft, _ = drafter.propose(
        target, drafter.start(target, 1, 8), jnp.array([3]), rows, keys, jnp.ones(1, bool)
    )
    first, second, below_first, below_second = np.asarray(draft.tokens[0, 1:])
    assert first != second
    assert below_first != below_second


# --- with a small cache ---

SINKS, BUDGET, LENGTHS = 2, 7, (19, 4, 11)
RINGED = {
    "dflash": lambda: of_tiny("dflash", num_layers=2),
    "jetspec": lambda: of_tiny("dflash", num_layers=2, variant={"causal": True}),
    "windows of tokens": lambda: of_tiny("dflash", **WINDOWS),
    "windows beyond the ring": lambda: of_tiny("dflash", **WINDOWS | {"sliding_window": 8}),
    "windows of blocks": lambda: of_tiny(
        "dflash", variant={"window_of_block": True, "causal_in_window": True}, **WINDOWS
    ),
    "dspark": lambda: of_tiny("dspark", num_layers=2),
}


def having_heard(drafter, target, features):
    """Return the drafter's state when rows have read ``LENGTHS`` tokens.

    The features arrive in one chunk of up to 9 tokens, and then up to 2 at a time.
    """
    state, before = drafter.start(target, len(LENGTHS), 32), 0
    while before < max(LENGTHS):
        width = 2 if before else 9
        part = jnp.asarray(features[:, before : before + width])
        count = jnp.clip(jnp.asarray(LENGTHS) - before, 0, part.shape[1])
        zeros = jnp.zeros(part.shape[:2], jnp.int32)
        state = drafter.append_remote(
            target, state, RemoteFeatures(zeros, zeros, {"features": part}, count)
        )
        before += width
    return state


def is_seen(drafter, window, length, slot, position) -> bool:
    """Return whether a token of a block sees the one at a ``position`` of the text.

    A ring has kept the first and the newest tokens of the text.
    """
    if SINKS <= position < length - (BUDGET - SINKS) or position >= length:
        return False
    if window is None:
        return True
    end = length if drafter.config.window_of_block else length + slot + 1
    return position >= end - window


@pytest.fixture(scope="module")
def features():
    return np.random.default_rng(0).normal(size=(len(LENGTHS), 20, 16)).astype(np.float32)


@pytest.mark.full
@pytest.mark.thorough_except("dflash", "jetspec")
@pytest.mark.parametrize("which", RINGED)
def test_with_a_small_cache_a_block_sees_the_text_s_ends_alone(which, features) -> None:
    """Compare with a block over the whole text in which a mask hides the dropped tokens."""
    target, drafter = tiny_target(), with_more_weight(RINGED[which]())
    small = drafter.replace(cache=specjax.Streaming(sinks=SINKS), budget=BUDGET)
    state, root = having_heard(small, target, features), jnp.array([3, 5, 1])
    assert state.layers[0][0].shape[2] == BUDGET
    block = np.asarray(small.block(target, state, root))
    entries = drafter.context(
        jnp.asarray(features), jnp.broadcast_to(jnp.arange(20), (len(LENGTHS), 20))
    )
    size = block.shape[1]
    tokens = jnp.concatenate(
        [root[:, None], jnp.full((3, size - 1), drafter.config.mask_token_id)], axis=1
    )
    positions = jnp.asarray(LENGTHS)[:, None] + jnp.arange(size)

    def visible(layer, window):
        mask = [
            [[is_seen(drafter, window, n, slot, p) for p in range(20)] for slot in range(size)]
            for n in LENGTHS
        ]
        inside = [
            [key_slot <= slot or not drafter.is_causal(window) for key_slot in range(size)]
            for slot in range(size)
        ]
        if window is not None and not drafter.config.window_of_block:
            inside = [
                [inside[slot][key_slot] and slot - key_slot < window for key_slot in range(size)]
                for slot in range(size)
            ]
        return jnp.asarray(inside)[None], [(entries[layer], jnp.asarray(mask))]

    np.testing.assert_allclose(
        block, drafter.run(target, tokens, positions, jnp.arange(size), visible), atol=1e-5
    )
    whole = np.asarray(drafter.block(target, having_heard(drafter, target, features), root))
    np.testing.assert_allclose(block[1], whole[1], atol=1e-5)  # four tokens fit the cache
    assert np.abs(block[[0, 2]] - whole[[0, 2]]).max() > 1e-3


@pytest.mark.full
@pytest.mark.thorough_except("dflash")
@pytest.mark.parametrize("which", RINGED)
def test_a_small_cache_that_holds_the_text_changes_nothing(which, features) -> None:
    target, drafter = tiny_target(), with_more_weight(RINGED[which]())
    large = drafter.replace(cache=specjax.Streaming(sinks=SINKS), budget=24)
    blocks = [
        variant.block(target, having_heard(variant, target, features), jnp.array([3, 5, 1]))
        for variant in (drafter, large)
    ]
    np.testing.assert_allclose(*blocks, atol=1e-5)


@pytest.mark.full
def test_a_small_cache_holds_the_first_tokens_and_the_newest(features) -> None:
    target = tiny_target()
    small = of_tiny("dflash", num_layers=2).replace(
        cache=specjax.Streaming(sinks=SINKS), budget=BUDGET
    )
    state = having_heard(small, target, features)
    entries = small.context(
        jnp.asarray(features), jnp.broadcast_to(jnp.arange(20), (len(LENGTHS), 20))
    )
    for row, length in enumerate(LENGTHS):
        positions = [p for p in range(length) if p < SINKS or p >= length - (BUDGET - SINKS)]
        filled = int(state.filled[row])
        assert filled == len(positions)
        for ours, whole in zip(
            jax.tree.leaves(state.layers), jax.tree.leaves(entries), strict=True
        ):
            ring = np.asarray(ours[row, :, :filled])
            np.testing.assert_allclose(ring[:, :SINKS], whole[row][:, :SINKS], atol=1e-6)
            by_value = [
                np.sort(np.asarray(x), axis=1) for x in (ring, whole[row][:, np.array(positions)])
            ]
            np.testing.assert_allclose(*by_value, atol=1e-6)


def with_more_weight(drafter):
    return drafter.replace(
        params=jax.tree.map(lambda x: x * 8 if x.ndim == 2 else x, drafter.params)
    )


@pytest.mark.parametrize(
    ("cache", "budget", "message"),
    [
        (specjax.Streaming(sinks=8), 8, r"budget=8: the 8 sinks and the newest token need 9"),
        (
            specjax.SnapKV(),
            64,
            r"DFlash\(cache=SnapKV\(window=32, pool=5\)\): give Streaming\(\), or None",
        ),
    ],
)
def test_a_small_cache_that_cannot_be_is_refused(cache, budget, message) -> None:
    with pytest.raises(InputError, match=message):
        of_tiny("dflash").replace(cache=cache, budget=budget).check(tiny_target())
