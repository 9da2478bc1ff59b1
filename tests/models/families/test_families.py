"""Every family against transformers: its logits, and the files that it reads and writes."""

import json
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax import sharding
from specjax.models import config_json
from specjax.models import params as declarations
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.families import FAMILIES
from specjax.models.fields import CheckpointError
from specjax.models.transformer import Target
from tests.conftest import tiny_target
from tests.models.families import every_field, zoo

LENGTH = 40  # longer than the windows, and than YaRN's original context
LOAD = partial(Target.from_pretrained, dtype=np.float32)


@pytest.fixture(scope="module")
def zoo_model(tmp_path_factory):
    """Return a function that makes a model of the zoo, once for each name and seed.

    Its result has the directory that the model was saved to, some tokens, their logits by
    transformers, and the target that was read.
    """

    @cache
    def of(name: str, seed: int = 0) -> SimpleNamespace:
        directory = tmp_path_factory.mktemp("zoo")
        model = zoo.save(name, directory, seed)
        tokens = np.random.default_rng(seed).integers(0, zoo.VOCABULARY, (2, LENGTH))
        return SimpleNamespace(
            directory=directory,
            tokens=tokens,
            logits=zoo.logits(model, tokens),
            target=LOAD(directory),
        )

    return of


def read_by_transformers(directory, dtype="float32"):
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    raw = json.loads((directory / "config.json").read_text())
    seeing = {
        "step3p5": ("step3p7", zoo.STEP_VISION),
        "muse_glimmer_text": ("muse_glimmer", zoo.MUSE_VISION),
    }
    if raw["model_type"] in seeing:  # transformers has a head only for the model that sees, too
        name, vision = seeing[raw["model_type"]]
        if name == "muse_glimmer":
            tensors = load_file(directory / "model.safetensors")
            renamed = {
                tensor.replace("model.", "model.language_model.", 1): value
                for tensor, value in tensors.items()
            }
            save_file(renamed, directory / "model.safetensors", {"format": "pt"})
        raw = {"model_type": name, "text_config": raw, "vision_config": vision}
        (directory / "config.json").write_text(json.dumps(raw))
        return AutoModelForImageTextToText.from_pretrained(
            directory, dtype=dtype, attn_implementation="eager"
        )
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")


def logits(target, tokens):
    return target.forward(jnp.asarray(tokens))[0].logits


# `make test` has a family with each kind of layer that is no attention to all entries.
@pytest.mark.full_except(
    *("hunyuan_v1_dense-0", "mimo_v2_flash-0", "muse_glimmer-0"),
    *("nemotron_h-0", "lfm2-0", "kimi_linear-0", "deepseek_v32-0"),
)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", zoo.cases("muse_glimmer", "kimi_linear", "bamba"))
def test_logits_are_those_of_transformers(zoo_model, name, seed) -> None:
    model = zoo_model(name, seed)
    assert np.abs(model.logits).max() > 1
    # This model loses more digits with random weights, in transformers too: see the next test.
    tolerance = 5e-4 if name == "gemma4 E2B" else 1e-4
    np.testing.assert_allclose(
        logits(model.target, model.tokens), model.logits, rtol=0, atol=tolerance
    )


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1])
def test_of_gemma_4_e2b_no_more_digits_are_lost_than_by_transformers(zoo_model, seed) -> None:
    """Ours is as near to transformers in float64 as transformers in float32, on average."""
    model = zoo_model("gemma4 E2B", seed)
    exact = zoo.logits(read_by_transformers(model.directory, "float64"), model.tokens)
    ours, theirs = (
        np.abs(result - exact).mean()
        for result in (np.asarray(logits(model.target, model.tokens)), model.logits)
    )
    assert ours < max(2 * theirs, 5e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", zoo.cases("bamba"))
def test_what_is_written_is_read_by_transformers_and_here(zoo_model, name, tmp_path) -> None:
    model = zoo_model(name)
    model.target.save_pretrained(tmp_path)
    assert config_json.read_config(CheckpointFiles(tmp_path)) == model.target.config
    np.testing.assert_allclose(
        zoo.logits(read_by_transformers(tmp_path), model.tokens), model.logits, atol=1e-5
    )


def test_every_family_with_files_of_its_own_is_in_the_zoo() -> None:
    in_zoo = {FAMILIES[zoo.model_type(name)].model_type for name in zoo.MODELS}
    # These are in tests/models/test_huggingface.py.
    older = {"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"}
    assert {family.model_type for family in FAMILIES.values()} == in_zoo | older


# --- models that see and hear as well -------------------------------------------------------------

# By model of the zoo: the model type, and the prefixes of the text model's tensors and of the head.
NESTED = {
    "gemma3": ("gemma3", "model.language_model.", ""),
    "gemma3 of transformers 4": ("gemma3", "language_model.model.", "language_model."),
    "gemma4": ("gemma4", "model.language_model.", ""),
    "gemma4 E2B": ("gemma4", "model.language_model.", ""),
    "qwen3_5": ("qwen3_5", "model.language_model.", ""),
    "qwen3_5_moe": ("qwen3_5_moe", "model.language_model.", ""),
    "ministral3": ("mistral3", "model.language_model.", ""),
    "ministral3 of transformers 4": ("mistral3", "language_model.model.", "language_model."),
    "llama4": ("llama4", "language_model.model.", "language_model."),
    "kimi_k2": ("kimi_k25", "model.language_model.", ""),
    "kimi_k2 of transformers 4": ("kimi_k25", "language_model.model.", "language_model."),
}


@pytest.mark.full
@pytest.mark.parametrize("name", [zoo.case(name, name.split(" of ")[0]) for name in NESTED])
def test_the_text_part_of_a_model_that_sees_is_read_alone(zoo_model, name, tmp_path) -> None:
    model_type, prefix, head_prefix = NESTED[name]
    model = zoo_model(name.removesuffix(" of transformers 4"))
    inner = json.loads((model.directory / "config.json").read_text())
    outer = {
        "model_type": model_type,
        "vision_config": {"hidden_size": "not read"},
        "text_config": inner,
    }
    outer |= {field: inner.pop(field) for field in ("tie_word_embeddings", "dtype")}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = load_file(model.directory / "model.safetensors")
    renamed = {
        (
            prefix + tensor.removeprefix("model.")
            if tensor.startswith("model.")
            else head_prefix + tensor
        ): value
        for tensor, value in tensors.items()
    }
    renamed["model.vision_tower.patch.weight"] = np.zeros((3, 3), np.float32)
    save_file(renamed, tmp_path / "model.safetensors")
    target = LOAD(tmp_path)
    assert target.config == model.target.config
    np.testing.assert_array_equal(logits(target, model.tokens), logits(model.target, model.tokens))


def test_a_text_model_of_another_type_within_is_refused(zoo_model, tmp_path) -> None:
    inner = raw_of(zoo_model, "ministral3", model_type="qwen2")
    with pytest.raises(
        CheckpointError,
        match=r"text_config\.model_type='qwen2': must be one of ministral3, mistral",
    ):
        config_json.parse_config({"model_type": "mistral3", "text_config": inner})


@pytest.mark.full
@pytest.mark.parametrize(
    ("prefix", "head_prefix"),
    [("model.language_model.", ""), ("language_model.model.", "language_model.")],
)
def test_a_mistral_within_a_model_that_sees_is_read(tmp_path, prefix, head_prefix) -> None:
    """Mistral Small 3.1 and 3.2 are such models."""
    target = tiny_target(model_type="mistral", sliding_window=4, windowed_layers=(0, 1))
    target.save_pretrained(tmp_path)
    inner = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mistral3", "text_config": inner})
    )
    tensors = {
        prefix + name.removeprefix("model.")
        if name.startswith("model.")
        else head_prefix + name: value
        for name, value in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(
        tensors | {"vision_tower.patch.weight": np.zeros((3, 3), np.float32)},
        tmp_path / "model.safetensors",
    )
    read = LOAD(tmp_path)
    assert read.config == target.config
    tokens = np.arange(10)[None]
    np.testing.assert_array_equal(logits(read, tokens), logits(target, tokens))


NESTED_FAULTS = [
    ({"hidden_size": "wide"}, "text_config.hidden_size='wide': must be"),
    ({"hidden_size": None}, "text_config.hidden_size=None: must be"),
    ({"num_key_value_heads": 3}, "text_config: num_heads=4 is not a multiple of num_kv_heads=3"),
    ({"bos_token_id": 99}, "text_config.bos_token_id=99: must be below"),
    ({"layer_types": ["other"] * 4}, "text_config.layer_types has 'other'"),
]


@pytest.mark.parametrize("name", ["gemma3", "qwen3_5", "mistral3"])
@pytest.mark.parametrize(("change", "message"), NESTED_FAULTS)
def test_a_field_of_a_text_model_is_named_with_its_path(zoo_model, name, change, message) -> None:
    inner = raw_of(zoo_model, FAMILIES[name].model_type.removesuffix("_text"))
    with pytest.raises(CheckpointError) as caught:
        config_json.parse_config({"model_type": name, "text_config": inner | change})
    assert str(caught.value).startswith(f"config.json: {message}")
    with pytest.raises(CheckpointError, match=r"^config\.json: eos_token_id=99: must be below"):
        config_json.parse_config({"model_type": name, "text_config": inner, "eos_token_id": 99})


def test_keys_of_layers_that_share_are_left_unread(zoo_model, tmp_path) -> None:
    model = zoo_model("gemma4 E2B")
    tensors = load_file(model.directory / "model.safetensors")
    shared = [i for i in range(6) if model.target.config.entries_of(i) != i]
    assert shared == [3, 4, 5]
    for layer in shared:  # published files have these tensors, which are not read
        for part in ("k_proj", "v_proj", "k_norm"):
            tensors[f"model.layers.{layer}.self_attn.{part}.weight"] = np.full(
                (8, 8), np.nan, np.float32
            )
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((model.directory / "config.json").read_text())
    np.testing.assert_array_equal(
        logits(LOAD(tmp_path), model.tokens), logits(model.target, model.tokens)
    )


def test_a_window_of_mimo_v2_is_one_token_longer_than_its_published_size(zoo_model) -> None:
    raw = raw_of(zoo_model, "mimo_v2_flash", sliding_window_size=4)
    assert config_json.parse_config(raw) == zoo_model("mimo_v2_flash").target.config


def test_kimi_k2_is_a_deepseek_v3_of_another_name(zoo_model) -> None:
    raw = raw_of(zoo_model, "kimi_k2", model_type="kimi_k2")
    assert config_json.parse_config(raw) == zoo_model("kimi_k2").target.config


@pytest.mark.full
def test_chunks_of_a_document_begin_with_the_document(zoo_model) -> None:
    """Chunks of 7 tokens, in a row of two documents of 17 and 23."""
    model = zoo_model("llama4")
    documents = jnp.asarray(np.repeat([[5, 2]], [17, LENGTH - 17], axis=1).repeat(2, axis=0))
    together = model.target.forward(jnp.asarray(model.tokens), documents=documents)[0].logits
    alone = logits(model.target, model.tokens[:, 17:])
    np.testing.assert_allclose(together[:, 17:], alone, atol=1e-4)
    np.testing.assert_allclose(together[:, :17], model.logits[:, :17], atol=1e-4)


@pytest.mark.full
def test_experts_of_qwen3_vl_are_read_in_both_orders_of_axes(zoo_model, tmp_path) -> None:
    """The hub has inputs before outputs; transformers 5 writes outputs first."""
    model = zoo_model("qwen3_vl_moe")
    tensors = load_file(model.directory / "model.safetensors")
    turned = {
        name: np.ascontiguousarray(np.swapaxes(value, 1, 2)) if ".experts." in name else value
        for name, value in tensors.items()
    }
    save_file(turned, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((model.directory / "config.json").read_text())
    target = LOAD(tmp_path)
    np.testing.assert_array_equal(logits(target, model.tokens), logits(model.target, model.tokens))


# --- meshes and quantized weights -----------------------------------------------------------------

DIFFERENT = (
    *("kimi_k2", "glm4", "minimax_m2", "mimo_v2_flash", "ernie4_5_moe", "hunyuan_v1_moe"),
    "glm_moe_dsa",
)
"""Models whose tensors have names, shapes or heads that no other test of meshes has."""


@pytest.mark.full
@pytest.mark.parametrize("name", DIFFERENT)
def test_a_model_on_a_mesh_has_the_same_logits(zoo_model, name) -> None:
    model = zoo_model(name)
    split = LOAD(model.directory, mesh=sharding.make_mesh(1, 2))
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(split.params))
    np.testing.assert_allclose(logits(split, model.tokens), model.logits, atol=1e-4)


@pytest.mark.full
def test_parameters_in_one_tensor_are_quantized_together_or_not_at_all() -> None:
    """A file has no matrix of which a part is quantized."""
    with_shared = set()
    for name in every_field.FAMILIES:
        config = config_json.parse_config(every_field.unchanged_file(name))
        declared = FAMILIES[config.model_type].store(declarations.declare(config))
        kinds: dict[str, list[bool]] = {}
        for param in jax.tree.leaves(declared):
            for tensor in param.stored_names:
                kinds.setdefault(tensor, []).append(param.is_product)
        assert {tensor for tensor, values in kinds.items() if len(set(values)) > 1} == set(), name
        if any(len(values) > 1 for values in kinds.values()):
            with_shared.add(name)
    assert {"phi3", "gpt_oss", "qwen3_next", "nemotron_h", "falcon_h1", "lfm2"} <= with_shared


@pytest.mark.full
@pytest.mark.parametrize("name", [*DIFFERENT, "falcon_h1"])
def test_quantized_weights_are_those_of_the_model_and_survive_a_save(
    zoo_model, name, tmp_path
) -> None:
    model = zoo_model(name)
    quantized = LOAD(model.directory, weights="int8")
    jax.tree.map(
        np.testing.assert_array_equal, quantized.params, model.target.quantize("int8").params
    )
    quantized.save_pretrained(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, LOAD(tmp_path).params, quantized.params)


# --- fields of config.json ------------------------------------------------------------------------


def raw_of(zoo_model, name, **changes):
    return json.loads((zoo_model(name).directory / "config.json").read_text()) | changes


def test_olmo3_of_transformers_4_scales_its_full_layers_alone(zoo_model) -> None:
    raw = raw_of(zoo_model, "olmo3", rope_theta=500_000)
    raw["rope_scaling"] = {**raw.pop("rope_parameters")["full_attention"]}
    raw["rope_scaling"].pop("rope_theta")
    assert config_json.parse_config(raw) == zoo_model("olmo3").target.config


def test_smollm3_names_its_layers_without_positions_or_counts_them(zoo_model) -> None:
    raw = raw_of(zoo_model, "smollm3")
    config = config_json.parse_config(raw)
    kinds = [config.of_layer(layer).rope.kind for layer in range(4)]
    assert kinds == ["default"] * 3 + ["none"]
    without = {name: value for name, value in raw.items() if name != "no_rope_layers"}
    assert config_json.parse_config(without) == config
    raw["no_rope_layers"] = [1] * 7
    assert config_json.parse_config(raw).layers == ()


def test_gemma3_does_not_cap_its_scores(zoo_model) -> None:
    """Transformers has the field and never reads it."""
    raw = raw_of(zoo_model, "gemma3", attn_logit_softcapping=2.0)
    assert config_json.parse_config(raw) == zoo_model("gemma3").target.config


def test_rope_scaling_replaces_what_is_said_of_the_full_layers(zoo_model) -> None:
    config = config_json.parse_config(raw_of(zoo_model, "gemma3", rope_scaling={"factor": 4.0}))
    assert [config.of_layer(layer).rope.factor for layer in range(4)] == [1.0, 1.0, 4.0, 1.0]


def test_layers_of_smollm3_without_positions_have_the_windows(zoo_model) -> None:
    raw = raw_of(zoo_model, "smollm3 with windows", layer_types=None)
    config = config_json.parse_config(raw)
    assert (config.sliding_window, config.windowed_layers) == (5, (1, 3))
    assert config_json.parse_config(raw | {"use_sliding_window": False}).windowed_layers == ()


REFUSALS = [
    (
        "phi3",
        {"rope_scaling": {"type": "su"}, "rope_parameters": None},
        "rope type 'su' .* length of the whole text.*: give a",
    ),
    (
        "phi3",
        {"rope_parameters": {"rope_type": "longrope"}},
        "rope type 'longrope' of Phi-3 is not supported",
    ),
    (
        "phi3",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        "rope_scaling: must be left out",
    ),
    (
        "phi3",
        {"rope_parameters": {"partial_rotary_factor": 0.1}},
        "partial_rotary_factor=0.1: must rotate an even number",
    ),
    (
        "smollm3",
        {"no_rope_layers": [1, 0]},
        "no_rope_layers names 2 layers of num_hidden_layers=4: name each",
    ),
    (
        "olmo3",
        {"rope_parameters": None, "rope_theta": 1e4},
        "rope_theta=10000.0: transformers 5 ignores it in layers with",
    ),
    (
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", "factor": 4.0, "truncate": False}
            }
        },
        "rope_parameters.full_attention.truncate=False: transformers does not read it",
    ),
    (
        "gemma3",
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 4.0}},
        "rope_scaling.type='linear': transformers reads rope_type='default' in its place",
    ),
    (
        "gemma3",
        {
            "rope_parameters": {"sliding_attention": {}},
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
        "rope_parameters lacks 'full_attention'",
    ),
    (
        "gemma4",
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        "this model_type reads rope_parameters alone",
    ),
    ("granite", {"logits_scaling": 0}, "logits_scaling=0: must be a number from 1e-06"),
    (
        "ministral3",
        {"rope_parameters": {"llama_4_scaling_beta": "x"}},
        "llama_4_scaling_beta='x': must be a number",
    ),
    (
        "ministral3",
        {"rope_parameters": {"llama_4_scaling_beta": 0.1}},
        "it needs original_max_position",
    ),
    ("seed_oss", {"attention_out_bias": 1}, "attention_out_bias=1: must be true or false"),
    (
        "gpt_oss",
        {"model_type": "gemma3n"},
        "model_type='gemma3n' is not supported: its residual streams",
    ),
    (
        "gpt_oss",
        {"model_type": "jamba"},
        "its layers keep a state of a kind that is not implemented",
    ),
    (
        "glm_moe_dsa",
        {"indexer_types": ["shared", "full", "full", "full"]},
        "indexer_types=.*: the first layer must have an indexer",
    ),
    (
        "glm_moe_dsa",
        {"indexer_types": None, "index_topk_pattern": "FSX"},
        "index_topk_pattern='FSX': must be .* in a text pattern F or S, for each of num_hidden_l",
    ),
    (
        "glm_moe_dsa",
        {"indexer_rope_interleave": False},
        "indexer_rope_interleave=False: must be left out, or true",
    ),
    ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank=None: must be a whole number from 1"),
    (
        "deepseek_v32",
        {"layer_types": ["full_attention"] * 3},
        "layer_types has 'full_attention': only 'indexed_attention'",
    ),
    ("deepseek_v32", {"index_head_dim": 4}, "indexer.head_dim=4: must be at least"),
    (
        "exaone4",
        {"layer_types": None, "sliding_window_pattern": "LLLG"},
        "sliding_window_pattern='LLLG': transformers does not read text here: give layer_types",
    ),
    (
        "llama4",
        {"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 4},
        "attention_chunk_size=None: must be a number of tokens",
    ),
    ("llama4", {"num_experts_per_tok": 2}, "num_experts_per_tok=2: must be a whole number from 1"),
    ("llama4", {"no_rope_layers": [1]}, "no_rope_layers names 1 layers of num_hidden_layers=4"),
    ("minimax_m2", {"attn_type_list": [1, 0, 1, 1]}, r"attn_type_list=\[1, 0, 1, 1\]: must be a"),
    ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm=False: must be left out, or true"),
    ("ernie4_5_moe", {"use_bias": True}, "use_bias=True: must be left out, or false"),
    ("ernie4_5_moe", {"moe_norm_min": 0.5}, "moe_norm_min=0.5: must be a number from 0 to 1e-06"),
    ("hunyuan_v1_moe", {"moe_topk": [2, 1, 2, 2]}, "moe_topk=.*the same in all layers"),
    (
        "hunyuan_v1_moe",
        {"moe_intermediate_size": [12] * 4},
        "moe_intermediate_size=.*: must be intermediate_size=48",
    ),
    (
        "hunyuan_v1_dense",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": "x"}},
        "rope_parameters.alpha='x': must be a number",
    ),
    (
        "glm4_moe_lite",
        {"first_k_dense_replace": 3},
        "first_k_dense_replace=3: transformers does not read it",
    ),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types=.*for each of num_hidden"),
    (
        "mimo_v2_flash",
        {"hybrid_layer_pattern": [0, 1, 1, 1, 1, 1]},
        "hybrid_layer_pattern=.*: transformers does not read this field",
    ),
    ("mimo_v2_flash", {"swa_rope_theta": 5e5}, "swa_rope_theta=500000.0: transformers does not"),
    ("mimo_v2_flash", {"n_shared_experts": 1}, "n_shared_experts=1: must be a whole number from 0"),
    (
        "mimo_v2_flash",
        {"add_full_attention_sink_bias": True},
        "add_full_attention_sink_bias=True: must be left out, or false",
    ),
]


@pytest.mark.parametrize(
    ("name", "changes", "message"), [zoo.case(case, case[0]) for case in REFUSALS]
)
def test_what_cannot_be_taken_is_refused_in_a_line(zoo_model, name, changes, message) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        config_json.parse_config(raw_of(zoo_model, name, **changes))
    assert "\n" not in str(caught.value)
