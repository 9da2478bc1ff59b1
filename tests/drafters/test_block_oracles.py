"""Compare the oracles of `block_oracles`: speculators' classes, and the slow network in NumPy."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax.models.transformer import Target
from tests.drafters.block_oracles import (
    BLOCK,
    IDS,
    MASK,
    TAPS,
    VOCAB,
    Blocks,
    SlowBlock,
    Text,
    make_drafter,
    make_text,
    needs_speculators,
    slow_of,
    speculators_blocks,
    speculators_loss,
    write_as,
)

ANCHORS = (3, 9, 16)
SLIDING = ("sliding_attention", "full_attention")
DFLASH = {
    "full vocabulary": ({}, {}),
    "own vocabulary": ({"ids": IDS}, {}),
    "anchor drafts": ({"sample_from_anchor": True}, {"sample_from_anchor": True}),
    "windows, causal": (
        {"layer_types": SLIDING, "sliding_window": 4},
        {"layer_types": SLIDING, "window": 4, "causal": {"sliding_attention": True}},
    ),
    "windows, both ways": (
        {"layer_types": SLIDING, "sliding_window": 4, "sliding_window_non_causal": True},
        {"layer_types": SLIDING, "window": 4},
    ),
    "causal": (  # JetSpec, as far as speculators' configuration can express it
        {"layer_types": ("sliding_attention",) * 2, "sliding_window": 1000},
        {
            "layer_types": ("sliding_attention",) * 2,
            "window": 1000,
            "causal": {"sliding_attention": True},
        },
    ),
}
DSPARK = {
    "vanilla": {"markov_head_type": "vanilla"},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "rnn, anchor does not draft": {"markov_head_type": "rnn", "sample_from_anchor": False},
    "own vocabulary": {"ids": IDS},
    "confidence of states alone": {"confidence_head_with_markov": False},
    "no Markov head": {"markov_rank": 0, "confidence_head_with_markov": False},
    "no confidence head": {"enable_confidence_head": False},
}
PEAGLE = {
    "plain": {},
    "own vocabulary": {"ids": IDS},
    "one layer": {"layers": 1},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "a norm for each tap": {"fc_norm": True},
    "llama layers": {"kind": "llama"},
}


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def any_text(request, tmp_path_factory) -> Text:
    return make_text(tmp_path_factory.mktemp("target") / "target", request.param)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Text:
    return make_text(tmp_path_factory.mktemp("target") / "target")


def assert_the_same(slow: SlowBlock, text: Text, blocks: Blocks) -> None:
    """Check that states and logits agree within 1e-4, and drafts token for token."""
    for i, at in enumerate(blocks.anchors):
        features, anchor = text.features[:at], int(text.tokens[at])
        states = slow.block(features, anchor)
        np.testing.assert_allclose(states, blocks.states[i], atol=1e-4)
        np.testing.assert_allclose(states @ slow.head.T, blocks.logits[i], atol=1e-4, rtol=1e-4)
        chain, corrected, confidence = slow.draft(features, anchor)
        assert chain == blocks.chains[i].tolist()
        np.testing.assert_allclose(corrected, blocks.corrected[i], atol=1e-4, rtol=1e-4)
        np.testing.assert_allclose(
            confidence, [] if blocks.confidence is None else blocks.confidence[i], atol=1e-4
        )


@pytest.mark.full
def test_taps_are_counted_as_ours_are(any_text) -> None:
    """Check that speculators' layer id k is the stream entering layer k, as our tap k is.

    The state after the last layer is tap L.
    """
    target = Target.from_pretrained(any_text.directory, dtype=np.float32)
    output, _ = target.forward(any_text.tokens[None], taps=(*TAPS, target.config.num_layers))
    np.testing.assert_allclose(output.taps[0, :, :-1], any_text.features, atol=1e-4)
    np.testing.assert_allclose(output.taps[0, :, -1], any_text.last, atol=1e-4)
    np.testing.assert_allclose(output.logits[0], any_text.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.full
@pytest.mark.thorough_except("qwen3-full vocabulary")
@pytest.mark.parametrize("variant", DFLASH)
def test_dflash(variant, any_text, tmp_path) -> None:
    needs_speculators()
    options, slow = DFLASH[variant]
    model = make_drafter(tmp_path / "drafter", "dflash", any_text, **options)
    blocks = speculators_blocks(model, any_text, ANCHORS)
    assert blocks.chains.shape[1] == BLOCK - (not options.get("sample_from_anchor", False))
    assert_the_same(slow_of(tmp_path / "drafter", any_text, **slow), any_text, blocks)


@pytest.mark.full
@pytest.mark.parametrize("variant", DSPARK)
def test_dspark(variant, text, tmp_path) -> None:
    needs_speculators()
    options = {"markov_rank": 6} | DSPARK[variant]
    model = make_drafter(tmp_path / "drafter", "dspark", text, **options)
    blocks = speculators_blocks(model, text, ANCHORS)
    drafts_anchor = options.get("sample_from_anchor", True)
    assert blocks.chains.shape[1] == BLOCK - (not drafts_anchor)
    assert (blocks.confidence is None) == (options.get("enable_confidence_head") is False)
    slow = slow_of(
        tmp_path / "drafter",
        text,
        sample_from_anchor=drafts_anchor,
        markov=options.get("markov_head_type", "vanilla"),
    )
    assert_the_same(slow, text, blocks)
    if options["markov_rank"]:  # the head changes which tokens are drafted
        likeliest = blocks.logits.argmax(-1)[:, -blocks.chains.shape[1] :]
        assert (blocks.chains != slow.own_ids(likeliest)).any()


@pytest.mark.full
@pytest.mark.parametrize("anchor_drafts", [False, True])
def test_dflash2(anchor_drafts, text, tmp_path) -> None:
    needs_speculators()
    sizes = {
        "conv_group_size": 8,
        "selector_rank": 6,
        "selector_top_k": 4,
        "sample_from_anchor": anchor_drafts,
    }
    model = make_drafter(tmp_path / "drafter", "dflash2", text, **sizes)
    blocks = speculators_blocks(model, text, ANCHORS)
    slow = slow_of(tmp_path / "drafter", text, top_k=4, sample_from_anchor=anchor_drafts)
    assert_the_same(slow, text, blocks)
    assert (np.isfinite(blocks.corrected).sum(-1) == 4).all()
    assert (blocks.chains != blocks.logits.argmax(-1)[:, -blocks.chains.shape[1] :]).any()
    weights = {name: value for name, value in slow.weights.items() if "_conv." not in name}
    plain = replace(slow, weights=weights).block(text.features[:9], int(text.tokens[9]))
    assert np.abs(plain - blocks.states[1]).max() > 0.1  # the convolutions change states


@pytest.mark.full
@pytest.mark.parametrize("variant", PEAGLE)
def test_peagle(variant, any_text, tmp_path) -> None:
    needs_speculators()
    model = make_drafter(tmp_path / "drafter", "peagle", any_text, **PEAGLE[variant])
    blocks = speculators_blocks(model, any_text, ANCHORS, depth=4)
    slow = slow_of(
        tmp_path / "drafter",
        any_text,
        norm_before_residual="norm_before_residual" in PEAGLE[variant],
    )
    for i, at in enumerate(ANCHORS):
        states = slow.peagle_block(
            any_text.features[:at], any_text.tokens[:at].tolist(), int(any_text.tokens[at]), depth=4
        )
        np.testing.assert_allclose(states, blocks.states[i], atol=1e-4)
        logits = states @ slow.head.T
        np.testing.assert_allclose(logits, blocks.logits[i], atol=1e-4, rtol=1e-4)
        assert slow.own_ids(logits.argmax(-1)).tolist() == blocks.chains[i].tolist()


def test_a_causal_block_may_be_cut(text, tmp_path) -> None:
    """Check that the first slots depend on the block's length unless the block is causal."""
    needs_speculators()
    make_drafter(tmp_path / "drafter", "dflash", text)
    features, anchor = text.features[:9], int(text.tokens[9])
    for causal in (True, False):
        slow = slow_of(tmp_path / "drafter", text, causal={"full_attention": causal})
        cut, whole = slow.block(features, anchor, length=3), slow.block(features, anchor)
        assert (np.abs(cut - whole[:3]).max() < 1e-9) == causal


@pytest.mark.parametrize(
    "mistake",
    ["taps in another order", "theta", "anchor sees itself in the context", "position", "window"],
)
def test_mistakes_show(mistake, text, tmp_path) -> None:
    """Check that likely mistakes cause differences far above the tolerance."""
    needs_speculators()
    types = ("sliding_attention",) * 2
    model = make_drafter(tmp_path / "drafter", "dflash", text, layer_types=types, sliding_window=4)
    right = {"layer_types": types, "window": 4, "causal": {"sliding_attention": True}}
    slow, features, at = slow_of(tmp_path / "drafter", text, **right), text.features[:9], 9
    if mistake == "taps in another order":
        features = features[:, ::-1]
    elif mistake == "theta":
        slow = replace(slow, theta=20_000.0)
    elif mistake == "anchor sees itself in the context":
        features = text.features[: at + 1]
    elif mistake == "position":
        features = text.features[1:at]  # one token less: all positions are lower by one
        slow = replace(slow, window=3)
    else:
        slow = replace(slow, window_from="query")
    blocks = speculators_blocks(model, text, [at])
    assert np.abs(slow.block(features, int(text.tokens[at])) - blocks.states[0]).max() > 1e-2


def test_layouts_hold_the_same_network(text, tmp_path) -> None:
    """Check that speculators' converter reads z-lab's layout as we write it, with the same blocks.

    z-lab numbers layers one lower.
    """
    needs_speculators()
    from speculators.convert.dflash import DFlashConverter

    model = make_drafter(tmp_path / "drafter", "dflash", text)
    write_as("zlab", tmp_path / "drafter", tmp_path / "zlab", text)
    raw = json.loads((tmp_path / "zlab" / "config.json").read_text())
    assert raw["dflash_config"] == {
        "mask_token_id": MASK,
        "target_layer_ids": [tap - 1 for tap in TAPS],
    }
    names = set(load_file(tmp_path / "zlab" / "model.safetensors"))
    assert not names & {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}
    DFlashConverter().convert(
        tmp_path / "zlab", tmp_path / "converted", base_model=str(text.directory), validate=False
    )
    converted = json.loads((tmp_path / "converted" / "config.json").read_text())
    assert converted["aux_hidden_state_layer_ids"] == list(TAPS)
    again = load_file(tmp_path / "converted" / "model.safetensors")
    for name, value in load_file(tmp_path / "drafter" / "model.safetensors").items():
        np.testing.assert_array_equal(again[name], value)
    assert_the_same(
        slow_of(tmp_path / "zlab", text), text, speculators_blocks(model, text, ANCHORS)
    )


def test_the_deepspec_layout_brings_the_targets_embedding_and_head(text, tmp_path) -> None:
    needs_speculators()
    model = make_drafter(tmp_path / "drafter", "dspark", text, markov_rank=6)
    write_as("deepspec", tmp_path / "drafter", tmp_path / "deepspec", text)
    tensors = load_file(tmp_path / "deepspec" / "model.safetensors")
    assert (
        tensors["markov_head.markov_w1.weight"].shape
        == tensors["markov_head.markov_w2.weight"].shape
        == (VOCAB, 6)
    )
    np.testing.assert_array_equal(tensors["embed_tokens.weight"], text.embedding)
    slow = slow_of(
        tmp_path / "deepspec",
        replace(text, embedding=text.head, head=text.embedding),
        sample_from_anchor=True,
    )
    assert_the_same(slow, text, speculators_blocks(model, text, ANCHORS))


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


@pytest.mark.parametrize("weighting", ["fixed-exp-decay", "dpace"])
def test_dflash_loss(weighting, text, tmp_path) -> None:
    """Check the cross entropy to the target's likeliest tokens, by a loop over anchors."""
    needs_speculators()
    model = make_drafter(tmp_path / "drafter", "dflash", text)
    mask = np.arange(len(text.tokens)) >= 6
    mask[11] = False
    theirs = speculators_loss(
        model, text, mask, gamma=3.0, per_position_loss_weight=weighting, dpace_alpha=0.3
    )
    slow, total, count = slow_of(tmp_path / "drafter", text), 0.0, 0
    for anchor in np.flatnonzero(mask[:-BLOCK]):
        states = slow.block(text.features[:anchor], int(text.tokens[anchor]))
        # Slot k predicts the token at anchor + k.
        labels = text.logits[anchor : anchor + BLOCK - 1].argmax(-1)
        counts = mask[anchor + 1 : anchor + BLOCK]
        chosen = softmax(states[1:] @ slow.head.T)[np.arange(BLOCK - 1), labels]
        if weighting == "dpace":
            survives = np.cumprod(np.where(counts, 0.7 * chosen + 0.3, 1.0)) * counts
            weights = np.cumsum(survives[::-1])[::-1]
        else:
            weights = np.exp(-np.arange(BLOCK - 1) / 3.0)
        total += (-np.log(chosen) * weights * counts).sum()
        count += counts.sum()
    assert theirs == pytest.approx(total / count, rel=1e-4)


def test_dspark_loss(text, tmp_path) -> None:
    """Check 0.1 CE + 0.9 TV + the confidence head's loss.

    The Markov head reads the text's own token before each slot.
    """
    needs_speculators()
    model = make_drafter(tmp_path / "drafter", "dspark", text, markov_rank=6)
    mask = np.arange(len(text.tokens)) >= 6
    theirs = speculators_loss(model, text, mask, losses={"ce": 0.1, "tv": 0.9}, gamma=3.0)
    slow, total, count = slow_of(tmp_path / "drafter", text, sample_from_anchor=True), 0.0, 0
    first, second = (slow.weights[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
    for anchor in np.flatnonzero(mask[:-BLOCK]):
        states = slow.block(text.features[:anchor], int(text.tokens[anchor]))
        before = first[text.tokens[anchor : anchor + BLOCK]]
        drafted = softmax(states @ slow.head.T + before @ second.T)
        # Slot k predicts the token at anchor + k + 1.
        expected = softmax(text.logits[anchor : anchor + BLOCK])
        entropy = -np.log(drafted[np.arange(BLOCK), expected.argmax(-1)])
        accepted = np.minimum(drafted, expected).sum(-1)
        sure = slow.linear("confidence_head.proj", np.concatenate([states, before], axis=-1))[:, 0]
        confidence = np.log1p(np.exp(sure)) - accepted * sure
        losses = 0.1 * entropy + 0.9 * (1 - accepted) + confidence
        total += (losses * np.exp(-np.arange(BLOCK) / 3.0)).sum()
        count += BLOCK
    assert theirs == pytest.approx(total / count, rel=1e-4)


def test_dflash2_loss(text, tmp_path) -> None:
    """Check the unary cross entropy, plus the selector's over its candidates.

    A label that is not among the candidates replaces the last one.
    """
    needs_speculators()
    model = make_drafter(
        tmp_path / "drafter", "dflash2", text, conv_group_size=8, selector_rank=6, selector_top_k=4
    )
    mask = np.arange(len(text.tokens)) >= 6
    theirs = speculators_loss(model, text, mask, gamma=3.0, selector_loss_alpha=0.6)
    slow, total, count, missing = slow_of(tmp_path / "drafter", text, top_k=4), 0.0, 0, 0
    codes = [
        slow.weights[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor")
    ]
    for anchor in np.flatnonzero(mask[:-BLOCK]):
        states = slow.block(text.features[:anchor], int(text.tokens[anchor]))
        for slot in range(1, BLOCK):
            logits = slow.head @ states[slot]
            label = int(text.logits[anchor + slot - 1].argmax())
            best = np.argsort(-logits)[:4]
            missing += label not in best
            best[3] = best[3] if label in best else label
            projected = slow.linear("candidate_selector.hidden_projection", states[slot])
            context = codes[0][text.tokens[anchor + slot - 1]] * projected
            scores = logits[best] + codes[1][best] @ context
            loss = -np.log(softmax(logits)[label]) - 0.6 * np.log(softmax(scores)[best == label][0])
            total += loss * np.exp(-(slot - 1) / 3.0)
            count += 1
    assert 0 < missing < count
    assert theirs == pytest.approx(total / count, rel=1e-4)
