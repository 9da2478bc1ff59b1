"""The forward pass against transformers, and against itself with a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.errors import InputError
from specjax.models import config_json
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.config import MLA, Layer, Rope
from specjax.models.fields import CheckpointError
from specjax.models.transformer import Target
from tests.conftest import LAYERED, tiny_config, tiny_target

SIZES = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # ten times the usual: every part of the model shows in the logits
    "rms_norm_eps": 1e-5,
}
FAMILIES = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama biased": {"attention_bias": True, "mlp_bias": True},
    "llama head_dim": {"head_dim": 16},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen2 tied": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 12},
    "mistral windows": {"sliding_window": 7},
    "qwen2 windows from a layer": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
    "qwen3 alternating": {
        "head_dim": 12,
        "use_sliding_window": True,
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3 biased": {"head_dim": 8, "attention_bias": True},
}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    },
    "yarn mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 10000.0,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "truncate": False,
    },
    "yarn attention_factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.3,
        "rope_theta": 10000.0,
    },
}
forward = jax.jit(Target.forward, static_argnames=("taps", "layers"))

CASES = [(family, "default") for family in FAMILIES] + [
    (family, rope)
    for family in ("llama", "mistral", "qwen2", "qwen3")
    for rope in ROPES
    if rope != "default"
]


def reference(family: str, rope: str, path):
    """Save a random transformers model with random biases and norms, and return it."""
    import transformers

    from tests.with_torch import torch

    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    name = names[family.split(maxsplit=1)[0]]
    settings = SIZES | FAMILIES[family] | {"rope_parameters": ROPES[rope]}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, param in model.named_parameters():
            if "norm" in key or "bias" in key:
                param.add_(torch.randn_like(param) * 0.3)
    model.save_pretrained(path)
    return model


@pytest.mark.full
@pytest.mark.thorough_except(
    "llama-default",
    "llama tied-default",
    "llama biased-default",
    "llama head_dim-default",
    "qwen2 tied-default",
    "mistral-linear",
    "qwen2-llama3",
    "qwen3-yarn",
)
@pytest.mark.parametrize(("family", "rope"), CASES)
def test_logits_equal_transformers(tmp_path, family, rope) -> None:
    from tests.with_torch import torch

    model = reference(family, rope, tmp_path)
    tokens = np.random.default_rng(0).integers(0, 37, (2, 100))
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    target = Target.from_pretrained(tmp_path, dtype=np.float32)
    output, _ = target.forward(jnp.asarray(tokens))
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(output.logits, expected, atol=1e-4)
    target.save_pretrained(tmp_path / "again")
    assert config_json.read_config(CheckpointFiles(tmp_path / "again")) == target.config


@pytest.mark.full
@pytest.mark.thorough_except("plain", "windows")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sliding_window": 6, "windowed_layers": (1,)},
        *LAYERED.values(),
        LAYERED["sharing"] | {"qk_norm": True},
    ],
    ids=["plain", "windows", *LAYERED, "sharing, with norms"],
)
def test_pieces_with_a_cache_equal_the_whole(changes) -> None:
    target = tiny_target(**changes)
    tokens = np.random.default_rng(0).integers(0, 11, (2, 20))
    whole, _ = forward(target, tokens, taps=(0, 1, 2))
    cache = target.new_cache(2, 24)
    pieces = []
    for start, stop in ((0, 7), (7, 8), (8, 20)):
        output, cache = forward(target, tokens[:, start:stop], cache, taps=(0, 1, 2))
        pieces.append(output)
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *pieces)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), joined, whole)


@pytest.mark.full
def test_rejected_entries_are_never_seen() -> None:
    """Two drafts follow one prefix, and the first is rejected: rollback is only a length."""
    target = tiny_target()
    prefix, wrong, right = jnp.array([[1, 2, 3]]), jnp.array([[9, 9, 9, 9]]), jnp.array([[4, 5]])
    _, cache = forward(target, prefix, target.new_cache(1, 16))
    _, longer = forward(target, wrong, cache)
    cache = longer.replace(length=cache.length)
    output, _ = forward(target, right, cache)
    whole, _ = forward(target, jnp.concatenate([prefix, right], axis=1))
    np.testing.assert_allclose(output.logits, whole.logits[:, 3:], atol=1e-4)


def test_taps_are_what_enters_a_layer() -> None:
    target = tiny_target()
    output, _ = forward(target, jnp.array([[1, 2, 3]]), taps=(0, 1))
    np.testing.assert_array_equal(
        output.taps[:, :, 0], target.params["embed"][jnp.array([[1, 2, 3]])]
    )
    shorter, _ = forward(target, jnp.array([[1, 2, 3]]), taps=(1,), layers=(0, 1))
    np.testing.assert_array_equal(output.taps[:, :, 1], shorter.taps[:, :, 0])


@pytest.mark.full
def test_a_mask_decides_what_tokens_of_a_call_see() -> None:
    """Two branches below one root, side by side, equal each branch alone."""
    target = tiny_target()
    mask = jnp.array([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]], bool)
    positions = jnp.array([[0, 1, 1, 2]])
    tree, _ = forward(
        target, jnp.array([[5, 6, 7, 8]]), target.new_cache(1, 8), positions=positions, mask=mask
    )
    left_branch, _ = forward(target, jnp.array([[5, 6]]))
    right_branch, _ = forward(target, jnp.array([[5, 7, 8]]))
    np.testing.assert_allclose(tree.logits[:, 1], left_branch.logits[:, 1], atol=1e-4)
    np.testing.assert_allclose(tree.logits[:, 2:], right_branch.logits[:, 1:], atol=1e-4)


# --- layers that differ ---------------------------------------------------------------------------


def slow_logits(target: Target, tokens: np.ndarray) -> np.ndarray:
    """Return the logits ``[n, V]`` of one text, in float64, head by head and query by query.

    Every layer has its sizes. A layer that reads another layer's entries has the keys and values
    that this other layer computes from the states that enter it.
    """
    config = target.config
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), target.params)
    x, entries = params["embed"][tokens], []

    def norm(x, weight):
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.norm_eps) * weight

    def rotated(x, theta):  # [n, d]
        half = x.shape[-1] // 2
        angles = np.arange(len(x))[:, None] / theta ** (np.arange(half) / half)
        first_half, second_half = x[:, :half], x[:, half:]
        return np.concatenate(
            [
                first_half * np.cos(angles) - second_half * np.sin(angles),
                second_half * np.cos(angles) + first_half * np.sin(angles),
            ],
            1,
        )

    for index, (layer, sizes) in enumerate(zip(params["layers"], config.layers, strict=True)):
        heads, kv_heads = (
            sizes.num_heads or config.num_heads,
            sizes.num_kv_heads or config.num_kv_heads,
        )
        size, theta = sizes.head_dim or config.head_dim, (sizes.rope or config.rope).theta
        h = norm(x, layer["input_norm"])
        if sizes.entries_of is None:
            k, v = ((h @ layer[name]).reshape(len(h), kv_heads, size) for name in "kv")
            entries.append(
                (np.stack([rotated(k[:, head], theta) for head in range(kv_heads)], axis=1), v)
            )
        else:
            entries.append(entries[sizes.entries_of])
        k, v = entries[index]
        q, attended = (h @ layer["q"]).reshape(len(h), heads, size), np.zeros((len(h), heads, size))
        for head in range(heads):
            query, kv_head = rotated(q[:, head], theta), head * kv_heads // heads
            for i in range(len(h)):
                first = (
                    max(0, i + 1 - config.sliding_window) if index in config.windowed_layers else 0
                )
                scores = k[first : i + 1, kv_head] @ query[i] / size**0.5
                weights = np.exp(scores - scores.max())
                attended[i, head] = weights @ v[first : i + 1, kv_head] / weights.sum()
        x = x + attended.reshape(len(h), -1) @ layer["o"]
        h = norm(x, layer["post_norm"])
        gate = h @ layer["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer["up"])) @ layer["down"]
    return norm(x, params["norm"]) @ params["lm_head"]


@pytest.mark.parametrize("name", LAYERED)
def test_each_layer_has_its_own_sizes_and_may_read_anothers_entries(name) -> None:
    target = tiny_target(**LAYERED[name])
    tokens = np.random.default_rng(0).integers(0, 11, 20)
    output, _ = forward(target, tokens[None])
    assert np.abs(output.logits).max() > 1
    np.testing.assert_allclose(output.logits[0], slow_logits(target, tokens), atol=1e-4)


def test_a_layer_that_reads_anothers_entries_has_and_remembers_none() -> None:
    target = tiny_target(**LAYERED["sharing"])
    assert [sorted({"k", "v"} & layer.keys()) for layer in target.params["layers"]] == [
        ["k", "v"],
        ["k", "v"],
        [],
        [],
    ]
    cache = target.new_cache(2, 16)
    assert [[part.shape for part in entry] for entry in cache.layers] == [
        [(2, 2, 16, 4)] * 2,
        [(2, 1, 16, 8)] * 2,
        [],
        [],
    ]
    assert [target.config.entries_of(layer) for layer in range(4)] == [0, 1, 0, 1]
    assert [target.config.entry_size(layer) for layer in range(4)] == [16, 16, 0, 0]
    assert cache.of_layers((1, 2)).layers == (cache.layers[1], ())
    with pytest.raises(
        InputError, match="begins with layer 1, and its layer 2 reads the entries of layer 0"
    ):
        target.score(jnp.array([[1, 2]]), layers=(1, 4))


LAYER_FAULTS = [
    ({"layers": (Layer(),)}, r"layers: 1 of num_layers=2 are described: describe all or none"),
    (
        {"layers": (Layer(num_heads=3), Layer())},
        r"layers\[0\]: num_heads=3 is not a multiple of num_kv_heads=2",
    ),
    ({"layers": (Layer(), Layer(head_dim=3))}, r"layers\[1\]: head_dim=3: must be even"),
    (
        {"layers": (Layer(entries_of=1), Layer())},
        r"layers\[0\]: entries_of=1: must be an earlier layer that has entries of its own",
    ),
    (
        {"layers": (Layer(), Layer(entries_of=-1))},
        r"layers\[1\]: entries_of=-1: must be an earlier layer",
    ),
    (
        {"num_layers": 3, "layers": (Layer(), Layer(entries_of=0), Layer(entries_of=1))},
        r"layers\[2\]: entries_of=1: must be an earlier layer",
    ),
    (
        {"layers": (Layer(head_dim=8), Layer(entries_of=0))},
        r"layers\[1\]: entries_of=0, which has 2 key/value heads of 8, but this layer needs 2 of 4",
    ),
    (
        {"mla": MLA(8, 4, 4, 4), "num_kv_heads": 4, "layers": (Layer(), Layer())},
        "all layers are alike with latent attention",
    ),
]


@pytest.mark.parametrize(("changes", "message"), LAYER_FAULTS)
def test_layers_that_cannot_be_are_refused(changes, message) -> None:
    with pytest.raises(InputError, match=message):
        tiny_config(**changes)


def test_a_configuration_by_layer() -> None:
    config = tiny_config(**LAYERED["differing"])
    assert isinstance(hash(config), int)
    assert config.of_layer(0) == tiny_config(num_layers=3, sliding_window=5, windowed_layers=(0,))
    layer = config.of_layer(1)
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim) == (2, 1, 8)
    assert (layer.rope, layer.layers) == (Rope(theta=300.0), ())
    assert config.first(2).layers == config.layers[:2] and config.first(2).num_layers == 2
    uniform = tiny_config()
    assert uniform.of_layer(1) is uniform
    with pytest.raises(CheckpointError, match=r"a llama checkpoint cannot express this"):
        config_json.format_config(config, "float32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"gated_values": True, "gated_attention": True},
            "^gated_values: cannot be combined with gated_attention$",
        ),
        (
            {"gated_heads": True, "num_kv_heads": 4, "mla": MLA(6, 6, 4, 8)},
            "^gated_heads: cannot be combined with latent attention",
        ),
        (
            {"qk_unit_norm_in_rope_layers": True, "qk_unit_norm_in_all_layers": True},
            "^qk_unit_norm_in_rope_layers: cannot be combined with qk_unit_norm_in_all_layers",
        ),
    ],
)
def test_switches_that_exclude_each_other_are_named(changes, message) -> None:
    with pytest.raises(InputError, match=message):
        tiny_config(**changes)
