"""Checkpoints in and out, and those that are refused before a weight is read."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax.models import checkpoint as checkpoint_module
from specjax.models import config_json, hub
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.config import MLA, MoE, Rope
from specjax.models.fields import CheckpointError
from specjax.models.transformer import Target
from tests.conftest import ASSETS, MIXTURES, tiny_config, tiny_target


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "model"
    tiny_target().save_pretrained(path)
    return path


def edit_config(path, **changes) -> None:
    raw = json.loads((path / "config.json").read_text())
    raw = {name: value for name, value in (raw | changes).items() if value != "remove"}
    (path / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize("name", ["target", "draft"])
def test_export_gives_back_the_same_bits(tmp_path, name) -> None:
    Target.from_pretrained(ASSETS / name, dtype=jnp.bfloat16).save_pretrained(tmp_path)
    original = load_file(ASSETS / name / "model.safetensors")
    exported = load_file(tmp_path / "model.safetensors")
    assert original.keys() == exported.keys()
    for key, value in original.items():
        assert value.dtype == exported[key].dtype
        np.testing.assert_array_equal(value.view(np.uint16), exported[key].view(np.uint16))
    assert config_json.read_config(CheckpointFiles(tmp_path)) == config_json.read_config(
        CheckpointFiles(ASSETS / name)
    )


CONFIGS = [
    tiny_config(),
    tiny_config(
        model_type="qwen2", qkv_bias=True, tie_embeddings=True, eos_token_ids=(3, 4), bos_token_id=0
    ),
    tiny_config(model_type="qwen3", qk_norm=True, head_dim=8),
    tiny_config(model_type="mistral", eos_token_ids=(2,)),
    tiny_config(rope=Rope(theta=5e5, kind="llama3", factor=8.0, original_max_positions=32)),
    tiny_config(
        rope=Rope(kind="yarn", factor=4.0, original_max_positions=64, mscale=1.0, truncate=False)
    ),
    tiny_config(rope=Rope(kind="linear", factor=2.0, original_max_positions=512)),
    *[tiny_config(**changes) for changes in MIXTURES.values()],
    tiny_config(
        model_type="deepseek_v3",
        num_kv_heads=4,
        qkv_bias=True,
        output_bias=True,
        mla=MLA(
            kv_lora_rank=6,
            qk_nope_head_dim=6,
            qk_rope_head_dim=4,
            v_head_dim=8,
            rope_interleaved=False,
        ),
        moe=MoE(6, 2, 8, scoring="sigmoid", corrected=True),
    ),
    tiny_config(
        model_type="qwen3_moe", qk_norm=True, num_layers=4, moe=MoE(6, 2, 8, dense_layers=(1, 3))
    ),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.model_type}-{c.rope.kind}")
def test_a_config_survives_the_round_trip(config) -> None:
    assert config_json.parse_config(config_json.format_config(config, "float32")) == config


def test_both_spellings_of_rope_are_read() -> None:
    old = config_json.format_config(CONFIGS[4], "float32")
    new = dict(old)
    del old["rope_parameters"], new["rope_scaling"], new["rope_theta"]
    assert config_json.parse_config(old) == config_json.parse_config(new) == CONFIGS[4]


BESIDE = [  # fields of config.json, and the same in rope_parameters alone
    (
        {"rope_parameters": {"rope_type": kind, **rest}, "original_max_position_embeddings": 24},
        {"rope_type": kind, **rest, "original_max_position_embeddings": 24},
    )
    for kind, rest in {
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
        "llama3": {
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    }.items()
]
BESIDE += [
    (
        {
            "rope_parameters": {"rope_type": "linear", "factor": 2.0},
            "original_max_position_embeddings": 24,
        },
        {"rope_type": "linear", "factor": 2.0},
    ),
    (
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "rope_theta": 1e6,
        },
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 1e6,
        },
    ),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, {"rope_type": "default"}),
    (
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"rope_type": "default"},
    ),
]


@pytest.mark.parametrize(("fields", "rope"), BESIDE)
def test_a_rope_is_read_as_transformers_reads_it(fields, rope) -> None:
    """Fields of config.json beside each other are read as transformers reads them.

    Other tests show that the numbers are those of transformers.
    """
    raw = config_json.format_config(tiny_config(), "float32")
    plain = {
        name: value
        for name, value in raw.items()
        if name not in ("rope_theta", "rope_scaling", "rope_parameters")
    }
    assert config_json.parse_config(plain | fields) == config_json.parse_config(
        plain | {"rope_parameters": rope}
    )


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_an_activation_survives_the_round_trip(activation) -> None:
    config = tiny_config(activation=activation)
    assert config_json.parse_config(config_json.format_config(config, "float32")) == config


def test_transformers_reads_what_we_write(checkpoint) -> None:
    from transformers import AutoModelForCausalLM

    from tests.with_torch import torch

    tokens = np.arange(10)[None]
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, trust_remote_code=False
    )
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(
        tiny_target().forward(jnp.asarray(tokens))[0].logits, expected, atol=1e-4
    )


# The rows of a block, for a vocabulary of 11: blocks of one row, a shorter last block, one block.
@pytest.mark.parametrize("rows", [1, 7, 4096])
def test_a_stored_head_that_differs_from_the_embedding_is_used(tmp_path, monkeypatch, rows) -> None:
    """A stored head counts even if config.json ties it to the embedding, as in transformers.

    A copy of the embedding is no separate head.
    """
    from transformers import AutoModelForCausalLM

    from tests.with_torch import torch

    monkeypatch.setattr(checkpoint_module, "_BLOCK_ROWS", rows)
    tied = tiny_target(tie_embeddings=True)
    tied.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    assert Target.from_pretrained(tmp_path).config == tied.config

    head[-1] += 1.0  # the last row alone, which is compared last
    save_file(
        tensors | {"lm_head.weight": head},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.warns(
        UserWarning,
        match=r"tie_word_embeddings is true, but 'lm_head.weight' differs .* stored head is used",
    ):
        target = Target.from_pretrained(tmp_path)
    assert not target.config.tie_embeddings
    tokens = np.arange(10)[None]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    logits = target.forward(jnp.asarray(tokens))[0].logits
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert np.abs(logits - tied.forward(jnp.asarray(tokens))[0].logits).max() > 0.01
    target.save_pretrained(tmp_path / "again")
    assert Target.from_pretrained(tmp_path / "again").config == target.config

    save_file(tensors | {"lm_head.weight": head[:-1]}, tmp_path / "model.safetensors")
    with (
        pytest.raises(CheckpointError, match=r"'lm_head\.weight' has shape"),
        pytest.warns(UserWarning),
    ):
        Target.from_pretrained(tmp_path)


def test_shards_are_read_like_one_file(checkpoint) -> None:
    whole = Target.from_pretrained(checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    weight_map = {}
    for i, name in enumerate(tensors):
        weight_map[name] = f"model-{i % 3 + 1:05d}-of-00003.safetensors"
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, checkpoint / file)
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    jax.tree.map(
        np.testing.assert_array_equal, whole.params, Target.from_pretrained(checkpoint).params
    )

    with pytest.raises(CheckpointError, match="holds a sharded checkpoint"):
        tiny_target(seed=1).save_pretrained(checkpoint)
    (checkpoint / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-00002-of-00003\.safetensors"):
        Target.from_pretrained(checkpoint)


CONFIG_FAULTS = [
    ({"model_type": "gpt2"}, "model_type='gpt2': must be one of llama, llama4_text"),
    ({"model_type": "remove"}, "model_type is missing"),
    (
        {"model_type": "jamba"},
        "'jamba' is not supported: its layers keep a state .* of the types llama",
    ),
    ({"model_type": ["llama"]}, r"model_type=\['llama'\]"),
    (
        {"hidden_size": "remove"},
        "hidden_size is missing: it must be a whole number from 1 to 1,000,000",
    ),
    ({"hidden_size": [16]}, r"hidden_size=\[16\]: must be a whole number"),
    ({"hidden_size": True}, "hidden_size=True"),
    ({"hidden_size": -16}, "hidden_size=-16"),
    ({"vocab_size": 0}, "vocab_size=0: must be a whole number from 1 to 10,000,000"),
    (
        {"num_hidden_layers": 2**63},
        "num_hidden_layers=9223372036854775808: must be a whole number from 1 to 10,000",
    ),
    ({"max_position_embeddings": float("inf")}, "max_position_embeddings=inf"),
    (
        {"head_dim": None, "num_attention_heads": 3},
        "hidden_size=16 is not a multiple of num_attention_heads=3: give head_dim",
    ),
    (
        {"hidden_act": "relu"},
        "hidden_act='relu': must be one of silu, swish, gelu, gelu_pytorch_tanh, gelu_new",
    ),
    ({"rms_norm_eps": None}, "rms_norm_eps=None: must be a number"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
    ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false': must be true or false"),
    ({"rope_theta": "10000"}, "rope_theta='10000': must be a number"),
    (
        {"rope_parameters": "remove", "rope_scaling": "linear"},
        "rope_scaling='linear': must be an object",
    ),
    (
        {"rope_parameters": {"rope_type": "longrope"}},
        "rope_parameters.rope_type='longrope': must be one of default, linear",
    ),
    ({"rope_parameters": {"rope_type": ["yarn"]}}, r"rope_parameters.rope_type=\['yarn'\]"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn' needs factor"),
    (
        {"rope_parameters": {"rope_type": "linear", "factor": float("nan")}},
        "rope_parameters.factor=nan",
    ),
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_slow": 33}},
        "beta_slow=33: must be at most beta_fast=32.0",
    ),
    (
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
        "rope_parameters.partial_rotary_factor=0.5: must be 1 with rope type 'linear'",
    ),
    ({"partial_rotary_factor": 2}, "partial_rotary_factor=2"),
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": None}},
        "rope_parameters.truncate=None: must be true",
    ),
    (
        {
            "rope_theta": "remove",
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_theta": 1e6},
        },
        (
            "rope_parameters.rope_theta=1000000.0: rope_scaling is present .* with"
            " rope_theta=10000.0: write the whole rope"
        ),
    ),
    (
        {
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {"partial_rotary_factor": 0.5},
        },
        "rope_parameters.partial_rotary_factor=0.5: rope_scaling is present",
    ),
    (
        {"quantization_config": {}},
        (
            "quantization_config.quant_method=None: must be one of fp8, mxfp4, .*: use the"
            " checkpoint without"
        ),
    ),
    ({"quantization_config": []}, r"quantization_config=\[\]: must be an object"),
    (
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
        "quant_method='bitsandbytes': must be one of",
    ),
    (
        {"quantization_config": {"quant_method": "gptq", "bits": 3}},
        "quantization_config.bits=3: must be 4 or 8",
    ),
    (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
        r"weight_block_size=\[64, 64\]: .*128, 128",
    ),
    ({"num_key_value_heads": 3}, "num_heads=4 is not a multiple of num_kv_heads=3"),
    ({"dtype": 32}, "dtype=32: must be one of float32"),
    ({"bos_token_id": "<s>"}, "bos_token_id='<s>'"),
    ({"pad_token_id": []}, r"pad_token_id=\[\]"),
    (
        {"eos_token_id": {"id": 1}},
        "eos_token_id={'id': 1}: must be a token id from 0 to 9,999,999, or a list of them",
    ),
    ({"eos_token_id": [1, "2"]}, "eos_token_id="),
    ({"eos_token_id": 11}, "eos_token_id=11: must be below the model's vocab_size=11"),
    (
        {"layer_types": ["sliding_attention"] * 2},
        "layer_types has 'sliding_attention', but no sliding_window is in use",
    ),
    (
        {
            "model_type": "qwen3",
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["full_attention"],
        },
        "layer_types names 1 layers of num_hidden_layers=2",
    ),
    ({"layer_types": ["linear_attention"]}, "layer_types has 'linear_attention'"),
    ({"layer_types": "full_attention"}, "layer_types='full_attention': must be a list of text"),
]


@pytest.mark.parametrize(("change", "message"), CONFIG_FAULTS)
def test_a_config_that_is_not_supported_is_refused_before_any_weight(
    checkpoint, change, message
) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"never read")
    edit_config(checkpoint, **change)
    with pytest.raises(CheckpointError, match=message) as caught:
        Target.from_pretrained(checkpoint)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    ],
)
def test_quantizations_that_are_read_are_no_part_of_the_configuration(
    checkpoint, quantization
) -> None:
    plain = config_json.read_config(CheckpointFiles(checkpoint))
    edit_config(checkpoint, quantization_config=quantization)
    assert config_json.read_config(CheckpointFiles(checkpoint)) == plain


HEADER_FAULTS = [
    ({"vocab_size": 12}, "vocab_size=12 and hidden_size=16, but the embedding is 11 x 16"),
    ({"num_hidden_layers": 10_000}, "num_hidden_layers=10000, but the tensors are of 2 layers"),
    ({"num_hidden_layers": 1}, "num_hidden_layers=1, but the tensors are of 2 layers"),
    ({"intermediate_size": 25}, r"'model.layers.0.mlp.down_proj.weight' has shape \(16, 24\)"),
]


@pytest.mark.parametrize(("change", "message"), HEADER_FAULTS)
def test_sizes_are_compared_with_the_headers(checkpoint, monkeypatch, change, message) -> None:
    edit_config(checkpoint, **change)
    monkeypatch.setattr(np, "ascontiguousarray", None)  # no weight is read
    with pytest.raises(CheckpointError, match=message):
        Target.from_pretrained(checkpoint)


GENERATION_FAULTS = [
    ("[]", "generation_config.json must hold a JSON object, not a list"),
    (
        '{"eos_token_id": "</s>"}',
        "generation_config.json: eos_token_id='</s>': must be a token id from 0 to 9,999,999",
    ),
    (
        '{"eos_token_id": [3, 11]}',
        "generation_config.json: eos_token_id=11: must be below the model's vocab_size=11",
    ),
]


@pytest.mark.parametrize(("content", "message"), GENERATION_FAULTS)
def test_a_generation_config_of_the_wrong_form_is_refused(checkpoint, content, message) -> None:
    (checkpoint / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        config_json.read_config(CheckpointFiles(checkpoint))
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert config_json.read_config(CheckpointFiles(checkpoint)).eos_token_ids == (3, 4)


INDEX_FAULTS = [
    ("[]", "index.json must hold a JSON object, not a list"),
    ("{}", "weight_map=None: must map every tensor to a file"),
    ('{"weight_map": ["model.safetensors"]}', r"weight_map=\['model.safetensors'\]"),
    ('{"weight_map": {"lm_head.weight": 1}}', "weight_map={'lm_head.weight': 1}"),
    (
        '{"weight_map": {"lm_head.weight": "../outside.safetensors"}}',
        r"lacks \.\./outside\.safetensors",
    ),
]


@pytest.mark.parametrize(("content", "message"), INDEX_FAULTS)
def test_an_index_of_the_wrong_form_is_refused(checkpoint, content, message) -> None:
    shutil.copy(checkpoint / "model.safetensors", checkpoint.parent / "outside.safetensors")
    (checkpoint / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=message):
        Target.from_pretrained(checkpoint)


WINDOWS = [
    ({"model_type": "mistral", "sliding_window": 64}, 64, (0, 1)),
    (
        {"model_type": "mistral", "sliding_window": "remove", "max_position_embeddings": 8192},
        4096,  # the default of the family
        (0, 1),
    ),
    ({"model_type": "mistral", "sliding_window": 512}, None, ()),  # as many as there are positions
    (  # yarn makes the context longer than the window
        {
            "model_type": "mistral",
            "sliding_window": 512,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 512,
            },
        },
        512,
        (0, 1),
    ),
    (
        {
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 64,
            "max_window_layers": 1,
        },
        64,
        (1,),
    ),
    (
        {
            "model_type": "qwen3",
            "use_sliding_window": True,
            "max_window_layers": 0,
            "max_position_embeddings": 8192,
        },
        4096,
        (0, 1),
    ),
    (
        {
            "model_type": "qwen2",
            "use_sliding_window": False,
            "sliding_window": 64,
            "max_window_layers": 1,
        },
        None,
        (),
    ),
    # Transformers does not read layer_types of these families.
    *[
        ({"model_type": name, "sliding_window": 64, "layer_types": kinds}, 64, (0, 1))
        for name in ("mistral", "ministral3", "phi3")
        for kinds in (["full_attention"] * 2, ["full_attention", "sliding_attention"])
    ],
    ({"sliding_window": 64}, None, ()),  # Llama has none, whatever its file says
]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_moe"])
def test_windows_that_a_family_cannot_have_are_not_written(family) -> None:
    config = tiny_config(
        **MIXTURES.get(family, {}) | {"model_type": family}, sliding_window=4, windowed_layers=(1,)
    )
    with pytest.raises(
        CheckpointError, match=rf"windowed_layers=\(1,\): a {family} checkpoint cannot express this"
    ):
        config_json.format_config(config, "float32")


@pytest.mark.parametrize(("change", "window", "layers"), WINDOWS)
def test_which_layers_have_windows(checkpoint, change, window, layers) -> None:
    raw = json.loads((checkpoint / "config.json").read_text()) | change
    config = config_json.parse_config(
        {name: value for name, value in raw.items() if value != "remove"}
    )
    assert (config.sliding_window, config.windowed_layers) == (window, layers)
    assert [config.window_of(layer) for layer in (0, 1)] == [
        window if layer in layers else None for layer in (0, 1)
    ]


def truncate(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def change_tensors(path, edit) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")


WEIGHT_FAULTS = [
    (truncate, "model.safetensors is truncated or damaged"),
    (lambda path: (path / "model.safetensors").unlink(), "lacks model.safetensors"),
    (lambda path: (path / "config.json").unlink(), "config.json is missing"),
    (lambda path: (path / "config.json").write_text("{"), "config.json is not valid JSON"),
    (
        lambda path: (path / "config.json").write_text("[" * 100_000),
        "config.json is not valid JSON",
    ),
    (
        lambda path: (path / "config.json").write_text('{"vocab_size": 1' + "0" * 5000 + "}"),
        "config.json is not valid JSON",
    ),
    (
        lambda path: change_tensors(path, lambda t: t.pop("model.norm.weight")),
        "'model.norm.weight'",
    ),
    (
        lambda path: change_tensors(
            path, lambda t: t.update({"lm_head.weight": np.zeros((3, 16), np.float32)})
        ),
        (
            r"'lm_head.weight' has shape \(3, 16\), but in a llama model with this config.json it"
            r" is \(11, 16\)"
        ),
    ),
    (
        lambda path: change_tensors(
            path, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(16)})
        ),
        "'model.layers.0.self_attn.q_proj.bias' is no part of a llama model",
    ),
    (
        lambda path: change_tensors(
            path, lambda t: t.update({"model.norm.weight": np.zeros(16, np.int8)})
        ),
        "'model.norm.weight' is of type I8, .*: use the unquantized checkpoint",
    ),
]


@pytest.mark.parametrize(("damage", "message"), WEIGHT_FAULTS)
def test_damaged_checkpoints_are_refused_by_name(checkpoint, damage, message) -> None:
    damage(checkpoint)
    with pytest.raises(CheckpointError, match=message):
        Target.from_pretrained(checkpoint)


def test_a_path_that_is_nothing_is_refused(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="not a directory, nor a hub id"):
        Target.from_pretrained(tmp_path / "nothing")
    for name in ("~nobody-of-this-name/model", "a" * 300 + "/b"):
        with pytest.raises(CheckpointError, match="is not a directory"):
            hub.locate(name)


def test_a_dtype_that_is_none_is_refused(checkpoint) -> None:
    for dtype in ("nonsense", "int32"):
        with pytest.raises(
            CheckpointError, match=f"dtype='{dtype}': must be a floating-point type"
        ):
            Target.from_pretrained(checkpoint, dtype=dtype)
        with pytest.raises(
            CheckpointError, match=f"dtype='{dtype}': must be a floating-point type"
        ):
            tiny_target().save_pretrained(checkpoint, dtype=dtype)
    with pytest.raises(TypeError, match="positional"):
        Target.from_pretrained(checkpoint, np.float32)


def test_a_failed_save_leaves_nothing_behind(tmp_path, monkeypatch) -> None:
    path = tmp_path / "model"
    tiny_target(seed=1).save_pretrained(path)
    before = (path / "model.safetensors").read_bytes()

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint_module, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        tiny_target(seed=2).save_pretrained(path)
    assert (path / "model.safetensors").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
    shutil.rmtree(path)
    with pytest.raises(OSError, match="disk full"):
        tiny_target(seed=2).save_pretrained(path)
    assert list(tmp_path.iterdir()) == []
