"""The embedded pair, inflated, in files that every server reads: Hugging Face's format and GGUF."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np

from specjax.assets import embedded
from specjax.demo import inflate
from specjax.drafters import Eagle3
from specjax.errors import InputError
from specjax.models import params
from specjax.models.transformer import Target

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def write_pair(directory: Path, sizes: tuple[int, int, int], positions: int) -> int:
    """Write the inflated target and its EAGLE-3 drafter, and return the target's parameter count.

    The files are ``target`` and ``eagle3`` in ``directory``, in float32. The drafter stays as small
    as it was trained. It reads the first hidden units of the inflated target, which are the small
    one's, and has the small embedding. So it is an ordinary checkpoint of a drafter that is
    narrower than its target.

    Args:
        directory: the directory, which is created if it does not exist.
        sizes: hidden size, MLP size and layers of the inflated target; 0 0 0 does not inflate it.
        positions: positions of both. The embedded pair was trained with 1,024; a benchmark may need
            longer texts of any quality.
    """
    small = Target.from_pretrained(embedded("target"), dtype=jnp.float32)
    target = small
    if any(sizes):
        target = inflate(
            small, hidden_size=sizes[0], intermediate_size=sizes[1], num_layers=sizes[2]
        )
    target = replace(target, config=replace(target.config, max_positions=positions))
    target.save_pretrained(directory / "target")
    for name in TOKENIZER_FILES:
        shutil.copy(Path(embedded("target")) / name, directory / "target" / name)
    # Requests say whether they are greedy. `transformers serve` draws only where this file says so.
    generation = {
        "bos_token_id": 0,
        "eos_token_id": 0,
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
    }
    (directory / "target" / "generation_config.json").write_text(json.dumps(generation))
    _widened(
        Eagle3.from_pretrained(embedded("eagle3"), dtype=jnp.float32), small, target
    ).save_pretrained(directory / "eagle3")
    return params.count(target.params)


def _widened(drafter: Eagle3, small: Target, target: Target) -> Eagle3:
    """Return the drafter of ``small`` for its inflated copy."""
    config, narrow, wide = drafter.config, small.config.hidden_size, target.config.hidden_size
    fc = np.asarray(drafter.params["fc"]).reshape(config.tap_count, narrow, -1)
    fc = np.pad(fc, ((0, 0), (0, wide - narrow), (0, 0))).reshape(config.tap_count * wide, -1)
    layer = replace(config.layer, max_positions=target.config.max_positions)
    return replace(
        drafter,
        params=drafter.params | {"fc": jnp.asarray(fc), "embed": small.params["embed"]},
        config=replace(config, layer=layer, target_hidden_size=wide, own_embedding=True),
    )


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""The tensors of a layer in a Hugging Face checkpoint, and their names in llama.cpp."""


def write_gguf(checkpoint: Path, path: Path, kind: Literal["f32", "q8_0"] = "f32") -> None:
    """Convert the Llama checkpoint of `write_pair` to GGUF, with matrices of a ``kind``.

    Raises:
        InputError: the package ``gguf`` is not installed.
    """
    try:
        import gguf
    except ImportError:
        raise InputError(
            "peers: llama.cpp needs the package gguf; install it (pip install gguf)"
        ) from None
    from safetensors.numpy import load_file

    config = json.loads((checkpoint / "config.json").read_text())
    weights = load_file(checkpoint / "model.safetensors")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("specjax benchmark")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(
        gguf.LlamaFileType.ALL_F32 if kind == "f32" else gguf.LlamaFileType.MOSTLY_Q8_0
    )
    _add_tokenizer(writer, checkpoint)

    def add_matrix(name: str, tensor: np.ndarray) -> None:
        if kind == "f32":
            writer.add_tensor(name, np.ascontiguousarray(tensor))
            return
        narrow = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(
            name, gguf.quants.quantize(np.ascontiguousarray(tensor), narrow), raw_dtype=narrow
        )

    add_matrix("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    for i in range(config["num_hidden_layers"]):
        for name, theirs in _GGUF_NAMES.items():
            tensor = weights[f"model.layers.{i}.{name}.weight"]
            if theirs in ("attn_q", "attn_k"):
                tensor = _interleaved(tensor, heads if theirs == "attn_q" else kv_heads)
            if tensor.ndim == 1:
                writer.add_tensor(f"blk.{i}.{theirs}.weight", tensor)
            else:
                add_matrix(f"blk.{i}.{theirs}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weights: np.ndarray, heads: int) -> np.ndarray:
    """Reorder ``[heads * D, H]``, as llama.cpp rotates adjacent rows.

    Rotary embeddings in Hugging Face checkpoints pair the halves of a head.
    """
    out, hidden = weights.shape
    return weights.reshape(heads, 2, out // heads // 2, hidden).swapaxes(1, 2).reshape(out, hidden)


def _add_tokenizer(writer: "gguf.GGUFWriter", checkpoint: Path) -> None:  # noqa: F821  # pyright: ignore
    import gguf

    model = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = [
        gguf.TokenType.CONTROL if token == "<|endoftext|>" else gguf.TokenType.NORMAL
        for token in tokens
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    )
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(True)
