"""Test MTP modules in checkpoints: published names and layouts, and what is refused.

`test_features` tests what they draft.
"""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax import decoding, sharding
from specjax.decoding.options import GenerationOptions
from specjax.drafters import MTP
from specjax.drafters.registry import load_drafter
from specjax.drafts.shapes import Chain, DraftShape, StaticTree
from specjax.errors import InputError
from specjax.evaluation import conformance
from specjax.models.fields import CheckpointError
from specjax.sampling import Sampling
from tests.conftest import tiny_target

TEXT = np.array([[1, 4, 2, 4, 2, 7]])


@pytest.fixture
def target():
    return tiny_target(qkv_bias=True, model_type="qwen2")


@pytest.fixture
def beside_its_target(tmp_path, target):
    """Return a checkpoint such as MiMo's, and its drafter.

    The modules' tensors are among the target's.
    """
    drafter = MTP.init(target, jax.random.key(1), modules=2, qkv_bias=True, model_type="qwen2")
    target.save_pretrained(tmp_path)
    drafter.save_pretrained(tmp_path / "mtp")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= load_file(tmp_path / "mtp" / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 2}))
    return tmp_path, drafter


def assert_same(actual: MTP, expected: MTP) -> None:
    assert actual.config == expected.config
    jax.tree.map(np.testing.assert_array_equal, actual.params, expected.params)


@pytest.mark.full
def test_modules_are_read_from_beside_their_target(beside_its_target, target) -> None:
    directory, drafter = beside_its_target
    names = set(load_file(directory / "model.safetensors"))
    assert {
        "model.mtp_layers.1.input_proj.weight",
        "model.mtp_layers.0.token_layernorm.weight",
    } < names
    read = MTP.from_pretrained(directory, dtype=jnp.float32)
    assert_same(read, drafter)
    assert isinstance(load_drafter(str(directory), Chain(2), target.config), MTP)
    specjax.generate(target, read, TEXT, max_new_tokens=4)


@pytest.mark.parametrize("deepseek", [False, True])
def test_what_is_written_is_read_again_bit_for_bit(tmp_path, target, deepseek) -> None:
    drafter = MTP.init(target, jax.random.key(1), modules=2)
    if deepseek:
        drafter = drafter.replace(config=replace(drafter.config, layout="deepseek", first_layer=2))
    drafter.save_pretrained(tmp_path)
    assert_same(MTP.from_pretrained(tmp_path, dtype=jnp.float32), drafter)
    if deepseek:
        assert "model.layers.3.eh_proj.weight" in load_file(tmp_path / "model.safetensors")


SIZES = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
LATENT = {
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
EXPERTS = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
}
NEXT = ("model.layers.2.", ("hnorm", "enorm", "eh_proj", "shared_head.norm"))
INDEXED = {"index_n_heads": 3, "index_head_dim": 12, "index_topk": 5}
KINDS = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
# transformers' name of the family, its sizes, and the prefix and names of the module's tensors.
PUBLISHED = {
    "mimo": (
        "Qwen2",
        {},
        "model.mtp_layers.0.",
        ("hidden_layernorm", "token_layernorm", "input_proj", "final_layernorm"),
    ),
    "deepseek_v3": ("DeepseekV3", LATENT | EXPERTS | {"first_k_dense_replace": 1}, *NEXT),
    "deepseek_v32": (
        "DeepseekV32",
        LATENT | EXPERTS | INDEXED | {"first_k_dense_replace": 1},
        *NEXT,
    ),
    "glm4_moe": (
        "Glm4Moe",
        EXPERTS | {"first_k_dense_replace": 1, "head_dim": 8, "use_qk_norm": True},
        *NEXT,
    ),
    "glm4_moe_lite": ("Glm4MoeLite", LATENT | EXPERTS | KINDS, *NEXT),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        LATENT | EXPERTS | INDEXED | KINDS | {"indexer_types": ["full", "shared", "full"]},
        *NEXT,
    ),
}


@pytest.fixture(params=PUBLISHED)
def published(request, tmp_path):
    """Return a checkpoint of two layers and a module, a text, the module's logits, and a draft.

    The checkpoint is made from a model of three layers that transformers runs.
    """
    import transformers

    from tests.with_torch import torch

    family, sizes, prefix, names = PUBLISHED[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    extra = {name: torch.randn(32) * 0.3 + 1 for name in names}
    extra |= {names[2]: torch.randn(32, 64) * 0.2}
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 37, (1, 12)))

    def norm(x, name):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps)
        return x * scale * extra[name]

    with torch.no_grad():
        for key, value in model.state_dict().items():
            if "norm" in key or "bias" in key:
                value.add_(torch.randn_like(value) * 0.3)
        inner = model.model

        def read(states, following):
            count = states.shape[1]
            parts = [norm(states, names[0]), norm(inner.embed_tokens(following), names[1])]
            joined = torch.cat(parts if request.param == "mimo" else parts[::-1], dim=-1)
            x = joined @ extra[names[2]].T
            mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
            places = torch.arange(count)[None]
            x = inner.layers[2](
                x,
                attention_mask=mask,
                position_ids=places,
                position_embeddings=inner.rotary_emb(x, places),
            )
            return norm(x[0] if isinstance(x, tuple) else x, names[3])

        hidden = inner.norm(model(tokens[:, :-1], output_hidden_states=True).hidden_states[2])
        first = read(hidden, tokens[:, 1:])
        logits = first @ model.lm_head.weight.T
        drafted = logits[:, -1:].argmax(-1)
        # Drafting continues with the module's own state after its norm.
        second = read(torch.cat([hidden, first[:, -1:]], 1), torch.cat([tokens[:, 1:], drafted], 1))
        following = (second[:, -1] @ model.lm_head.weight.T).argmax(-1)
    model.save_pretrained(tmp_path)
    tensors = {
        name.replace("model.layers.2.", prefix): value
        for name, value in load_file(tmp_path / "model.safetensors").items()
    }
    tensors |= {f"{prefix}{name}.weight": value.numpy() for name, value in extra.items()}
    if prefix == NEXT[0]:  # its checkpoints repeat the tensors that modules share
        tensors |= {f"{prefix}embed_tokens.weight": tensors["model.embed_tokens.weight"]}
        tensors |= {f"{prefix}shared_head.head.weight": tensors["lm_head.weight"]}
    save_file(tensors, tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw |= {"num_hidden_layers": 2, "model_type": request.param}
    raw |= {"num_nextn_predict_layers": 1, "layer_types": None}
    # The lists of layers do not count the module.
    raw |= {name: raw[name][:2] for name in ("mlp_layer_types", "indexer_types") if raw.get(name)}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return tmp_path, tokens.numpy(), logits.numpy(), [int(drafted), int(following)]


@pytest.mark.full
@pytest.mark.thorough_except("mimo", "deepseek_v3", "glm4_moe")
def test_published_modules_say_what_the_published_network_says(published, tmp_path) -> None:
    """Check one pass over the text, and the tokens that the engine drafts after a prompt.

    The modules alone are read as they were written.
    """
    directory, tokens, expected, drafted = published
    target = specjax.Target.from_pretrained(directory, dtype=np.float32)
    read = drafter = MTP.from_pretrained(directory, draft=Chain(2), dtype=np.float32)
    output = target.forward(tokens[:, :-1])[0]
    causal, positions = jnp.tril(jnp.ones((1, 11, 11), bool)), jnp.arange(11)[None]
    states, _ = drafter.run(
        drafter.features(output), drafter.embed(target, tokens[:, 1:]), positions, causal, ((),)
    )
    np.testing.assert_allclose(drafter.logits(target, states), expected, atol=1e-4)
    prompts = np.concatenate([tokens, tokens])
    options = GenerationOptions(max_new_tokens=8, sampling=Sampling(temperature=0.0))
    drafter, state = decoding.start(target, drafter, prompts, np.array([12, 7]), options)
    draft, _ = jax.jit(decoding.propose_step)(target, drafter, state)
    assert draft.tokens[0, 1:].tolist() == drafted
    assert draft.tokens[1, 1] == expected[0, 5].argmax()
    plain = specjax.generate(target, None, prompts, max_new_tokens=8)
    np.testing.assert_array_equal(
        specjax.generate(target, drafter, prompts, max_new_tokens=8).tokens, plain.tokens
    )
    drafter.save_pretrained(tmp_path / "alone")
    assert_same(MTP.from_pretrained(tmp_path / "alone", dtype=np.float32), read)


def check_on_a_mesh(directory: Path, sizes: tuple[int, int], draft: DraftShape) -> None:
    """Check the texts and the drafts of a checkpoint with modules, and rows in pages, on a mesh."""
    mesh = sharding.make_mesh(*sizes)
    target, on_mesh = (
        specjax.Target.from_pretrained(directory, dtype=np.float32, mesh=mesh)
        for mesh in (None, mesh)
    )
    drafter, drafter_on_mesh = (
        MTP.from_pretrained(directory, draft=draft, dtype=np.float32, mesh=mesh)
        for mesh in (None, mesh)
    )
    prompts = np.random.default_rng(1).integers(0, target.config.vocab_size, (2, 12))
    lengths = np.array([12, 5])
    options = {"max_new_tokens": 12, "sampling": Sampling(temperature=0.0), "eos_token_ids": ()}
    plain = specjax.generate(target, None, prompts, lengths, **options)
    alone = specjax.generate(target, drafter, prompts, lengths, **options)
    result = specjax.generate(on_mesh, drafter_on_mesh, prompts, lengths, **options)
    np.testing.assert_array_equal(result.tokens, plain.tokens)
    np.testing.assert_array_equal(result.stats.accepted_at, alone.stats.accepted_at)
    conformance.check_rows_that_come_and_go(on_mesh, drafter_on_mesh, new_tokens=9)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("published", "sizes"),
    [("deepseek_v32", (1, 2)), ("glm_moe_dsa", (2, 1))],
    indirect=["published"],
)
def test_modules_with_an_indexer_in_pages_on_a_mesh(published, sizes) -> None:
    """Check texts that are longer than ``index_topk``."""
    check_on_a_mesh(published[0], sizes, StaticTree(((0,), (1,), (0, 0), (0, 0, 0))))


@pytest.mark.full_except("mimo")
def test_a_tensor_that_no_module_has_is_refused(published) -> None:
    directory, *_ = published
    tensors = load_file(directory / "model.safetensors")
    weight = next(
        name for name in tensors if name.endswith((".eh_proj.weight", ".input_proj.weight"))
    )
    strange = weight.replace("weight", "bias")
    save_file(tensors | {strange: np.zeros(32, np.float32)}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{strange}. is no part of the MTP modules"):
        MTP.from_pretrained(directory)


def test_what_is_wrong_is_refused_by_name(beside_its_target, target) -> None:
    directory, drafter = beside_its_target
    tensors = load_file(directory / "model.safetensors")

    def keep(*left_out: str) -> None:
        remaining = {
            name: value
            for name, value in tensors.items()
            if not any(part in name for part in left_out)
        }
        save_file(remaining, directory / "model.safetensors")

    keep("mtp_layers.1.")
    with pytest.raises(
        CheckpointError, match="num_nextn_predict_layers=2, but there are tensors of 1 modules"
    ):
        MTP.from_pretrained(directory)
    keep("mtp_layers.1.input_proj")
    with pytest.raises(CheckpointError, match=r"mtp_layers\.1\.input_proj\.weight' .*missing"):
        MTP.from_pretrained(directory)
    keep("mtp_layers")
    with pytest.raises(CheckpointError, match="MTP modules were left out"):
        MTP.from_pretrained(directory)
    keep()
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 1}))
    with pytest.raises(
        CheckpointError, match="num_nextn_predict_layers=1, but there are tensors of 2 modules"
    ):
        MTP.from_pretrained(directory)
    with pytest.raises(InputError, match="count=3: there are 2 modules"):
        drafter.first(3)
    with pytest.raises(InputError, match="hidden size 16"):
        drafter.check(tiny_target(hidden_size=32))


def test_the_first_modules_alone(target) -> None:
    drafter = MTP.init(target, jax.random.key(1), Chain(3), modules=3)
    alone = drafter.first(2)
    assert alone.modules == 2
    jax.tree.map(
        np.testing.assert_array_equal, alone.params["modules"], drafter.params["modules"][:2]
    )
