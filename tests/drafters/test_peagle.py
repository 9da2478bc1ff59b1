"""Compare P-EAGLE with speculators' own classes and the slow network.

The file also tests its checkpoints, and which checkpoints are refused.
"""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax import decoding
from specjax.decoding.options import GenerationOptions
from specjax.drafters import Eagle3, PEagle, registry
from specjax.drafters.base import RemoteFeatures
from specjax.drafts.shapes import Chain, DynamicTree, StaticTree
from specjax.errors import InputError
from specjax.models.fields import CheckpointError
from specjax.models.primitives import rms_norm
from specjax.models.transformer import Target
from specjax.sampling import Sampling
from tests.conftest import tiny_target
from tests.drafters.block_oracles import (
    DRAFT_THETA,
    IDS,
    MASK,
    TAPS,
    Text,
    make_drafter,
    make_text,
    needs_speculators,
    read_drafter,
    slow_of,
    speculators_blocks,
)
from tests.drafters.test_block_oracles import ANCHORS, PEAGLE

DEPTH = 4
SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 5}
VARIANTS = PEAGLE | {
    "windows": SLIDING,
    "windows, llama": SLIDING | {"kind": "llama"},
    "no own output": {"norm_output": True},  # EAGLE-3.1's norm that has no meaning here
}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Text:
    return make_text(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture(scope="module")
def target(text) -> Target:
    return Target.from_pretrained(text.directory, dtype=np.float32)


@pytest.fixture(scope="module")
def checkpoint(text, tmp_path_factory) -> Path:
    """Return a checkpoint in SpecForge's layout, which every test may read.

    It has a vocabulary of its own and two layers.
    """
    directory = tmp_path_factory.mktemp("drafter")
    drafter(Target.from_pretrained(text.directory, dtype=np.float32)).save_pretrained(directory)
    return directory


def drafter(target: Target, draft=Chain(DEPTH), **options) -> PEagle:
    """Return a drafter with random weights.

    A head or an embedding like the target's would hide mistakes.
    """
    options = {"ids": IDS, "taps": TAPS, "num_layers": 2, "mask_token_id": MASK} | options
    peagle = PEagle.init(target, jax.random.key(3), draft, **options)
    return peagle.replace(params=jax.tree.map(_far_from_nothing, peagle.params))


def _far_from_nothing(leaf: jax.Array) -> jax.Array:
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    noise = np.random.default_rng(leaf.size).normal(size=leaf.shape).astype(np.float32)
    return jnp.asarray(1 + 0.3 * noise if leaf.ndim == 1 else 0.3 * noise)


def heard(peagle: PEagle, target: Target, tokens: np.ndarray, count: int, pieces=()):
    """Return the state after the first ``count`` of ``tokens [T]``.

    The drafter receives them in pieces; ``pieces`` are the starts of all but the first one.
    """
    output, entries = target.read(jnp.asarray(tokens)[None], taps=peagle.taps(target.config))
    arrays = peagle.remote_inputs(target, output, entries)
    state = peagle.start(target, 1, len(tokens) + 2)
    for begin, end in zip((0, *pieces), (*pieces, count), strict=True):
        features = {name: array[:, begin:end] for name, array in arrays.items()}
        read, following = (
            jnp.asarray(tokens[first : first + end - begin])[None] for first in (begin, begin + 1)
        )
        state = peagle.append_remote(
            target, state, RemoteFeatures(read, following, features, jnp.array([end - begin]))
        )
    return state


def chain_of(peagle: PEagle, target: Target, state, root: int) -> list[int]:
    keys = jnp.broadcast_to(jax.random.key(0), (peagle.draft_shape.depth, 1))
    draft, _ = peagle.propose(
        target, state, jnp.array([root]), Sampling(temperature=0.0).rows(1), keys, jnp.ones(1, bool)
    )
    return np.asarray(draft.tokens)[0, 1:].tolist()


def assert_drafts_as(peagle: PEagle, target: Target, text: Text, blocks) -> None:
    """Check that states and logits agree within 1e-4, and chains token for token.

    The drafter receives the text at once, and in three pieces.
    """
    for i, at in enumerate(blocks.anchors.tolist()):
        for pieces in ((), (1, at - 1)):
            state = heard(peagle, target, text.tokens, at, pieces)
            states = peagle.block(target, state)
            normed = (
                states
                if peagle.config.norm_output
                else rms_norm(states, peagle.params["norm"], 1e-5)
            )
            np.testing.assert_allclose(normed[0], blocks.states[i], atol=1e-4)
            np.testing.assert_allclose(
                peagle.logits(target, states)[0], blocks.logits[i], atol=1e-4, rtol=1e-4
            )
            assert (
                chain_of(peagle, target, state, int(text.tokens[at])) == blocks.chains[i].tolist()
            )


@pytest.mark.full
@pytest.mark.thorough_except("one layer", "plain")
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_drafts_as_speculators_does(variant, text, target, tmp_path) -> None:
    needs_speculators()
    model = make_drafter(tmp_path / "drafter", "peagle", text, **VARIANTS[variant])
    peagle = PEagle.from_pretrained(tmp_path / "drafter", draft=DEPTH, dtype=np.float32)
    assert peagle.config.taps == TAPS and peagle.config.mask_token_id == MASK
    assert peagle.sizes.rope.theta == DRAFT_THETA
    peagle.check(target)
    assert_drafts_as(peagle, target, text, speculators_blocks(model, text, ANCHORS, depth=DEPTH))


@pytest.mark.full
@pytest.mark.thorough_except("own vocabulary", "norm_before_residual")
@pytest.mark.parametrize(
    "variant", ["own vocabulary", "norm_before_residual", "a norm for each tap", "windows, llama"]
)
def test_speculators_drafts_as_what_is_written(variant, text, target, tmp_path) -> None:
    needs_speculators()
    make_drafter(tmp_path / "theirs", "peagle", text, **VARIANTS[variant])
    peagle = PEagle.from_pretrained(tmp_path / "theirs", draft=DEPTH, dtype=np.float32)
    peagle.save_pretrained(tmp_path / "ours", layout="speculators", target=str(text.directory))
    model = read_drafter(tmp_path / "ours", "peagle")
    assert_drafts_as(peagle, target, text, speculators_blocks(model, text, ANCHORS, depth=DEPTH))
    raw = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == DEPTH


@pytest.mark.full
def test_windows_are_no_ornament(text, target, tmp_path) -> None:
    peagle = drafter(target).replace(draft=Chain(DEPTH))
    windowed = peagle.replace(config=_windowed(peagle.config))
    states = [
        np.asarray(variant.block(target, heard(variant, target, text.tokens, 16)))
        for variant in (peagle, windowed)
    ]
    assert np.abs(states[0] - states[1]).max() > 1e-2
    with pytest.raises(
        InputError, match=r"6 deep, but layers of this drafter see only the newest 5 pairs"
    ):
        windowed.replace(draft=Chain(6)).check(target)


def _windowed(config):
    return replace(config, layer=replace(config.layer, sliding_window=5, windowed_layers=(0,)))


@pytest.mark.parametrize("layout", PEagle.layouts)
@pytest.mark.parametrize(
    "variant", [{}, {"norm_before_fc": True, "norm_before_residual": True}, {"fc_norm": True}]
)
@pytest.mark.full
@pytest.mark.thorough_except("variant0-speculators")
def test_it_drafts_as_the_network_written_out(layout, variant, text, target, tmp_path) -> None:
    """Check both layouts without speculators."""
    drafter(target, variant=variant).save_pretrained(tmp_path / "drafter", layout=layout)
    peagle = PEagle.from_pretrained(tmp_path / "drafter", draft=DEPTH, dtype=np.float32)
    slow = slow_of(
        tmp_path / "drafter",
        text,
        norm_before_residual="norm_before_residual" in variant,
        theta=20_000.0,
    )
    for at in ANCHORS:
        state = heard(peagle, target, text.tokens, at)
        tokens = text.tokens[:at].tolist()
        states = slow.peagle_block(text.features[:at], tokens, int(text.tokens[at]), depth=DEPTH)
        logits = states @ slow.head.T
        np.testing.assert_allclose(
            peagle.logits(target, peagle.block(target, state))[0], logits, atol=1e-4, rtol=1e-4
        )
        chain = chain_of(peagle, target, state, int(text.tokens[at]))
        assert chain == slow.own_ids(logits.argmax(-1)).tolist()


@pytest.mark.full
def test_a_draft_is_a_prefix_of_a_deeper_one(text, target) -> None:
    """Check that each depth sees earlier depths only.

    So a drafter runs no more depths than the draft has.
    """
    state = heard(drafter(target), target, text.tokens, 9)
    chains = [
        chain_of(drafter(target, draft), target, state, int(text.tokens[9])) for draft in (1, 2, 6)
    ]
    assert chains[0] == chains[1][:1]
    assert chains[1] == chains[2][:2]


STATIC = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "shape", [pytest.param(STATIC, marks=pytest.mark.thorough), DynamicTree(3, 3, 9)]
)
def test_all_nodes_of_a_depth_offer_the_same(shape, text, target) -> None:
    """Check drafts before and after a verdict, in rows of different lengths."""
    peagle = drafter(target, shape)
    rows = np.array([text.tokens[:7], [*text.tokens[:4], 0, 0, 0]])
    options = GenerationOptions(max_new_tokens=12, sampling=Sampling(temperature=0.0))
    _, state = decoding.start(target, peagle, rows, np.array([7, 4]), options)
    propose, advance = jax.jit(decoding.propose_step), jax.jit(decoding.advance)
    for _ in range(3):
        draft, drafting = propose(target, peagle, state)
        for row in range(2):
            tokens = np.asarray(state.tokens[row, : int(state.lengths[row])])
            block = peagle.block(target, heard(peagle, target, tokens, len(tokens) - 1))
            logits = peagle.logits(target, block)[0]
            parents = np.broadcast_to(np.asarray(draft.parents), draft.tokens.shape)[row]
            depths = np.broadcast_to(np.asarray(draft.depths), draft.tokens.shape)[row]
            for parent in set(parents[1:].tolist()):
                children = np.flatnonzero(parents == parent)
                best = IDS[np.argsort(-logits[depths[parent]])[: len(children)]]
                assert np.asarray(draft.tokens)[row, children].tolist() == best.tolist()
        state, _ = advance(target, peagle, drafting, draft)


# --- its checkpoints ---


@pytest.mark.parametrize("layout", PEagle.layouts)
@pytest.mark.parametrize(
    "options",
    [{}, {"ids": None}, {"variant": {"fc_norm": True}}, {"model_type": "qwen3", "qk_norm": True}],
)
def test_a_checkpoint_is_read_back_bit_for_bit(layout, options, target, tmp_path) -> None:
    saved = drafter(target, **options)
    if layout == "specforge" and "qk_norm" in options:
        with pytest.raises(InputError, match=r"layout='specforge': it has Llama's layers"):
            saved.save_pretrained(tmp_path / "once", layout=layout)
        return
    saved.save_pretrained(tmp_path / "once", layout=layout)
    read = PEagle.from_pretrained(tmp_path / "once", draft=DEPTH, dtype=np.float32)
    assert read.config == saved.config
    jax.tree.map(np.testing.assert_array_equal, read.params, saved.params)
    read.save_pretrained(tmp_path / "twice", layout=layout)
    for file in (tmp_path / "once").iterdir():
        assert file.read_bytes() == (tmp_path / "twice" / file.name).read_bytes()


def test_windows_are_written_and_read(target, tmp_path) -> None:
    saved = drafter(target)
    saved = saved.replace(config=_windowed(saved.config))
    saved.save_pretrained(tmp_path)
    assert PEagle.from_pretrained(tmp_path).config == saved.config
    with pytest.raises(
        InputError, match=r"layout='specforge': it has Llama's layers without windows"
    ):
        saved.save_pretrained(tmp_path / "other", layout="specforge")


def test_layers_are_named_as_each_reader_counts_them(target, tmp_path) -> None:
    for layout in PEagle.layouts:
        drafter(target).save_pretrained(tmp_path / layout, layout=layout)
    vllm, specforge = (
        json.loads((tmp_path / layout / "config.json").read_text()) for layout in PEagle.layouts
    )
    assert vllm["eagle_aux_hidden_state_layer_ids"] == list(TAPS)
    assert specforge["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [
        tap - 1 for tap in TAPS
    ]
    assert vllm["mask_token_id"] == specforge["mask_token_id"] == MASK
    assert vllm["norm_before_residual"] is False  # always written: the readers' defaults differ
    assert vllm["speculators_model_type"] == "peagle"
    assert specforge["architectures"] == ["PEagleDraftModel"]
    names = [set(load_file(tmp_path / layout / "model.safetensors")) for layout in PEagle.layouts]
    assert names[0] == names[1]
    assert names[0] >= {"mask_hidden", "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}
    assert "layers.0.hidden_norm.weight" in names[0]


@pytest.mark.parametrize("layout", PEagle.layouts)
def test_it_is_recognised_before_eagle3(layout, target, tmp_path) -> None:
    drafter(target).save_pretrained(tmp_path, layout=layout)
    method, *_ = registry.find(str(tmp_path))
    assert method.trained is PEagle
    raw = json.loads((tmp_path / "config.json").read_text())
    # The tensors of a checkpoint on the hub are not known yet.
    assert PEagle.checkpoint_format.recognises(raw, ())
    assert PEagle.checkpoint_format.recognises(
        {"architectures": ["LlamaForCausalLMEagle3"]}, ["mask_hidden"]
    )
    Eagle3.init(tiny_target(), jax.random.key(0)).save_pretrained(tmp_path / "eagle3")
    assert registry.find(str(tmp_path / "eagle3"))[0].trained is Eagle3


def change(directory: Path, copy: Path, spoil=None, drop=(), **fields) -> Path:
    """Return a copy of a checkpoint with other tensors and other fields of config.json."""
    copy.mkdir()
    raw = json.loads((directory / "config.json").read_text()) | fields
    (copy / "config.json").write_text(
        json.dumps({name: value for name, value in raw.items() if name not in drop})
    )
    tensors = dict(load_file(directory / "model.safetensors"))
    if spoil is not None:
        spoil(tensors)
    save_file(
        {name: np.ascontiguousarray(array) for name, array in tensors.items()},
        copy / "model.safetensors",
    )
    return copy


def _as_eagle3(name: str) -> str:
    return name.replace("layers.0.", "midlayer.")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda tensors: tensors.pop("mask_hidden"),
            "'mask_hidden' is missing, which a P-EAGLE drafter reads in place of",
        ),
        (
            lambda tensors: tensors.pop("lm_head.weight"),
            "'lm_head.weight' of a P-EAGLE drafter .* is missing",
        ),
        (
            lambda tensors: tensors.pop("d2t"),
            "'d2t' is missing: it says which of the target's 48 tokens the drafter's 16",
        ),
        (lambda tensors: tensors.pop("fc.weight"), "fc.weight reads 0 numbers"),
        (
            lambda tensors: tensors.update(mask_hidden=tensors["mask_hidden"][..., 1:]),
            r"'mask_hidden' has shape \(1, 1, 95\)",
        ),
        (
            lambda tensors: tensors.update(d2t=tensors["d2t"] + 40),
            "'d2t' must map the drafter's tokens to different tokens",
        ),
        (
            lambda tensors: tensors.update(extra=np.zeros(3, np.float32)),
            "'extra' is no part of a P-EAGLE drafter",
        ),
        (
            lambda tensors: [
                tensors.update({_as_eagle3(name): tensors.pop(name)}) for name in list(tensors)
            ],
            r"begin with 'midlayer\.'",
        ),
    ],
)
def test_half_a_drafter_is_refused_by_name(spoil, words, checkpoint, tmp_path) -> None:
    with pytest.raises(CheckpointError, match=words):
        PEagle.from_pretrained(change(checkpoint, tmp_path / "spoilt", spoil))


def test_a_table_without_a_head_is_refused(target, tmp_path) -> None:
    drafter(target).save_pretrained(tmp_path / "whole", layout="specforge")

    def spoil(tensors):
        tensors.pop("lm_head.weight")

    spoilt = change(tmp_path / "whole", tmp_path / "spoilt", spoil, drop=["draft_vocab_size"])
    with pytest.raises(CheckpointError, match="lm_head is missing: the target's serves only"):
        PEagle.from_pretrained(spoilt)


def test_the_mask_token_must_be_known(checkpoint, tmp_path) -> None:
    without = change(checkpoint, tmp_path / "without", drop=["mask_token_id"])
    with pytest.raises(
        CheckpointError, match=r"mask_token_id is missing.*from_pretrained\(\.\.\., mask_token_id="
    ):
        PEagle.from_pretrained(without)
    assert PEagle.from_pretrained(without, mask_token_id=7).config.mask_token_id == 7
    with pytest.raises(
        CheckpointError, match="mask_token_id=48: must be a token of the target, from 0 to 47"
    ):
        PEagle.from_pretrained(without, mask_token_id=48)
    vllm = change(checkpoint, tmp_path / "vllm", drop=["mask_token_id"], pard_token=9)
    assert PEagle.from_pretrained(vllm).config.mask_token_id == 9
    with pytest.raises(CheckpointError, match=r"mask_token_id is stated as 7 and 47: give only"):
        PEagle.from_pretrained(checkpoint, mask_token_id=7)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (
            {"layer_types": ["sliding_attention"] * 2},
            "layer_types has 'sliding_attention', but there is no sliding_window",
        ),
        (
            {"layer_types": ["chunked"] * 2},
            "layer_types has 'chunked': only 'full_attention' and 'sliding_attention'",
        ),
        (
            {"layer_types": ["sliding_attention"], "sliding_window": 4},
            "layer_types names 1 layers of 2",
        ),
    ],
)
def test_windows_that_make_no_sense_are_refused(layer, words, checkpoint, tmp_path) -> None:
    described = json.loads((checkpoint / "config.json").read_text())["transformer_layer_config"]
    with pytest.raises(CheckpointError, match=words):
        PEagle.from_pretrained(
            change(checkpoint, tmp_path / "spoilt", transformer_layer_config=described | layer)
        )


def test_a_target_that_it_was_not_made_for_is_refused(target) -> None:
    peagle = drafter(target)
    with pytest.raises(
        InputError,
        match="this PEagle was made for a target with a vocabulary of 48 tokens, but target has 11",
    ):
        peagle.check(tiny_target())
    with pytest.raises(InputError, match="a node has 17 children, but the vocabulary has 16"):
        peagle.replace(draft=DynamicTree(top_k=17, depth=3, nodes=20)).check(target)
    with pytest.raises(
        InputError, match="mask_token_id=48: must be a token of the target, from 0 to 47"
    ):
        drafter(target, mask_token_id=48)
    assert not peagle.drafts_elsewhere
