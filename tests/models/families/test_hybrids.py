"""Hybrid families against transformers: their texts, their files, and what is refused."""

import json
import sys
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax.cli.main import main
from specjax.decoding.state import PREFILL_CHUNK
from specjax.drafters import Drafter, DraftModel, EarlyExit, PromptLookup
from specjax.models import config_json, products
from specjax.models.fields import CheckpointError
from specjax.models.transformer import Target
from specjax.sampling import Sampling
from tests.conftest import HYBRID, SHAPES, tiny_target
from tests.models.families import zoo
from tests.models.quantization.quantized import in_floats

NAMES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
LENGTHS = (63, 64, 65, 130)  # around the end of a chunk of the delta rule, and beyond the next
NEW = 16


@pytest.fixture(scope="module")
def zoo_model(tmp_path_factory):
    """Return a function that makes a model of the zoo, once for each name.

    Its result has the directory that the model was saved to, the model, and the target that was
    read.
    """

    @cache
    def of(name: str) -> SimpleNamespace:
        directory = tmp_path_factory.mktemp("zoo")
        model = zoo.save(name, directory)
        return SimpleNamespace(
            directory=directory,
            model=model,
            target=Target.from_pretrained(directory, dtype=np.float32),
        )

    return of


@cache
def prompts_of(lengths: tuple[int, ...]) -> np.ndarray:
    """Return rows that repeat themselves a little, padded at the end."""
    rng = np.random.default_rng(0)
    rows = [np.resize(rng.integers(0, zoo.VOCABULARY, 23), length) for length in lengths]
    return np.stack([np.pad(row, (0, max(lengths) - len(row))) for row in rows])


_greedy_texts: dict[tuple[str, tuple[int, ...]], list[list[int]]] = {}


def texts_of_transformers(
    hybrid: SimpleNamespace, name: str, lengths: tuple[int, ...]
) -> list[list[int]]:
    """Return the greedy text of transformers after each prompt, read alone."""
    from tests.with_torch import torch

    if (name, lengths) not in _greedy_texts:
        generate = partial(
            hybrid.model.generate, do_sample=False, max_new_tokens=NEW, pad_token_id=0
        )
        greedy_texts = []
        for row, length in zip(prompts_of(lengths), lengths, strict=True):
            prompt = torch.tensor(row[None, :length])
            # Without a mask it takes tokens of id 0 for padding.
            output = generate(prompt, attention_mask=torch.ones_like(prompt))
            greedy_texts.append(output[0, length:].tolist())
        _greedy_texts[name, lengths] = greedy_texts
    return _greedy_texts[name, lengths]


def generated(target: Target, drafter: Drafter | None, lengths: tuple[int, ...]):
    return specjax.generate(
        target,
        drafter,
        prompts_of(lengths),
        np.array(lengths),
        max_new_tokens=NEW,
        sampling=Sampling(temperature=0.0),
    )


def texts(result, lengths: tuple[int, ...]) -> list[list[int]]:
    return [
        row[n : n + NEW].tolist() for row, n in zip(np.asarray(result.tokens), lengths, strict=True)
    ]


def random_draft_model(shape) -> DraftModel:
    """Return another hybrid, with random weights.

    Nearly all that it drafts is rejected.
    """
    return DraftModel(
        tiny_target(**HYBRID, vocab_size=zoo.VOCABULARY, max_positions=1024), draft=shape
    )


DRAFTERS = {
    "plain": lambda target: None,
    "lookup": lambda target: PromptLookup(draft=5),
    "early exit, chain": lambda target: EarlyExit(layers=3, draft=SHAPES["chain"]),
    "early exit, static tree": lambda target: EarlyExit(layers=3, draft=SHAPES["static"]),
    "itself, dynamic tree": lambda target: DraftModel(target, draft=SHAPES["dynamic"]),
    "itself, chain": lambda target: DraftModel(target, draft=SHAPES["chain"]),
    "itself, static tree": lambda target: DraftModel(target, draft=SHAPES["static"]),
    "early exit, dynamic tree": lambda target: EarlyExit(layers=3, draft=SHAPES["dynamic"]),
    "another, chain": lambda target: random_draft_model(SHAPES["chain"]),
    "another, dynamic tree": lambda target: random_draft_model(SHAPES["dynamic"]),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "drafter"), list(product(NAMES, DRAFTERS)))
def test_greedy_texts_are_those_of_transformers(zoo_model, name, drafter) -> None:
    """Prompts on both sides of a chunk's end are in one batch."""
    hybrid = zoo_model(name)
    result = generated(hybrid.target, DRAFTERS[drafter](hybrid.target), LENGTHS)
    assert texts(result, LENGTHS) == texts_of_transformers(hybrid, name, LENGTHS)
    if drafter == "itself, chain":
        assert np.sum(result.stats.accepted) > 0.9 * np.sum(result.stats.drafted)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "drafter", ["plain", "lookup", "early exit, static tree", "itself, dynamic tree"]
)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_texts_of_long_prompts_and_of_each_row_alone(zoo_model, name, drafter) -> None:
    """Prompts are read in several passes.

    The last pass ends at a chunk's end, before it or behind it.
    """
    hybrid = zoo_model(name)
    long = tuple(PREFILL_CHUNK + beyond for beyond in (-1, 1, 65, 130))
    for lengths in (long, long[:1], long[1:2]):
        result = generated(hybrid.target, DRAFTERS[drafter](hybrid.target), lengths)
        assert texts(result, lengths) == texts_of_transformers(hybrid, name, lengths)


# --- how many digits are lost ---------------------------------------------------------------------


def rule_in_float64(query, key, value, g, beta, use_qk_l2norm_in_kernel, **_):
    """Run the delta rule of transformers token by token, without its casts to float32."""
    from tests.with_torch import torch

    assert use_qk_l2norm_in_kernel
    group = value.shape[2] // key.shape[2]
    q, k = (x.double().repeat_interleave(group, 2) for x in (query, key))
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    v, decay, beta = value.double(), g.double().exp(), beta.double()
    out = []
    state = torch.zeros(len(v), v.shape[2], k.shape[3], v.shape[3], dtype=torch.float64)
    for t in range(v.shape[1]):
        state = state * decay[:, t, :, None, None]
        predicted = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = (
            state + k[:, t, :, :, None] * (beta[:, t, :, None] * (v[:, t] - predicted))[:, :, None]
        )
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * q.shape[-1] ** -0.5)
    return torch.stack(out, 1), state


@contextmanager
def without_casts(model):
    """Run transformers' model in float64, the delta rule too."""
    module = sys.modules[type(model).__module__]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "torch_chunk_gated_delta_rule", rule_in_float64)
        yield


@pytest.mark.full
def test_no_more_digits_are_lost_than_by_transformers(tmp_path) -> None:
    """Ours is as near to transformers in float64 as transformers in float32.

    With larger weights than those of the zoo a few logits differ by 1e-4. Some models enlarge the
    rounding of one of the two more than that of the other, so the median of seven models counts.
    """
    from transformers import AutoModelForCausalLM

    kind, fields = zoo.MODELS["qwen3_5"]
    ratios = []
    for seed in range(7):
        model = zoo.build(kind, fields | {"initializer_range": 0.2}, seed)
        folder = tmp_path / str(seed)
        model.save_pretrained(folder)
        tokens = np.random.default_rng(seed).integers(0, zoo.VOCABULARY, (2, 40))
        theirs = zoo.logits(model, tokens)
        ours = Target.from_pretrained(folder, dtype=np.float32).forward(tokens)[0].logits
        exact_model = AutoModelForCausalLM.from_pretrained(
            folder, dtype="float64", attn_implementation="eager"
        )
        with without_casts(exact_model):
            exact = zoo.logits(exact_model, tokens)
        our_error, their_error = (
            np.abs(np.asarray(logits, np.float64) - exact).mean() for logits in (ours, theirs)
        )
        print(f"seed {seed}: ours {our_error:.1e}, transformers' {their_error:.1e}")
        assert max(our_error, their_error) < 1e-4
        ratios.append(our_error / their_error)
    assert np.median(ratios) < 1.2


# --- how they are published -----------------------------------------------------------------------


def logits(target: Target) -> np.ndarray:
    tokens = np.arange(2 * 12).reshape(2, 12) % zoo.VOCABULARY
    return np.asarray(target.forward(tokens)[0].logits)


def publish(hybrid: SimpleNamespace, directory: Path, edit_tensors=None, **fields) -> Path:
    """Write the files of a model with some changes, and return ``directory``."""
    tensors = load_file(hybrid.directory / "model.safetensors")
    save_file(
        tensors if edit_tensors is None else edit_tensors(tensors), directory / "model.safetensors"
    )
    raw = json.loads((hybrid.directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | fields))
    return directory


def named_as_published(tensors):
    """Return tensors with the names of a Qwen3.5, which has vision and an MTP module as well."""
    extra = {
        "model.visual.blocks.0.attn.qkv.weight": np.full((3, 3), np.nan, np.float32),
        "mtp.fc.weight": np.full((3, 3), np.nan, np.float32),
        "mtp.layers.0.self_attn.q_proj.weight": np.full((3, 3), np.nan, np.float32),
    }
    return extra | {
        (
            f"model.language_model.{name.removeprefix('model.')}"
            if name.startswith("model.")
            else name
        ): tensor
        for name, tensor in tensors.items()
    }


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_the_published_layout_is_read_without_what_sees_and_predicts_further(
    zoo_model, name, tmp_path
) -> None:
    hybrid = zoo_model(name)
    publish(hybrid, tmp_path, named_as_published)
    inner = json.loads((tmp_path / "config.json").read_text())
    inner |= {
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "mamba_ssm_dtype": "float32",
    }
    inner["attn_output_gate"], inner["full_attention_interval"] = True, 4
    inner["rope_parameters"] |= {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}
    outer = {"architectures": ["of a model that sees"], "model_type": name, "text_config": inner}
    outer |= {
        "image_token_id": 3,
        "vision_config": {"depth": 27},
        "tie_word_embeddings": inner["tie_word_embeddings"],
    }
    (tmp_path / "config.json").write_text(json.dumps(outer))
    target = Target.from_pretrained(tmp_path, dtype=np.float32)
    np.testing.assert_array_equal(logits(target), logits(hybrid.target))


EXPERTS = "model.layers.{}.mlp.experts."


def with_fused_experts(tensors):
    fused = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    layers = {name.split(".")[2] for name in tensors if ".mlp.experts." in name}
    for layer in layers:
        prefix = EXPERTS.format(layer)
        if f"{prefix}gate_up_proj" in tensors:
            return tensors
        stacked = {
            part: np.stack([tensors[f"{prefix}{expert}.{part}_proj.weight"] for expert in range(6)])
            for part in ("gate", "up", "down")
        }
        fused[f"{prefix}gate_up_proj"] = np.concatenate([stacked["gate"], stacked["up"]], axis=1)
        fused[f"{prefix}down_proj"] = stacked["down"]
    return fused


def with_single_experts(tensors):
    single = {}
    for name, tensor in with_fused_experts(tensors).items():
        prefix = name.removesuffix("gate_up_proj").removesuffix("down_proj")
        for expert in range(6 if ".mlp.experts." in name else 0):
            if name.endswith("down_proj"):
                single[f"{prefix}{expert}.down_proj.weight"] = np.ascontiguousarray(tensor[expert])
            else:
                gate, up = np.split(tensor[expert], 2)
                single |= {
                    f"{prefix}{expert}.gate_proj.weight": gate.copy(),
                    f"{prefix}{expert}.up_proj.weight": up.copy(),
                }
        if ".mlp.experts." not in name:
            single[name] = tensor
    return single


@pytest.mark.full
@pytest.mark.thorough_except("with_fused_experts-qwen3_5_moe", "with_single_experts-qwen3_next")
@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next"])
@pytest.mark.parametrize("stored", [with_fused_experts, with_single_experts])
def test_experts_are_read_one_by_one_and_as_one_tensor(zoo_model, name, stored, tmp_path) -> None:
    hybrid = zoo_model(name)
    shapes = {
        name: tensor.shape
        for name, tensor in stored(load_file(hybrid.directory / "model.safetensors")).items()
    }
    experts = [name for name in shapes if ".mlp.experts." in name]
    sparse = sum(map(hybrid.target.config.is_sparse, range(4)))
    if stored is with_fused_experts:
        assert len(experts) == 2 * sparse
        assert shapes[EXPERTS.format(2) + "gate_up_proj"] == (6, 24, 32)
        assert shapes[EXPERTS.format(2) + "down_proj"] == (6, 32, 12)
    else:
        assert len(experts) == 3 * 6 * sparse
    target = Target.from_pretrained(publish(hybrid, tmp_path, stored), dtype=np.float32)
    np.testing.assert_array_equal(logits(target), logits(hybrid.target))


def test_projections_of_qwen3_next_lie_by_heads_of_keys(zoo_model) -> None:
    """Published files have two matrices.

    One is for queries, keys, values and output gates, and one for both gates of the delta rule.
    """
    tensors = load_file(zoo_model("qwen3_next").directory / "model.safetensors")
    prefix = "model.layers.0.linear_attn."
    assert tensors[f"{prefix}in_proj_qkvz.weight"].shape == (2 * (8 + 8 + 12 + 12), 32)
    assert tensors[f"{prefix}in_proj_ba.weight"].shape == (8, 32)
    assert zoo_model("qwen3_next").target.config.linear.by_key_head


# --- what is refused ------------------------------------------------------------------------------

REFUSALS = [
    (
        {"layer_types": ["linear_attention", "mamba"] * 2},
        "layer_types has 'mamba': only 'full_attention' and 'linear_attention'",
    ),
    (
        {"layer_types": ["linear_attention"] * 4},
        "layer_types: none is 'full_attention': at least one must be",
    ),
    (
        {"layer_types": ["linear_attention"] * 3},
        "layer_types names 3 layers of num_hidden_layers=4: name each",
    ),
    (
        {"linear_num_value_heads": 3},
        "linear_num_value_heads=3: must be a multiple of linear_num_key_heads=2: each head of keys",
    ),
    ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim=1: must be a whole number from 2"),
    ({"linear_key_head_dim": 0}, "linear_key_head_dim=0: must be a whole number from 1"),
    (
        {"rope_parameters": {"partial_rotary_factor": 0.2}},
        "partial_rotary_factor=0.2: must rotate an even number of a head's 16 numbers",
    ),
    ({"attn_output_gate": False}, "attn_output_gate=False: must be left out, or true"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS)
def test_what_cannot_be_taken_is_refused_in_a_line(zoo_model, changes, message) -> None:
    raw = json.loads((zoo_model("qwen3_5").directory / "config.json").read_text())
    with pytest.raises(CheckpointError, match=message) as caught:
        config_json.parse_config(raw | changes)
    assert "\n" not in str(caught.value)


def test_sizes_of_shared_experts_that_are_no_multiple_are_refused(zoo_model) -> None:
    raw = json.loads((zoo_model("qwen3_5_moe").directory / "config.json").read_text())
    with pytest.raises(
        CheckpointError, match="shared_expert_intermediate_size=13: must be a multiple"
    ):
        config_json.parse_config(raw | {"shared_expert_intermediate_size": 13})


def test_a_missing_tensor_of_a_layer_with_a_state_is_named(zoo_model, tmp_path) -> None:
    def without(tensors):
        return {
            name: tensor
            for name, tensor in tensors.items()
            if name != "model.layers.1.linear_attn.A_log"
        }

    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.linear_attn\.A_log"):
        Target.from_pretrained(publish(zoo_model("qwen3_5"), tmp_path, without), dtype=np.float32)


# --- quantized weights ----------------------------------------------------------------------------


QUANTIZED = [(name, weights) for name in NAMES for weights in ("int8", "int4")]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "weights"),
    [
        pytest.param(*pair, marks=pytest.mark.thorough if pair != ("qwen3_5", "int8") else ())
        for pair in QUANTIZED
    ],
)
@pytest.mark.usefixtures("compiled_anew")
def test_quantized_weights_are_those_that_they_stand_for(
    zoo_model, name, weights, monkeypatch
) -> None:
    """Weights are converted to floats, as all devices but CPUs do.

    A CPU rounds activations to integers (tests/models/test_products.py says how far). These models
    of random weights make any rounding fifty times as large, which would hide errors.
    """
    monkeypatch.setattr(
        products, "_by_whole_numbers", lambda _, x, weight: products._by_converted(x, weight)
    )
    quantized = zoo_model(name).target.quantize(weights)
    expected = logits(in_floats(quantized))
    np.testing.assert_allclose(
        logits(quantized), expected, rtol=0, atol=1e-4 * np.abs(expected).max()
    )


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "weights"), QUANTIZED)
def test_quantized_weights_are_decoded_losslessly(zoo_model, name, weights) -> None:
    quantized = zoo_model(name).target.quantize(weights)
    plain, drafted = (
        texts(generated(quantized, drafter, (63, 65)), (63, 65))
        for drafter in (None, PromptLookup(draft=5))
    )
    assert plain == drafted


@pytest.mark.represents("quantized weights of hybrids")
def test_a_quantized_hybrid_is_written_and_read(zoo_model, tmp_path) -> None:
    hybrid = zoo_model("qwen3_5")
    output = str(tmp_path / "quantized")
    options = ["--target", str(hybrid.directory), "--output", output, "--quantize", "int8"]
    assert main(["convert", *options]) == 0
    read = Target.from_pretrained(output, dtype=np.float32)
    layer = read.params["layers"][0]
    assert layer["q"].values.dtype == layer["z"].values.dtype == np.int8
    assert layer["conv_q"].dtype == layer["log_rate"].dtype == np.float32
    jax.tree.map(
        np.testing.assert_array_equal,
        read.params["layers"],
        hybrid.target.quantize("int8").params["layers"],
    )


def rounded_to_fp8(tensors, block: int = 128):
    """Return tensors with matrices of layers in FP8, with a scale for each block.

    Qwen publishes such checkpoints. Gates and the convolution stay floats.
    """
    import ml_dtypes

    floats = (
        *("in_proj_a", "in_proj_b", "in_proj_ba", "conv1d", "norm", "embed", "lm_head"),
        *("mlp.gate.", "shared_expert_gate"),
    )
    rounded = {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or any(part in name for part in floats):
            rounded[name] = tensor
            continue
        scale = np.abs(tensor).max() / 448
        rounded[name] = (tensor / scale).astype(ml_dtypes.float8_e4m3fn)
        blocks = [-(-size // block) for size in tensor.shape]
        rounded[f"{name}_scale_inv"] = np.full(blocks, scale, np.float32)
    return rounded


def widened_again(tensors):
    """Return tensors rounded to FP8, in float32."""
    rounded = rounded_to_fp8(tensors)
    return {
        name: (
            tensor.astype(np.float32)
            * (rounded[f"{name}_scale_inv"].flat[0] if f"{name}_scale_inv" in rounded else 1.0)
        )
        for name, tensor in rounded.items()
        if not name.endswith("_scale_inv")
    }


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_a_checkpoint_in_fp8_is_read_with_its_fused_projections(zoo_model, name, tmp_path) -> None:
    hybrid = zoo_model(name)
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    for kind in ("quantized", "wide"):
        (tmp_path / kind).mkdir()
    edit = (
        (lambda t: rounded_to_fp8(with_single_experts(t))),
        (lambda t: widened_again(with_single_experts(t))),
    )
    quantized = publish(hybrid, tmp_path / "quantized", edit[0], quantization_config=quantization)
    widened = publish(hybrid, tmp_path / "wide", edit[1])
    read, expected = (
        Target.from_pretrained(path, dtype=np.float32) for path in (quantized, widened)
    )
    np.testing.assert_allclose(logits(read), logits(expected), atol=1e-4)
