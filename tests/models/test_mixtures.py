"""DeepSeek-V3 and Qwen3-MoE against transformers: files, batches, meshes and gradients."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax import decoding, sharding
from specjax.decoding.options import GenerationOptions
from specjax.demo import inflate
from specjax.drafters import Eagle3, EarlyExit, NoDraft, PromptLookup
from specjax.drafters.trained import layer_like
from specjax.errors import InputError
from specjax.evaluation import conformance
from specjax.models import config_json, params
from specjax.models.cache import KVCache
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.fields import CheckpointError
from specjax.models.published import published
from specjax.models.transformer import Target
from specjax.training.losses import cross_entropy
from tests.conftest import MIXTURES, tiny_config, tiny_target

SIZES = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
}
QWEN = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
}
CASES = {
    "DeepseekV3": DEEPSEEK | {"rope_parameters": YARN},
    "DeepseekV3 without q_lora": (
        DEEPSEEK | {"q_lora_rank": None, "norm_topk_prob": False, "n_group": 1, "topk_group": 1}
    ),
    "DeepseekV3 biased": DEEPSEEK | {"attention_bias": True, "rope_interleave": False},
    "Qwen3Moe": QWEN | {"norm_topk_prob": True, "mlp_only_layers": [1]},
    "Qwen3Moe biased": (
        QWEN | {"attention_bias": True, "decoder_sparse_step": 2, "rope_parameters": YARN}
    ),
}
TOKENS = np.random.default_rng(0).integers(0, 37, (2, 60))


THOROUGH = ("DeepseekV3 biased", "Qwen3Moe biased")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.thorough] * (name in THOROUGH)) for name in CASES
    ],
)
def case(request, tmp_path_factory):
    """Save a random transformers model, and return its directory and its logits of TOKENS.

    Norms, biases and the routing are random as well.
    """
    import transformers

    from tests.with_torch import torch

    path = tmp_path_factory.mktemp("model")
    name = request.param.split(maxsplit=1)[0]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | CASES[request.param])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if "norm" in key or "bias" in key:
                value.add_(torch.randn_like(value) * 0.3)
            elif "experts" in key or key.endswith("mlp.gate.weight"):
                value.normal_(0, 0.4)
        expected = model(torch.tensor(TOKENS)).logits.numpy()
    model.save_pretrained(path)
    return path, expected


@pytest.mark.full
def test_logits_equal_transformers_whole_and_token_by_token(case) -> None:
    path, expected = case
    target = Target.from_pretrained(path, dtype=np.float32)
    forward = jax.jit(Target.forward)
    whole, cache = forward(target, TOKENS, target.new_cache(2, 64))
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(whole.logits, expected, atol=1e-4)
    cache = cache.replace(length=cache.length - 10)
    for position in range(50, 60):
        output, cache = forward(target, TOKENS[:, position : position + 1], cache)
        np.testing.assert_allclose(output.logits[:, 0], expected[:, position], atol=1e-4)


def test_what_is_written_is_what_was_read_and_transformers_reads_it(case, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    from tests.with_torch import torch

    path, expected = case
    target = Target.from_pretrained(path, dtype=np.float32)
    target.save_pretrained(tmp_path)
    original = load_file(path / "model.safetensors")
    saved = load_file(tmp_path / "model.safetensors")
    assert original.keys() == saved.keys()
    for name, value in original.items():
        np.testing.assert_array_equal(value, saved[name], err_msg=name)
    assert config_json.read_config(CheckpointFiles(tmp_path)) == target.config
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=torch.float32, trust_remote_code=False
        )(torch.tensor(TOKENS)).logits
    np.testing.assert_allclose(logits.numpy(), expected, atol=1e-5)


@pytest.fixture(scope="module", params=MIXTURES)
def target(request) -> Target:
    return tiny_target(**MIXTURES[request.param])


def test_the_cache_holds_latents() -> None:
    """A layer stores 6 + 4 numbers of a token, whatever the number of heads.

    Ordinary attention would store 2 x 4 heads x 8.
    """
    cache = KVCache.create(
        [tiny_config(**MIXTURES["deepseek_v3"]).entry_parts(0)], batch=2, capacity=16
    )
    assert [part.shape for part in cache.layers[0]] == [(2, 1, 16, 6), (2, 1, 16, 4)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("target", "drafter"),
    [
        ("deepseek_v3", EarlyExit(layers=1, draft=specjax.Chain(2))),
        pytest.param(
            "qwen3_moe", EarlyExit(layers=1, draft=specjax.Chain(2)), marks=pytest.mark.thorough
        ),
        pytest.param("deepseek_v3", PromptLookup(), marks=pytest.mark.thorough),
        pytest.param("qwen3_moe", PromptLookup(), marks=pytest.mark.thorough),
    ],
    indirect=["target"],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_rows_tokens_are_the_same_alone_and_in_a_batch(target, drafter) -> None:
    prompts = np.random.default_rng(1).integers(0, 11, (3, 8))
    lengths = np.array([8, 5, 2])

    def run(rows: slice):
        options = {"max_new_tokens": 24, "sampling": specjax.Sampling(temperature=0.0)}
        return specjax.generate(target, drafter, prompts[rows], lengths[rows], **options)

    together = run(slice(None))
    for row in range(3):
        alone = run(slice(row, row + 1))
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])


@pytest.mark.thorough
def test_it_conforms(target) -> None:
    conformance.check(target, EarlyExit(layers=1, draft=specjax.StaticTree(((0,), (1,), (0, 0)))))


@pytest.mark.thorough
def test_a_drafter_of_features_has_a_plain_layer(target) -> None:
    drafter = Eagle3.init(target, jax.random.key(3), specjax.Chain(2))
    assert (drafter.sizes.mla, drafter.sizes.moe, drafter.sizes.model_type) == (None, None, "llama")
    prompts, greedy = np.array([[1, 2, 3]]), specjax.Sampling(temperature=0.0)
    drafted = specjax.generate(target, drafter, prompts, max_new_tokens=8, sampling=greedy)
    logits = target.forward(drafted.tokens)[0].logits[0]
    np.testing.assert_array_equal(drafted.tokens[0, 3:], logits[2:-1].argmax(axis=-1))


def test_a_drafter_for_deepseek_has_as_many_heads_as_fit_its_hidden_size() -> None:
    layer = layer_like(published("deepseek-v3"))
    heads = (layer.num_heads, layer.num_kv_heads, layer.head_dim)
    assert (*heads, layer.intermediate_size) == (56, 8, 128, 18432)


@pytest.mark.full
def test_logits_are_the_same_on_a_mesh(target, tmp_path) -> None:
    target.save_pretrained(tmp_path)
    mesh = sharding.make_mesh(2, 4)
    split = Target.from_pretrained(tmp_path, dtype=np.float32, mesh=mesh)
    jax.tree.map(np.testing.assert_array_equal, split.params, target.params)
    experts = split.params["layers"][1]["experts_up"]
    assert experts.addressable_shards[0].data.shape == (2, *experts.shape[1:])
    tokens = np.random.default_rng(2).integers(0, 11, (2, 9))
    forward = jax.jit(Target.forward)
    np.testing.assert_allclose(
        forward(split, tokens)[0].logits, forward(target, tokens)[0].logits, atol=1e-4
    )


@pytest.mark.thorough
def test_greedy_tokens_are_the_same_on_a_mesh(target) -> None:
    mesh = sharding.make_mesh(2, 4)
    declared = params.declare(target.config)
    placements = params.shardings(declared, mesh, target.config.axis_units)
    split = target.replace(params=jax.device_put(target.params, placements), mesh=mesh)
    tokens = np.random.default_rng(2).integers(0, 11, (2, 9))
    greedy = {"max_new_tokens": 12, "sampling": specjax.Sampling(temperature=0.0)}
    generated = specjax.generate(
        split, EarlyExit(layers=1, draft=specjax.Chain(2)), tokens, **greedy
    ).tokens
    logits = target.forward(generated)[0].logits
    np.testing.assert_array_equal(generated[:, 9:], logits[:, 8:-1].argmax(axis=-1))


@pytest.mark.full
@pytest.mark.parametrize(
    "target", ["deepseek_v3", pytest.param("qwen3_moe", marks=pytest.mark.thorough)], indirect=True
)
def test_gradients_reach_every_parameter_but_the_bias_of_the_choice(target) -> None:
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 11, (2, 17)))

    @jax.jit
    @jax.grad
    def gradient(target: Target) -> jax.Array:
        logits = target.forward(tokens[:, :-1])[0].logits
        return cross_entropy(logits, tokens[:, 1:]).mean()

    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient(target).params):
        assert np.isfinite(leaf).all(), path
        assert (np.abs(leaf).max() > 0) == ("correction" not in str(path)), path


# --- what comes along in published checkpoints ----------------------------------------------------


def edit(path, change_config: dict, change_tensors) -> None:
    raw = json.loads((path / "config.json").read_text()) | change_config
    (path / "config.json").write_text(json.dumps(raw))
    tensors = load_file(path / "model.safetensors")
    change_tensors(tensors)
    save_file(tensors, path / "model.safetensors")


def test_deepseeks_weights_in_fp8_and_its_module_for_a_further_token(tmp_path) -> None:
    """A checkpoint is read as DeepSeek publishes it.

    Its matrices are in FP8, the router and the embedding are not, and it has one more layer than
    config.json counts.
    """
    target = tiny_target(**MIXTURES["deepseek_v3"])
    target.save_pretrained(tmp_path)
    saved = {}

    def quantize(tensors: dict) -> None:
        for name in [name for name in tensors if "_proj" in name]:
            tensors[name] = (tensors[name] / 0.5).astype(jnp.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = np.full((1, 1), 0.5, np.float32)
        tensors["model.layers.2.eh_proj.weight"] = np.zeros((16, 32), np.float32)
        tensors["model.layers.2.mlp.experts.7.up_proj.weight"] = np.zeros((8, 16), np.float32)
        saved.update(tensors)

    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    edit(tmp_path, {"num_nextn_predict_layers": 1, "quantization_config": quantization}, quantize)
    read = Target.from_pretrained(tmp_path, dtype=np.float32)
    assert read.config == target.config
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    np.testing.assert_array_equal(
        read.params["layers"][1]["experts_down"][5], saved[name].astype(np.float32).T * 0.5
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0.07, atol=0.01),
        read.params,
        target.params,
    )
    assert Target.from_pretrained(tmp_path).params["layers"][1]["correction"].dtype == np.float32

    saved.pop(f"{name}_scale_inv")
    save_file(saved, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError,
        match=f"'{name}' is quantized, and '{name}_scale_inv', which goes with it, is missing",
    ):
        Target.from_pretrained(tmp_path)


def test_what_does_not_belong_to_the_model_is_refused(tmp_path) -> None:
    tiny_target(**MIXTURES["deepseek_v3"]).save_pretrained(tmp_path)
    edit(
        tmp_path,
        {},
        lambda tensors: tensors.update(
            {"model.layers.2.eh_proj.weight": np.zeros((16, 32), np.float32)}
        ),
    )
    with pytest.raises(
        CheckpointError, match="num_hidden_layers=2, but the tensors are of 3 layers"
    ):
        Target.from_pretrained(tmp_path)
    edit(tmp_path, {"num_nextn_predict_layers": 1, "n_routed_experts": 12}, lambda tensors: None)
    with pytest.raises(CheckpointError, match="it says 12 experts, but the tensors are of 8"):
        Target.from_pretrained(tmp_path)


def test_other_modules_may_have_more_experts(tmp_path) -> None:
    target = tiny_target(**MIXTURES["deepseek_v3"])
    target.save_pretrained(tmp_path)
    more = np.zeros((8, 16), np.float32)
    edit(
        tmp_path,
        {"num_nextn_predict_layers": 1},
        lambda tensors: tensors.update({"model.layers.2.mlp.experts.11.up_proj.weight": more}),
    )
    read = Target.from_pretrained(tmp_path, dtype=np.float32)
    jax.tree.map(np.testing.assert_array_equal, read.params, target.params)


def test_the_vision_tower_may_have_more_experts(tmp_path) -> None:
    target = tiny_target(**MIXTURES["qwen3_moe"])
    target.save_pretrained(tmp_path)
    more = {"model.visual.blocks.0.mlp.experts.11.up_proj.weight": np.zeros((8, 16), np.float32)}

    def as_seeing(tensors) -> None:
        text = {
            name.replace("model.", "model.language_model.", 1): tensors.pop(name)
            for name in list(tensors)
            if name.startswith("model.")
        }
        tensors.update(text | more)

    raw = json.loads((tmp_path / "config.json").read_text())
    nested = {"text_config": raw | {"model_type": "qwen3_vl_moe_text"}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    edit(tmp_path, {"model_type": "qwen3_vl_moe", "tie_word_embeddings": False}, as_seeing)
    read = Target.from_pretrained(tmp_path, dtype=np.float32)
    jax.tree.map(np.testing.assert_array_equal, read.params, target.params)


def test_mimo_is_a_qwen2_model_with_modules_beside_it(tmp_path) -> None:
    target = tiny_target(model_type="qwen2", qkv_bias=True)
    target.save_pretrained(tmp_path)
    extra = {"model.mtp_layers.0.input_proj.weight": np.zeros((16, 32), np.float32)}
    edit(
        tmp_path,
        {"model_type": "mimo", "num_nextn_predict_layers": 1},
        lambda tensors: tensors.update(extra),
    )
    read = Target.from_pretrained(tmp_path, dtype=np.float32)
    assert read.config == target.config
    jax.tree.map(np.testing.assert_array_equal, read.params, target.params)
    edit(tmp_path, {"model_type": "qwen2"}, lambda tensors: None)
    with pytest.raises(
        CheckpointError, match=r"'model.mtp_layers.0.input_proj.weight' is no part of a qwen2 model"
    ):
        Target.from_pretrained(tmp_path)


def test_such_a_model_cannot_be_inflated(target) -> None:
    with pytest.raises(
        InputError, match=f"a model of type '{target.config.model_type}' cannot be inflated"
    ):
        inflate(target, hidden_size=32, intermediate_size=48, num_layers=4)


@pytest.mark.parametrize("family", MIXTURES)
def test_bfloat16_survives_a_round_trip(tmp_path, family) -> None:
    target = tiny_target(**MIXTURES[family])
    target.save_pretrained(tmp_path, dtype=jnp.bfloat16)
    once = Target.from_pretrained(tmp_path, dtype=jnp.bfloat16)
    once.save_pretrained(tmp_path / "again")
    first, second = (
        load_file(path / "model.safetensors") for path in (tmp_path, tmp_path / "again")
    )
    assert first.keys() == second.keys()
    for name, value in first.items():
        expected_dtype = np.float32 if "correction" in name else jnp.bfloat16
        assert value.dtype == second[name].dtype == expected_dtype
        np.testing.assert_array_equal(
            value.view(np.uint8), second[name].view(np.uint8), err_msg=name
        )


@pytest.mark.parametrize("family", MIXTURES)
def test_a_drafter_without_the_tensors_of_such_layers_is_refused(tmp_path, family) -> None:
    # EAGLE-3.1 has latent attention, so that a file of DeepSeek-V3 is read as one of those.
    expected = (
        "'midlayer.self_attn.kv_a_layernorm.weight' of an EAGLE-3 drafter .* is missing"
        if family == "deepseek_v3"
        else f"model_type='{family}': this drafter's layers must have ordinary attention"
    )
    drafter = Eagle3.init(tiny_target(), jax.random.key(3), specjax.Chain(2))
    drafter.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    mixture_fields = config_json.format_config(
        tiny_config(num_layers=1, **MIXTURES[family]), "float32"
    )
    (tmp_path / "config.json").write_text(json.dumps(raw | mixture_fields))
    with pytest.raises(CheckpointError, match=expected):
        Eagle3.from_pretrained(tmp_path)


@pytest.mark.thorough
def test_the_compiled_loop_copies_neither_caches_nor_experts(target) -> None:
    _, state = decoding.start(
        target, None, np.arange(8)[None], options=GenerationOptions(max_new_tokens=450)
    )
    compiled = decoding.decode.lower(target, NoDraft(), state, 5).compile()
    layer = target.params["layers"][1]
    for buffer in (*state.cache.layers[1], layer["experts_gate"], layer["experts_down"]):
        shape = ",".join(map(str, buffer.shape))
        copies = [
            line
            for line in compiled.as_text().splitlines()
            if f"f32[{shape}]" in line and " copy(" in line
        ]
        assert copies == []
    buffers = jax.tree.leaves(state.cache)
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(
        buffer.nbytes for buffer in buffers
    )
