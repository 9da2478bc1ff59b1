"""Compare EAGLE-3 with the speculators package's own model.

The file also tests its checkpoints in both layouts, and which checkpoints are refused.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax.drafters import Eagle3
from specjax.drafters.checkpoints import eagle3 as eagle3_checkpoint
from specjax.drafts.shapes import Chain, DynamicTree
from specjax.errors import InputError
from specjax.models.fields import CheckpointError
from specjax.training.objectives.unrolling import unroll
from tests.conftest import tiny_target
from tests.drafters.block_oracles import needs_speculators

IDS = (0, 1, 3, 4, 7, 8, 10)  # the tokens that the drafter can draft, among the target's 11
VARIANTS = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "eagle-3.1": {"fc_norm": True, "norm_output": True},
    "two layers": {"layers": 2, "norm_before_residual": True},
    "qwen3 layers": {"kind": "qwen3"},
}


def independent_model(layers: int = 1, kind: str = "llama", **flags):
    """Return speculators' model with random weights, in a shape that fits `tiny_target`."""
    needs_speculators()
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3.config import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig, Qwen3Config

    from tests.with_torch import torch

    sizes = {
        "vocab_size": 11,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }
    layer = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](**sizes)
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=len(IDS),
        eagle_aux_hidden_state_layer_ids=[0, 1, 2],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
        **flags,
    )
    torch.manual_seed(0)
    model = Eagle3DraftModel(config)
    d2t, t2d = torch.tensor(IDS) - torch.arange(len(IDS)), torch.zeros(11, dtype=torch.bool)
    t2d[list(IDS)] = True
    model.load_vocab_mappings(t2d, d2t)
    for name, parameter in model.named_parameters():
        mean = 1.0 if "norm" in name else 0.0
        torch.nn.init.normal_(parameter, mean, 0.3)
    return model.eval()


@pytest.mark.full
@pytest.mark.thorough_except("eagle-3.1")
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_speculators(variant, tmp_path) -> None:
    """Compare logits after reading speculators' own checkpoint.

    The window has two documents, and the training-time test has three steps.
    """
    from tests.with_torch import torch

    model = independent_model(**VARIANTS[variant])
    model.save_pretrained(tmp_path)
    drafter = Eagle3.from_pretrained(tmp_path, draft=Chain(3), dtype=np.float32)
    assert drafter.config.taps == (0, 1, 2)
    rng = np.random.default_rng(0)
    length, documents = 9, np.array([0] * 5 + [1] * 4)
    taps = rng.normal(size=(length, 3, 16)).astype(np.float32)
    following = rng.integers(0, 11, length)
    expected = []
    model.lm_head.register_forward_hook(
        lambda _module, _inputs, output: expected.append(output.detach().numpy()[0])
    )
    with torch.no_grad():
        model(
            torch.tensor(taps.reshape(1, length, -1)),
            torch.tensor(following)[None],
            torch.tensor(documents)[None],
            position_ids=torch.arange(length)[None],
            ttt_steps=3,
        )
    # The token before the first pair is not read.
    tokens = jnp.asarray(np.concatenate([[0], following])[None])
    segments = jnp.asarray(np.append(documents, 1)[None])
    target = tiny_target()
    output = type("Output", (), {"taps": jnp.asarray(taps[None])})()
    states = unroll(
        drafter,
        {"tokens": tokens, "segments": segments},
        target,
        drafter.features(output),
        3,
        detach=False,
    )
    for step, state in enumerate(states):
        ours = np.asarray(drafter.logits(target, state))[0, : length - step]  # the rest is padding
        np.testing.assert_allclose(ours, expected[step][: length - step], atol=1e-4)


def drafter(**options) -> Eagle3:
    return Eagle3.init(tiny_target(), jax.random.key(0), Chain(3), ids=np.array(IDS), **options)


@pytest.mark.full
@pytest.mark.thorough_except("variant0-eagle3", "variant1-speculators", "variant2-eagle3")
@pytest.mark.parametrize("layout", Eagle3.layouts)
@pytest.mark.parametrize(
    "variant", [{}, {"fc_norm": True, "norm_output": True}, {"norm_before_fc": True}]
)
def test_a_checkpoint_is_read_back_bit_for_bit(layout, variant, tmp_path) -> None:
    saved = drafter(variant=variant, taps=(0, 1, 2))
    saved.save_pretrained(tmp_path / "once", layout=layout)
    read = Eagle3.from_pretrained(tmp_path / "once", draft=Chain(3), dtype=np.float32)
    assert read.config == saved.config
    jax.tree.map(np.testing.assert_array_equal, read.params, saved.params)
    read.save_pretrained(tmp_path / "twice", layout=layout)
    for file in (tmp_path / "once").iterdir():
        assert file.read_bytes() == (tmp_path / "twice" / file.name).read_bytes()


def test_the_layouts_name_layers_by_what_each_reader_expects(tmp_path) -> None:
    for layout in Eagle3.layouts:
        drafter(taps=(0, 1, 2)).save_pretrained(tmp_path / layout, layout=layout)
    sglang, vllm = (
        json.loads((tmp_path / layout / "config.json").read_text()) for layout in Eagle3.layouts
    )
    # SGLang numbers the layers whose output is read, vLLM the layers whose input is read.
    assert sglang["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [-1, 0, 1]
    assert vllm["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert vllm["norm_before_residual"] is False  # always written: the readers' defaults differ
    names = [set(load_file(tmp_path / layout / "model.safetensors")) for layout in Eagle3.layouts]
    assert {name.replace("midlayer.", "layers.0.") for name in names[0]} == names[1]
    tables = load_file(tmp_path / "eagle3" / "model.safetensors")
    assert tables["d2t"].dtype == np.int64
    assert tables["d2t"].tolist() == [i - rank for rank, i in enumerate(IDS)]
    assert np.flatnonzero(tables["t2d"]).tolist() == list(IDS)


def test_speculators_reads_what_is_written(tmp_path) -> None:
    needs_speculators()
    from speculators.models.eagle3.core import Eagle3DraftModel

    tiny_target().save_pretrained(tmp_path / "target")
    saved = drafter(taps=(0, 1, 2))
    saved.save_pretrained(
        tmp_path / "drafter", layout="speculators", target=str(tmp_path / "target")
    )
    model = Eagle3DraftModel.from_pretrained(tmp_path / "drafter")
    np.testing.assert_array_equal(model.fc.weight.detach().numpy().T, saved.params["fc"])
    assert model.d2t.tolist() == saved.params["d2t"].tolist()
    assert model.config.eagle_aux_hidden_state_layer_ids == [0, 1, 2]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda tensors: tensors.pop("d2t"),
            "'d2t' is missing: it says which of the target's 11 tokens the drafter's 7",
        ),
        (lambda tensors: tensors.pop("t2d"), "'t2d' is missing"),
        (
            lambda tensors: tensors.pop("norm.weight"),
            "'norm.weight' of an EAGLE-3 drafter .* is missing",
        ),
        (
            lambda tensors: tensors.update(extra=np.zeros(3, np.float32)),
            "'extra' is no part of an EAGLE-3 drafter",
        ),
        (
            lambda tensors: tensors.update(d2t=tensors["d2t"] + 9),
            "'d2t' must map the drafter's tokens to different tokens",
        ),
        (
            lambda tensors: tensors.update(t2d=np.roll(tensors["t2d"], 1)),
            "'t2d' and 'd2t' name different tokens",
        ),
        (
            lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"][:, :5]}),
            "reads 5 numbers, which is no multiple",
        ),
    ],
)
def test_a_spoiled_checkpoint_is_refused_by_name(spoil, words, tmp_path) -> None:
    drafter().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    spoil(tensors)
    save_file(
        {name: np.ascontiguousarray(array) for name, array in tensors.items()},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(CheckpointError, match=words):
        Eagle3.from_pretrained(tmp_path)


def test_modelopt_leaves_out_what_follows_from_d2t(tmp_path) -> None:
    saved = drafter(taps=(0, 1, 2))
    saved.save_pretrained(tmp_path, layout="eagle3")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["t2d"]
    save_file(
        {name.replace("midlayer.", "layers.0."): array for name, array in tensors.items()},
        tmp_path / "model.safetensors",
    )
    read = Eagle3.from_pretrained(tmp_path, draft=Chain(3), dtype=np.float32)
    assert read.config == saved.config
    jax.tree.map(np.testing.assert_array_equal, read.params, saved.params)


def test_a_target_that_it_was_not_made_for_is_refused() -> None:
    with pytest.raises(InputError, match="reads a target of hidden size 16, but target has 32"):
        drafter().check(tiny_target(hidden_size=32))
    with pytest.raises(InputError, match="with a vocabulary of 11 tokens, but target has 12"):
        drafter().check(tiny_target(vocab_size=12))
    with pytest.raises(InputError, match=r"of 2 layers they would be \(0, 1, 5\)"):
        drafter(taps=(0, 1, 5)).check(tiny_target())
    with pytest.raises(InputError, match="a node has 8 children, but the vocabulary has 7"):
        drafter().replace(draft=DynamicTree(top_k=8, depth=3, nodes=20)).check(tiny_target())


@pytest.mark.parametrize(
    ("layers", "taps"), [(32, (2, 16, 29)), (7, (2, 3, 4)), (5, (1, 3, 5)), (2, (1, 2)), (1, (1,))]
)
def test_taps_are_the_published_ones_or_spread_evenly(layers, taps) -> None:
    assert eagle3_checkpoint.default_taps(layers) == taps
