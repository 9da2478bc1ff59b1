"""Hugging Face checkpoints: read them with every check before the first byte of weights, and write them.

Everything here runs on the host at the edge of the program, so every failure is a `CheckpointError` that names the file or
the field, its value and the mend.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specjax.assets import embedded
from specjax.errors import InputError
from specjax.models import params as declarations
from specjax.models.config import ModelConfig, Rope
from specjax.models.params import Param, Params

_ARCHITECTURES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SUPPORTED = tuple(_ARCHITECTURES)
"""The model types that can be loaded."""
_ROPE_KEYS = {  # Hugging Face's name -> ours
    "factor": "factor",
    "original_max_position_embeddings": "original_max_positions",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
}
_ROPE_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


class CheckpointError(InputError):
    """A checkpoint that cannot be used, and what to do about it."""


def locate(path: str | Path, weights: bool = True) -> Path:
    """The local directory of a checkpoint: ``path`` itself, or the hub's snapshot of the repository of that id.

    "embedded" is the target that comes along, "embedded:draft" its draft model.

    Without ``weights``, the hub is asked for the small files only: enough to check a checkpoint before it is fetched.

    Raises:
        CheckpointError: it is neither.
        InputError: there is no such embedded checkpoint.
    """
    kind, _, which = str(path).partition(":")
    if kind == "embedded":
        return embedded(which or "target")
    directory = Path(os.path.expanduser(path))  # os.path, because pathlib raises for users that do not exist, and for
    if os.path.isdir(directory):  # names that are too long
        return directory
    text = str(path)
    if directory.is_absolute() or text.startswith(".") or text.count("/") != 1:
        raise CheckpointError(f"{text!r} is not a directory, nor a hub id of the form owner/name")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.model", "*.jinja", "*.txt"] + ["*.safetensors"] * weights
    try:  # "consolidated" is a second copy of the weights, in another layout
        return Path(snapshot_download(text, allow_patterns=patterns, ignore_patterns=["consolidated*", "original/*"]))
    except Exception as error:  # the hub's client raises a dozen unrelated types
        raise CheckpointError(
            f"{text!r} is not a directory here, and the hub did not give it ({type(error).__name__}): "
            "check the spelling, the network, and for gated models the login"
        ) from error


# --- config.json -----------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `CheckpointError` when it is missing or is not one."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: give a directory in Hugging Face format") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): download it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content


def read_config(directory: Path) -> ModelConfig:
    """Read config.json (and the end-of-sequence ids of generation_config.json).

    Raises:
        CheckpointError: the model type, RoPE type, activation or attention layout is not supported, or a field is missing.
    """
    path = directory / "config.json"
    raw = read_json(path)
    generation = directory / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    return parse_config(raw if eos is None else raw | {"eos_token_id": eos}, str(path))


def parse_config(raw: dict[str, Any], source: str = "config.json") -> ModelConfig:
    """`ModelConfig` of the fields of a config.json; ``source`` names it in errors. Raises `CheckpointError`."""
    model_type = raw.get("model_type")
    if model_type not in SUPPORTED:
        raise CheckpointError(f"{source}: model_type={model_type!r} is not supported; supported are {', '.join(SUPPORTED)}")
    required = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    if missing := [name for name in required if not isinstance(raw.get(name), int)]:
        raise CheckpointError(f"{source}: {', '.join(missing)} missing or not a whole number")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise CheckpointError(f"{source}: hidden_act={raw['hidden_act']!r} is not supported; these families use 'silu'")
    if (partial := raw.get("partial_rotary_factor")) not in (None, 1.0):
        raise CheckpointError(f"{source}: partial_rotary_factor={partial} is not supported; it must be 1.0")
    if "quantization_config" in raw:
        raise CheckpointError(f"{source}: quantization_config is not supported; use the unquantised checkpoint")
    _refuse_sliding_window(raw, model_type, source)

    heads = raw["num_attention_heads"]
    rope = _parse_rope(raw, source)
    max_positions = _max_positions(raw, model_type)
    if rope.kind == "yarn" and rope.original_max_positions is not None:
        # Qwen's model cards turn YaRN on without raising max_position_embeddings.
        max_positions = max(max_positions, int(rope.factor * rope.original_max_positions))
    attention_bias = bool(raw.get("attention_bias", False)) and model_type in ("llama", "qwen3")
    eos = raw.get("eos_token_id")
    try:
        return ModelConfig(
            model_type=model_type,
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or (128 if model_type == "qwen3" else raw["hidden_size"] // heads),
            max_positions=max_positions,
            norm_eps=raw.get("rms_norm_eps", 1e-6),
            rope=rope,
            tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=model_type == "qwen2" or attention_bias,
            output_bias=attention_bias,
            mlp_bias=bool(raw.get("mlp_bias", False)) and model_type == "llama",
            qk_norm=model_type == "qwen3",
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
        )
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from None


def _max_positions(raw: dict[str, Any], model_type: str) -> int:
    defaults = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}  # transformers' own
    return raw.get("max_position_embeddings") or defaults[model_type]


def _refuse_sliding_window(raw: dict[str, Any], model_type: str, source: str) -> None:
    """Refuse attention that forgets: a rejected draft would already have pushed live entries out of the window."""
    window = raw.get("sliding_window", 4096 if model_type == "mistral" else None)
    layer_types = set(raw.get("layer_types") or ["full_attention"])
    windowed = bool(raw.get("use_sliding_window", False)) if model_type.startswith("qwen") else window is not None
    if layer_types != {"full_attention"}:
        windowed = True
    elif window is not None and window >= _max_positions(raw, model_type):
        windowed = False
    if windowed:
        raise CheckpointError(
            f"{source}: sliding_window={window} with layer types {', '.join(sorted(layer_types))} is not supported: a "
            "windowed cache cannot be rolled back. If the context you need is shorter than the window, set "
            '"sliding_window": null (and "use_sliding_window": false) in config.json'
        )


def _parse_rope(raw: dict[str, Any], source: str) -> Rope:
    """Both layouts: ``rope_theta`` with ``rope_scaling``, and the ``rope_parameters`` of transformers 5."""
    scaling: dict[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _ROPE_REQUIRED:
        raise CheckpointError(f"{source}: rope type {kind!r} is not supported; supported are {', '.join(_ROPE_REQUIRED)}")
    if missing := [name for name in _ROPE_REQUIRED[kind] if scaling.get(name) is None]:
        raise CheckpointError(f"{source}: rope type {kind!r} needs {', '.join(missing)}")
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if kind == "default":
        return Rope(theta=theta)
    fields = {ours: scaling[name] for name, ours in _ROPE_KEYS.items() if scaling.get(name) is not None}
    fields.setdefault("original_max_positions", raw.get("max_position_embeddings", 2048))
    return Rope(theta=theta, kind=kind, **fields)


def format_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The fields of config.json; `parse_config` reads them back to an equal `ModelConfig`."""
    rope: dict[str, Any] = {"rope_type": config.rope.kind, "rope_theta": config.rope.theta}
    if config.rope.kind != "default":
        rope |= {name: value for name, ours in _ROPE_KEYS.items() if (value := getattr(config.rope, ours)) is not None}
    raw = {
        "architectures": [_ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        # Both spellings: readers before transformers 5 know only the first two.
        "rope_theta": config.rope.theta,
        "rope_scaling": None if config.rope.kind == "default" else {k: v for k, v in rope.items() if k != "rope_theta"},
        "rope_parameters": rope,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) if len(config.eos_token_ids) != 1 else config.eos_token_ids[0],
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if config.model_type in ("llama", "qwen3"):
        raw["attention_bias"] = config.qkv_bias
    if config.model_type == "llama":
        raw["mlp_bias"] = config.mlp_bias
    if config.model_type == "mistral":
        raw["sliding_window"] = None
    return raw


# --- weights ---------------------------------------------------------------------------------------------------------


def load_params(directory: Path, config: ModelConfig, dtype: Any, mesh: Mesh | None = None) -> Params:
    """Read the params in ``dtype``; with a mesh, each device reads only its own slice of every tensor.

    Raises:
        CheckpointError: a file is missing or truncated, a tensor is missing, left over, or of another shape than
            config.json says. All of it is checked before any weight is read.
    """
    declared = declarations.declare(config)
    with _open_tensors(directory) as tensors:
        _check_tensors(tensors, jax.tree.leaves(declared), config, directory)

        def read(param: Param, part: tuple[slice, ...]) -> np.ndarray:
            stored = tensors[param.name]
            values = stored[part[::-1]].T if param.transposed else stored[part]
            return np.ascontiguousarray(values, dtype)

        if mesh is None:
            return jax.tree.map(lambda param: jax.numpy.asarray(read(param, (slice(None),) * len(param.shape))), declared)

        def load(param: Param, sharding: jax.sharding.Sharding) -> jax.Array:
            return jax.make_array_from_callback(param.shape, sharding, lambda part: read(param, part or ()))

        return jax.tree.map(load, declared, declarations.shardings(config, mesh))


@contextmanager
def _open_tensors(directory: Path) -> Iterator[dict[str, Any]]:
    """Lazy slices of all tensors of a checkpoint, by name, from one file or from the shards that an index lists."""
    index = directory / "model.safetensors.index.json"
    files = sorted(set(read_json(index).get("weight_map", {}).values())) if index.exists() else ["model.safetensors"]
    if missing := [name for name in files if not (directory / name).is_file()]:
        raise CheckpointError(f"{directory} lacks {', '.join(missing)}: download the checkpoint again, in safetensors format")
    tensors: dict[str, Any] = {}
    handles = []
    try:
        for name in files:
            try:
                handle = safe_open(directory / name, framework="numpy")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{directory / name} is truncated or damaged ({error}): download it again") from None
            handles.append(handle)
            tensors |= {key: handle.get_slice(key) for key in handle.keys()}  # noqa: SIM118 - not a dict
        yield tensors
    finally:
        for handle in handles:
            handle.__exit__(None, None, None)


def _check_tensors(tensors: dict[str, Any], declared: list[Param], config: ModelConfig, directory: Path) -> None:
    names = {param.name for param in declared}
    if missing := sorted(names - tensors.keys()):
        raise CheckpointError(f"{directory}: {len(missing)} tensors are missing, the first {missing[0]!r}: is a shard lost?")
    for param in declared:
        shape = tuple(tensors[param.name].get_shape())
        if shape != param.stored_shape:
            raise CheckpointError(f"{directory}: {param.name} has shape {shape}, but config.json says {param.stored_shape}")
    ignored = {"lm_head.weight"} if config.tie_embeddings else set()
    extra = sorted(n for n in tensors.keys() - names - ignored if not n.endswith("rotary_emb.inv_freq"))
    if extra:
        raise CheckpointError(
            f"{directory}: {extra[0]!r} is no part of a {config.model_type} model with this config.json "
            f"({len(extra)} such tensors); leaving it out would change the outputs"
        )


def save(directory: Path, config: ModelConfig, params: Params, dtype: Any = None) -> None:
    """Write config.json, generation_config.json and model.safetensors; other files there stay.

    Raises:
        CheckpointError: ``directory`` holds a sharded checkpoint, whose index would hide the new weights.
    """
    if (directory / "model.safetensors.index.json").exists():
        raise CheckpointError(f"{directory} holds a sharded checkpoint: save to another directory")
    declared = jax.tree.leaves(declarations.declare(config))

    def stored(param: Param, leaf: jax.Array) -> np.ndarray:
        array = np.asarray(jax.device_get(leaf)).astype(dtype or leaf.dtype, copy=False)
        return np.ascontiguousarray(array.T if param.transposed else array)

    arrays = {param.name: stored(param, leaf) for param, leaf in zip(declared, jax.tree.leaves(params), strict=True)}
    content = format_config(config, arrays[declared[0].name].dtype.name)
    generation = {name: content[name] for name in ("bos_token_id", "eos_token_id")}
    with replacing(directory) as scratch:
        save_file(arrays, scratch / "model.safetensors", metadata={"format": "pt"})
        (scratch / "model.safetensors").chmod(0o644)  # safetensors makes it private to its owner
        (scratch / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        (scratch / "config.json").write_text(json.dumps(content, indent=2) + "\n")


@contextmanager
def replacing(directory: Path) -> Iterator[Path]:
    """A scratch directory that becomes ``directory`` when the block ends well, and vanishes when it does not.

    Where ``directory`` exists its files are replaced one by one, config.json last: a reader that is let in between sees
    the old configuration with new weights, and the check of shapes catches it.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}-"))
    try:
        yield scratch
        if directory.exists():
            for file in sorted(scratch.iterdir(), key=lambda file: (file.name == "config.json", file.name)):
                file.replace(directory / file.name)
        else:
            scratch.chmod(0o755)
            scratch.rename(directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
