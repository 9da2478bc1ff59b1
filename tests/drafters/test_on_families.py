"""Test every drafter on targets of the families that differ most from Llama.

The targets are small random models that transformers made.
"""

import json
from functools import cache

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import specjax
from specjax import decoding
from specjax.decoding.options import GenerationOptions
from specjax.drafters import (
    MTP,
    CompressedCache,
    DFlash,
    DraftModel,
    DSpark,
    Eagle,
    Eagle3,
    EagleWithLayerAttention,
    EarlyExit,
    Gemma4Assistant,
    Medusa,
    MixtureOfAttentions,
    PEagle,
    PromptLookup,
    SnapKV,
    Streaming,
)
from specjax.drafters.trained import layer_like
from specjax.drafts.shapes import Chain, DynamicTree
from specjax.errors import InputError
from specjax.evaluation import conformance
from specjax.models.config import Layer, ModelConfig, Rope
from specjax.models.fields import CheckpointError
from tests.conftest import tiny_target
from tests.models.families import zoo

NAMES = tuple(zoo.MODELS)
PROMPTS = np.array([[5, 8, 30, 2, 5, 8, 30, 2, 5, 8], [7, 7, 19, 0, 0, 0, 0, 0, 0, 0]], np.int32)
LENGTHS = np.array([10, 3])
NEW = 18  # so that each text is longer than three windows of 5
TREE = DynamicTree(top_k=3, depth=3, nodes=9)


@pytest.fixture(scope="module")
def of(tmp_path_factory):
    """Return a function that takes a name in the zoo.

    The function returns the target, and the texts that transformers writes after each prompt alone.
    """
    from tests.with_torch import torch

    @cache
    def make(name: str):
        directory = tmp_path_factory.mktemp("model")
        model, texts = zoo.save(name, directory), []
        for row, length in zip(PROMPTS, LENGTHS, strict=True):
            ids = torch.tensor(row[None, :length])
            mask = torch.ones_like(ids)
            output = model.generate(
                ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0
            )
            texts.append(output[0].tolist())
        return specjax.Target.from_pretrained(directory), texts

    return make


def thoroughly(cases, often):
    """Return all ``cases``, with a mark on all that only the thorough tests run."""
    return [
        pytest.param(*case, marks=[pytest.mark.thorough] * (case not in often)) for case in cases
    ]


def written(target, drafter, rows=(0, 1)) -> list[list[int]]:
    prompts, lengths = PROMPTS[list(rows)], LENGTHS[list(rows)]
    prompts = prompts[:, : lengths.max()]
    result = specjax.generate(
        target, drafter, prompts, lengths, max_new_tokens=NEW, eos_token_ids=()
    )
    tokens, lengths = np.asarray(result.tokens), np.asarray(result.lengths)
    return [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]


# --- greedy texts equal those of transformers -----------------------------------------------------

FREE = {
    "plain": lambda target: None,
    "draft model, chain": lambda target: DraftModel.init(target, jax.random.key(1), Chain(3)),
    "draft model, tree": lambda target: DraftModel.init(target, jax.random.key(1), TREE),
    "prompt lookup": lambda target: PromptLookup(draft=3),
    "early exit": lambda target: EarlyExit(layers=target.config.num_layers - 1, draft=TREE),
}


@pytest.mark.full
@pytest.mark.thorough_except(
    "draft model, tree-gemma4 E2B", "plain-gemma2", "plain-gpt_oss", "prompt lookup-llama4"
)
@pytest.mark.parametrize(("method", "name"), [(method, name) for method in FREE for name in NAMES])
def test_a_batch_of_greedy_texts_is_what_transformers_writes(of, method, name) -> None:
    target, texts = of(name)
    assert written(target, FREE[method](target)) == texts


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "name"),
    thoroughly(
        [(method, name) for method in FREE for name in NAMES], [("draft model, tree", "gemma4 E2B")]
    ),
)
def test_a_greedy_text_alone_is_what_transformers_writes(of, method, name) -> None:
    target, texts = of(name)
    assert written(target, FREE[method](target), rows=[1]) == texts[1:]


# --- every drafter keeps the contract -------------------------------------------------------------

TRAINED = {
    "eagle": lambda target: Eagle.init(target, jax.random.key(3), Chain(2)),
    "eagle3": lambda target: Eagle3.init(target, jax.random.key(3), TREE, ids=np.arange(0, 37, 2)),
    "mtp": lambda target: MTP.init(target, jax.random.key(3), Chain(3), modules=2),
    "medusa": lambda target: Medusa.init(target, jax.random.key(3), Chain(2), heads=2),
    "moa": lambda target: MixtureOfAttentions.init(target, jax.random.key(3), Chain(2)),
    "moa without lsa": lambda target: MixtureOfAttentions.init(
        target, jax.random.key(3), Chain(2), lsa=False
    ),
    "moa with tli": lambda target: MixtureOfAttentions.init(
        target, jax.random.key(3), Chain(2), lsa=False, tli=1
    ),
    "eagle with lsa": lambda target: EagleWithLayerAttention.init(
        target, jax.random.key(3), Chain(2)
    ),
    "peagle": lambda target: PEagle.init(
        target, jax.random.key(3), Chain(3), ids=np.arange(0, 37, 2)
    ),
    "dflash": lambda target: DFlash.init(target, jax.random.key(3), TREE, block_size=4),
    "dspark": lambda target: DSpark.init(
        target, jax.random.key(3), Chain(3), block_size=3, markov_rank=4
    ),
    "assistant": lambda target: Gemma4Assistant.init(target, jax.random.key(3), TREE),
    "streaming": lambda target: CompressedCache(budget=6, scheme=Streaming(sinks=2), draft=TREE),
    "snapkv": lambda target: CompressedCache(
        budget=4, scheme=SnapKV(window=2, pool=3), draft=Chain(3)
    ),
}
# Models whose layers have entries of different sizes.
UNLIKE = [name for name in NAMES if name.startswith(("gemma4", "mimo_v2"))]
REFUSED = [(method, name) for method in ("moa", "eagle with lsa") for name in UNLIKE]
REFUSED += [("moa with tli", name) for name in ("gemma3", "gemma4 E2B", "llama4", "mixtral")]
KEPT = [(method, name) for method in TRAINED for name in NAMES if (method, name) not in REFUSED]


@pytest.mark.full
@pytest.mark.thorough_except("eagle3-gemma4")
@pytest.mark.parametrize(("method", "name"), KEPT)
def test_texts_do_not_depend_on_the_drafter(of, method, name) -> None:
    target, texts = of(name)
    assert written(target, TRAINED[method](target)) == texts


@pytest.mark.thorough
@pytest.mark.parametrize(("method", "name"), KEPT)
def test_a_drafter_keeps_its_contract(of, method, name) -> None:
    target, _ = of(name)
    conformance.check(target, TRAINED[method](target), new_tokens=12, come_and_go=False)


@pytest.mark.full
@pytest.mark.thorough_except("moa-gemma4 26B-A4B", "eagle with lsa-gemma4")
@pytest.mark.parametrize(("method", "name"), [zoo.case(case, case[1]) for case in REFUSED])
def test_what_a_drafter_cannot_read_is_refused_in_a_line(of, method, name) -> None:
    target, _ = of(name)
    with pytest.raises(
        InputError, match=r"^(target: layer self-attention|drafter: target layer inference)[^\n]*$"
    ):
        TRAINED[method](target).check(target)


def test_no_drafted_state_is_finished_by_layers_that_are_given_inputs() -> None:
    target = tiny_target(per_layer_inputs=6, per_layer_vocab_size=11)
    drafter = MixtureOfAttentions.init(target, jax.random.key(3), Chain(2), tli=1)
    with pytest.raises(
        InputError,
        match=r"tli=1\) runs the target's last layers on states that belong to no token.*tli=0$",
    ):
        drafter.check(target)
    MixtureOfAttentions.init(target, jax.random.key(3), Chain(2)).check(target)


# --- what they draft ------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.thorough_except("gemma3")
@pytest.mark.parametrize("name", ["gemma3", "gemma4 E2B", "gpt_oss"])
def test_the_target_itself_drafts_its_own_tokens(of, name) -> None:
    """Check tokens that are drafted one by one, with a cache and scratch, and scored at once."""
    target, _ = of(name)
    drafter = DraftModel(target, draft=Chain(3))
    result = specjax.generate(
        target, drafter, PROMPTS, LENGTHS, max_new_tokens=16, eos_token_ids=()
    )
    np.testing.assert_array_equal(result.stats.accepted, 3 * result.stats.steps)


def attention_of_last(model, name: str, tokens: np.ndarray, window: int) -> list[np.ndarray]:
    """Return the attention that the last ``window`` tokens pay to the others, by transformers.

    It is summed over the query heads that read a head of keys.

    Returns:
        ``[kv_heads, n - window]`` for each layer.
    """
    from tests.with_torch import torch

    with torch.no_grad():
        weights = model(torch.tensor(tokens[None]), output_attentions=True).attentions
    return [layer[0, :, -window:, : len(tokens) - window].sum(1).numpy() for layer in weights]


@pytest.mark.full
@pytest.mark.thorough_except("gemma2")
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gemma4 31B", "gemma4 E2B", "gpt_oss"])
def test_snapkv_keeps_what_the_models_own_attention_chooses(of, name) -> None:
    target, _ = of(name)
    config, model = target.config, zoo.make(name)
    budget, window, pool = 12, 7, 3
    tokens = np.random.default_rng(3).integers(0, zoo.VOCABULARY, 26).astype(np.int32)
    drafter = CompressedCache(
        budget=budget, scheme=SnapKV(window=window, pool=pool), draft=Chain(2)
    )
    _, state = decoding.start(
        target,
        drafter,
        tokens[None],
        np.array([26]),
        GenerationOptions(max_new_tokens=4, eos_token_ids=()),
    )
    read = tokens[:-1]  # the newest token is the first root
    paid: dict[int, np.ndarray] = {}
    for layer, of_heads in enumerate(attention_of_last(model, name, read, window)):
        source = config.entries_of(layer)
        groups = of_heads.reshape(config.of_layer(source).num_kv_heads, -1, of_heads.shape[-1])
        paid[source] = paid.get(source, 0) + groups.sum(1)
    for layer, share in paid.items():
        padded = np.pad(share, ((0, 0), (1, 1)))
        pools = [padded[:, i : i + pool] for i in range(share.shape[1])]
        pooled = np.stack(pools, axis=1).mean(axis=-1)
        small, whole = (
            np.asarray(cache.layers[layer][0][0]) for cache in (state.drafter, state.cache)
        )
        for head, scores in enumerate(pooled):
            best = np.sort(-scores)[budget - window - 1 : budget - window + 1]
            assert best[1] - best[0] > 1e-6 or best[0] == 0  # otherwise rounding may decide
            chosen = np.sort(np.argsort(-scores, kind="stable")[: budget - window])
            np.testing.assert_array_equal(small[head, : budget - window], whole[head, chosen])


# --- their layers are plain -----------------------------------------------------------------------


@pytest.mark.full
def test_a_drafters_layer_is_a_plain_one_with_the_rope_of_layers_that_read_the_whole_text(
    of,
) -> None:
    ropes = {name: layer_like(of(name)[0].config).rope for name in ("gemma3", "gemma4", "gpt_oss")}
    assert ropes["gemma3"] == Rope(theta=1e6, kind="linear", factor=8.0, original_max_positions=128)
    assert ropes["gemma4"] == Rope(theta=1e6)  # the theta of its proportional RoPE
    assert ropes["gpt_oss"].kind == "yarn" and ropes["gpt_oss"].factor == 8.0
    unpositioned = tiny_target(
        layers=(Layer(rope=Rope(kind="none")), Layer(rope=Rope(theta=300.0)))
    ).config
    assert layer_like(unpositioned).rope == Rope(theta=300.0)
    for name in ("gemma2", "gemma4 26B-A4B", "gpt_oss"):
        target = of(name)[0].config
        layer = layer_like(target)
        names = ("vocab_size", "hidden_size", "intermediate_size", "norm_eps")
        names += ("num_heads", "num_kv_heads", "head_dim", "max_positions")
        shared = {field: getattr(target, field) for field in names}
        assert layer == ModelConfig(num_layers=1, rope=layer.rope, **shared)


@pytest.mark.full
@pytest.mark.parametrize(
    "make", ["eagle3", "eagle", "mtp", "moa without lsa", "draft model, chain"]
)
def test_what_is_saved_for_gemma_4_is_read_back(of, make, tmp_path) -> None:
    target, texts = of("gemma4")
    drafter = {**TRAINED, **FREE}[make](target)
    drafter.save_pretrained(tmp_path)
    again = type(drafter).from_pretrained(tmp_path, draft=drafter.draft)
    assert jax.tree.structure(again) == jax.tree.structure(
        drafter
    )  # this compares the configurations, too
    jax.tree.map(np.testing.assert_array_equal, again, drafter)
    if make == "eagle3":
        assert written(target, again) == texts


def test_layer_attention_of_gemma_3_is_read_back(of, tmp_path) -> None:
    """Check the theta of layer self-attention, whose positions are layers.

    It is the theta of the drafter's own layer, the only theta in the file.
    """
    drafter = TRAINED["moa"](of("gemma3")[0])
    drafter.save_pretrained(tmp_path)
    assert MixtureOfAttentions.from_pretrained(tmp_path).config == drafter.config


# --- EAGLE-3 drafters for gpt-oss, in their published layouts -------------------------------------

_LLAMA = {
    "model_type": "llama",
    "vocab_size": zoo.VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,  # the heads together are not as wide as the hidden size
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "truncate": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_HALF = {"draft_vocab_size": 19}  # every other token of 37
PUBLISHED = {
    "SpecForge": (
        "midlayer.",
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]},
        }
        | _HALF,
    ),
    "ModelOpt": (
        "layers.0.",
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "rope_theta": 5e5,
            "rope_scaling": _LLAMA3,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
                "eh_proj_before_attn": False,
            },
        }
        | _HALF,
    ),
    "NVIDIA v3": (
        "layers.0.",
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [2, 3, 4]},
        }
        | _HALF,
    ),
    "without head and fc": (
        "layers.0.",
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": None,
            "eagle_config": {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": []},
        },
    ),
    "speculators": (
        "layers.0.",
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "norm_before_fc": True,
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
            "transformer_layer_config": _LLAMA | {"rope_theta": 150_000.0, "rope_scaling": _YARN},
        }
        | _HALF,
    ),
}
TAPS = {
    "SpecForge": (1, 2, 4),
    "ModelOpt": (2, 3, 4),
    "NVIDIA v3": (2, 3, 4),
    "without head and fc": (),
    "speculators": (1, 2, 3),
}


def publish(directory, which: str) -> dict[str, np.ndarray]:
    """Write a checkpoint of random weights, and return its tensors."""
    first, fields = PUBLISHED[which]
    whole, rng = which == "without head and fc", np.random.default_rng(0)
    hidden, mlp, heads, kv_heads, vocab = 32, 40, 6 * 4, 2 * 4, 37 if whole else 19
    shapes = {
        f"{first}self_attn.q_proj.weight": (heads, 2 * hidden),
        f"{first}self_attn.k_proj.weight": (kv_heads, 2 * hidden),
        f"{first}self_attn.v_proj.weight": (kv_heads, 2 * hidden),
        f"{first}self_attn.o_proj.weight": (hidden, heads),
        f"{first}mlp.gate_proj.weight": (mlp, hidden),
        f"{first}mlp.up_proj.weight": (mlp, hidden),
        f"{first}mlp.down_proj.weight": (hidden, mlp),
        f"{first}hidden_norm.weight": (hidden,),
        f"{first}input_layernorm.weight": (hidden,),
        f"{first}post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    if not whole:
        shapes |= {"fc.weight": (hidden, 3 * hidden), "lm_head.weight": (vocab, hidden)}
    if which in ("NVIDIA v3", "speculators"):
        shapes["input_norm.weight"] = (3 * hidden,)
    tensors = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    if not whole:
        tensors["d2t"] = np.arange(19, dtype=np.int64)
        if which in ("SpecForge", "speculators"):
            tensors["t2d"] = np.arange(37) % 2 == 0
    config = fields if "transformer_layer_config" in fields else _LLAMA | fields
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return tensors


@pytest.mark.full
@pytest.mark.thorough_except("SpecForge")
@pytest.mark.parametrize("which", PUBLISHED)
def test_an_eagle3_for_gpt_oss_is_read_as_published(of, which, tmp_path) -> None:
    target, texts = of("gpt_oss")
    tensors = publish(tmp_path, which)
    drafter = Eagle3.from_pretrained(tmp_path, draft=Chain(3))
    drafter.check(target)
    assert drafter.taps(target.config) == TAPS[which]
    assert (drafter.sizes.num_heads, drafter.sizes.head_dim, drafter.sizes.sinks) == (6, 4, False)
    kind = {"ModelOpt": "llama3", "speculators": "yarn"}.get(which, "default")
    assert drafter.sizes.rope.kind == kind
    output, _ = target.forward(PROMPTS, taps=drafter.taps(target.config))
    if which == "without head and fc":
        np.testing.assert_array_equal(drafter.features(output), np.asarray(output.hidden))
        hidden = normed(output.hidden, tensors["norm.weight"])
        expected = hidden @ np.asarray(target.head_weights)
        np.testing.assert_allclose(drafter.logits(target, output.hidden), expected, atol=1e-4)
    else:
        joined = np.concatenate(np.split(np.asarray(output.taps), 3, 2), -1)[:, :, 0]
        if "input_norm.weight" in tensors:
            joined = normed(joined, tensors["input_norm.weight"])
        np.testing.assert_allclose(
            drafter.features(output), joined @ tensors["fc.weight"].T, atol=1e-4
        )
    if which in ("NVIDIA v3", "without head and fc"):
        assert written(target, drafter) == texts


def normed(x, weight: np.ndarray) -> np.ndarray:
    x = np.asarray(x)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight


def test_a_drafter_without_head_and_fc_is_read_back(tmp_path) -> None:
    (tmp_path / "once").mkdir()
    publish(tmp_path / "once", "without head and fc")
    drafter = Eagle3.from_pretrained(tmp_path / "once")
    drafter.save_pretrained(tmp_path / "twice")
    again = Eagle3.from_pretrained(tmp_path / "twice")
    assert again.config == drafter.config
    jax.tree.map(np.testing.assert_array_equal, again.params, drafter.params)
    with pytest.raises(
        InputError,
        match="layout='speculators': it needs fc and lm_head, but this drafter lacks one",
    ):
        drafter.save_pretrained(tmp_path / "thrice", layout="speculators")


def test_what_eagle_config_says_and_is_not_read_is_refused(tmp_path) -> None:
    publish(tmp_path, "ModelOpt")
    config = json.loads((tmp_path / "config.json").read_text())
    config["eagle_config"]["eh_proj_before_attn"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"eagle_config\.eh_proj_before_attn=True: must be left out, or false"
    ):
        Eagle3.from_pretrained(tmp_path)


def test_experts_in_a_drafter_are_refused(tmp_path) -> None:
    publish(tmp_path, "SpecForge")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "gpt_oss", "num_local_experts": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match="model_type='gpt_oss': this drafter's layers must have ordinary"
    ):
        Eagle3.from_pretrained(tmp_path)
