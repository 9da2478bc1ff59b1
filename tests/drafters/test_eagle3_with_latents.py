"""Compare EAGLE-3.1 with latent attention, as Kimi K2.6's drafter, with a slow network in torch.

Its attention is transformers' module for DeepSeek-V3, with projections that read twice the width.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import specjax
from specjax import decoding
from specjax.decoding.options import GenerationOptions
from specjax.drafters import Eagle3
from specjax.drafters.registry import load_drafter
from specjax.drafts.shapes import Chain
from specjax.evaluation import conformance
from specjax.models.fields import CheckpointError
from specjax.sampling import Sampling
from tests.conftest import tiny_target

VOCABULARY, HIDDEN, EPSILON, DEPTH = 11, 16, 1e-6, 3
TEXT = np.random.default_rng(3).integers(0, VOCABULARY, 9)
CONFIG: dict[str, Any] = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 10,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": EPSILON,
    "rope_theta": 5e4,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "fc_norm": True,
    "norm_output": True,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]},
}


@dataclass
class Published:
    """The network of a drafter: transformers' attention, and all other tensors by name."""

    attention: Any
    rotary: Any
    tensors: dict[str, Any]

    @classmethod
    def make(cls) -> "Published":
        from transformers import DeepseekV3Config
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

        from tests.with_torch import torch

        names = ("fc_norm", "norm_output", "eagle_config", "architectures")
        fields = {name: value for name, value in CONFIG.items() if name not in names}
        config = DeepseekV3Config(**fields)
        config._attn_implementation = "eager"
        torch.manual_seed(0)
        attention = modeling.DeepseekV3Attention(config, 0)
        ranks = {"q_a_proj": 10, "kv_a_proj_with_mqa": 6 + 4}
        for name, rank in ranks.items():
            setattr(attention, name, torch.nn.Linear(2 * HIDDEN, rank, bias=False))
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        shapes = {f"layers.0.{name}.weight": (HIDDEN,) for name in norms}
        shapes |= {"norm.weight": (HIDDEN,), "fc.weight": (HIDDEN, 2 * HIDDEN)}
        shapes |= {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(2)}
        shapes |= {f"layers.0.mlp.{name}_proj.weight": (24, HIDDEN) for name in ("gate", "up")}
        shapes["layers.0.mlp.down_proj.weight"] = (HIDDEN, 24)
        shapes |= dict.fromkeys(("embed_tokens.weight", "lm_head.weight"), (VOCABULARY, HIDDEN))
        tensors = {
            name: torch.randn(shape) * 0.4 + (len(shape) == 1) for name, shape in shapes.items()
        }
        with torch.no_grad():
            for name, value in attention.named_parameters():
                value.add_(torch.randn_like(value) * 0.3)
                tensors[f"layers.0.self_attn.{name}"] = value.clone()
        return cls(attention.eval(), modeling.DeepseekV3RotaryEmbedding(config), tensors)

    def save(self, directory: Path, **changes: Any) -> None:
        fields = {name: value for name, value in (CONFIG | changes).items() if value is not None}
        (directory / "config.json").write_text(json.dumps(fields))
        tensors = {name: value.detach().numpy() for name, value in self.tensors.items()}
        save_file(tensors, directory / "model.safetensors")

    def norm(self, name: str, x: Any) -> Any:
        from tests.with_torch import torch

        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON)
        return scaled * self.tensors[f"{name}.weight"]

    def read(self, states: Any, tokens: Any) -> Any:
        """Return the states ``[1, T, H]`` after the last norm, which are fed back."""
        from tests.with_torch import torch

        weights, count, layer = self.tensors, tokens.shape[1], "layers.0."
        embedded = self.norm(f"{layer}input_layernorm", weights["embed_tokens.weight"][tokens])
        joined = torch.cat([embedded, self.norm(f"{layer}hidden_norm", states)], dim=-1)
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        turned = self.rotary(joined, torch.arange(count)[None])
        attended = self.attention(joined, position_embeddings=turned, attention_mask=mask)[0]
        x = states + attended
        entering = self.norm(f"{layer}post_attention_layernorm", x)
        gate, up, down = (
            weights[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up", "down")
        )
        x = x + (torch.nn.functional.silu(entering @ gate) * (entering @ up)) @ down
        return self.norm("norm", x)

    def expected(self, taps: np.ndarray, length: int, drafted: list[int]) -> np.ndarray:
        """Return the probabilities ``[D, V]`` of a chain after ``length`` tokens.

        ``taps [T, 2, H]`` are the inputs of the target's layers that are read.
        """
        from tests.with_torch import torch

        tokens, levels = TEXT.tolist()[:length], []
        with torch.no_grad():
            parts = torch.tensor(taps[None, : length - 1])
            normed = [self.norm(f"fc_norm.{i}", parts[:, :, i]) for i in range(2)]
            states = torch.cat(normed, dim=-1) @ self.tensors["fc.weight"].T
            for depth in range(len(drafted)):
                following = torch.tensor([tokens[1:] + drafted[:depth]])
                out = self.read(states, following)
                levels.append((out[0, -1] @ self.tensors["lm_head.weight"].T).softmax(-1).numpy())
                states = torch.cat([states, out[:, -1:]], dim=1)
        return np.stack(levels)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Return the network and the directory of its checkpoint."""
    directory, network = tmp_path_factory.mktemp("eagle"), Published.make()
    network.save(directory)
    return network, directory


@pytest.mark.full
def test_drafts_are_drawn_from_what_the_published_network_says(published) -> None:
    network, directory = published
    target = tiny_target(num_layers=3)
    drafter = Eagle3.from_pretrained(directory, draft=Chain(DEPTH), dtype=np.float32)
    assert drafter.taps(target.config) == (1, 2)
    lengths = np.array([2, 5, len(TEXT)])
    options = GenerationOptions(
        max_new_tokens=8, sampling=Sampling(temperature=1.0), eos_token_ids=()
    )
    drafter, state = decoding.start(target, drafter, np.tile(TEXT, (3, 1)), lengths, options)
    draft, _ = jax.jit(decoding.propose_step)(target, drafter, state)
    taps = np.asarray(target.forward(TEXT[None], taps=(1, 2))[0].taps)[0]
    for row, length in enumerate(lengths):
        tokens = np.asarray(draft.tokens)[row, 1:].tolist()
        reference = network.expected(taps, length, tokens)
        np.testing.assert_allclose(np.asarray(draft.q)[row, :DEPTH], reference, atol=2e-5)


@pytest.mark.full
def test_texts_do_not_depend_on_the_drafter(published) -> None:
    drafter = Eagle3.from_pretrained(published[1], draft=Chain(2), dtype=np.float32)
    conformance.check_coupled(tiny_target(num_layers=3), drafter, new_tokens=10)


@pytest.mark.thorough
def test_it_passes_conformance(published) -> None:
    drafter = Eagle3.from_pretrained(published[1], draft=Chain(2), dtype=np.float32)
    conformance.check(tiny_target(num_layers=3), drafter, new_tokens=10, come_and_go=False)


@pytest.mark.full
@pytest.mark.parametrize("layout", Eagle3.layouts)
def test_what_is_written_is_read_again(published, tmp_path, layout) -> None:
    drafter = Eagle3.from_pretrained(published[1], dtype=np.float32)
    drafter.save_pretrained(tmp_path, layout=layout)
    again = Eagle3.from_pretrained(tmp_path, dtype=np.float32)
    assert again.config == drafter.config
    jax.tree.map(np.testing.assert_array_equal, again.params, drafter.params)
    loaded = load_drafter(str(tmp_path), Chain(2), tiny_target(num_layers=3).config)
    assert isinstance(loaded, Eagle3)
    first = {"eagle3": "midlayer.", "speculators": "layers.0."}[layout]
    shape = load_file(tmp_path / "model.safetensors")[f"{first}self_attn.q_a_proj.weight"].shape
    assert shape == (10, 2 * HIDDEN)


@pytest.mark.full
def test_a_drafter_with_experts_is_refused_in_a_line(published, tmp_path) -> None:
    published[0].save(tmp_path, first_k_dense_replace=0)
    with pytest.raises(
        CheckpointError, match=r"^[^\n]*latent attention must have one layer, with an MLP[^\n]*$"
    ):
        Eagle3.from_pretrained(tmp_path)
    assert specjax.Eagle3.checkpoint_format.recognises(CONFIG, ())
    published[0].save(tmp_path)
    without = CONFIG | {"n_routed_experts": None, "num_experts_per_tok": None, "n_group": None}
    (tmp_path / "config.json").write_text(json.dumps(without))
    assert Eagle3.from_pretrained(tmp_path).config == Eagle3.from_pretrained(published[1]).config
