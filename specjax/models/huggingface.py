"""Read and write the weights of whole models in Hugging Face checkpoints.

Every failure is a `CheckpointError` that names the file or the field, its value and the remedy.
`specjax.models.config_json` reads and writes config.json; `specjax.models.checkpoint` reads and
writes the tensors.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from specjax import sharding
from specjax.models import checkpoint, config_json, fingerprint
from specjax.models import params as declarations
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.config import ModelConfig
from specjax.models.families import FAMILIES, Family
from specjax.models.fields import CheckpointError
from specjax.models.params import Param, Params
from specjax.models.parts import Layers
from specjax.models.quantization import Form, published, saved, schemes
from specjax.models.quantization.schemes import Weights
from specjax.progress import say


def _family_of(files: CheckpointFiles) -> Family:
    """Return the family that the config.json of a checkpoint names."""
    return config_json.family_of(files.raw, files.file)


def with_stored_head(files: CheckpointFiles, config: ModelConfig) -> ModelConfig:
    """Return ``config`` with an untied head if the checkpoint's head differs from its embedding.

    The checkpoint may have ``tie_word_embeddings`` true all the same: training that unties the two
    and leaves the field writes such files. transformers uses the stored head, too.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    if not config.tie_embeddings:
        return config
    stored = files.shapes
    embedding, head = _family_of(files).embedding_and_head(stored)
    if (
        head not in stored
        or embedding not in stored
        or checkpoint.have_same_values(files, embedding, head)
    ):
        return config
    say(
        f"{files.file}: tie_word_embeddings is true, but {head!r} differs from the embedding: the"
        " stored head is used, as in transformers; write false to be clear",
        unasked=True,
    )
    return replace(config, tie_embeddings=False)


def load_params(
    files: CheckpointFiles,
    config: ModelConfig,
    dtype: DTypeLike,
    mesh: Mesh | None = None,
    weights: Weights = schemes.AS_STORED,
    saved_part: Layers | None = None,
) -> Params:
    """Read the params of all layers that a checkpoint has.

    Args:
        files: the files of the checkpoint.
        config: its configuration.
        dtype: the type of the params.
        mesh: the mesh, each device of which reads only its own slice of every tensor; None for the
            default device.
        weights: which of the params are quantized, as in `Target.from_pretrained`.
        saved_part: the layers of a checkpoint that was saved as a part of a target; None if it is
            whole.

    Raises:
        CheckpointError: A file is missing or damaged, or the tensors do not match config.json.
            Everything is checked before any weight is read.
    """
    declared, values = _reader(files, config, dtype, saved_part, mesh, weights)
    _say_conversions(files, declared, dtype)
    return checkpoint.place(declared, values, mesh, config.axis_units)


def declare_stored(
    files: CheckpointFiles,
    config: ModelConfig,
    mesh: Mesh | None = None,
    weights: Weights = schemes.AS_STORED,
) -> Params:
    """Return the declarations of the params that `load_params` would read from a checkpoint.

    No weights are read. The headers of their files say which matrices are quantized. If the files
    are not here, config.json says it.
    """
    try:
        has_headers = bool(files.weight_files)
    except CheckpointError:
        has_headers = False
    if has_headers:
        return _reader(files, config, jnp.float32, None, mesh, weights)[0]
    stated = published.stated_forms(files.quantization)
    form_of = schemes.of_model(forms_for(files, weights, mesh, stated), config.tie_embeddings)
    # config.json names modules as the files do.
    family = _family_of(files)
    declared = family.store(declarations.declare(config), family.prefix_in(files.tensor_names))
    return schemes.declare(declared, form_of, mesh)


def load_part(
    files: CheckpointFiles,
    config: ModelConfig,
    dtype: DTypeLike,
    layers: Layers,
    mesh: Mesh | None = None,
    weights: Weights = schemes.AS_STORED,
) -> tuple[Params, str]:
    """Read the params of a part of a whole checkpoint, and the fingerprint of the whole.

    For the fingerprint a few rows of the other layers are read.

    Args:
        files: the files of the whole checkpoint, all of which is checked.
        config: its configuration.
        dtype: the type of the params.
        layers: the layers of the part.
        mesh: as in `load_params`.
        weights: as in `load_params`.

    Raises:
        CheckpointError: See `load_params`.
    """
    declared, values = _reader(files, config, dtype, None, mesh, weights)
    part = _with_names(declarations.declare(config, layers), declared)
    _say_conversions(files, part, dtype)
    of = fingerprint.of_stored(declared, values, config)
    return checkpoint.place(part, values, mesh, config.axis_units), of


def _reader(
    files: CheckpointFiles,
    config: ModelConfig,
    dtype: DTypeLike,
    layers: Layers | None,
    mesh: Mesh | None,
    weights: Weights,
) -> tuple[Params, checkpoint.Values]:
    """Return the declarations of a checkpoint, and a reader of its tensors.

    ``layers`` are those of a saved part, or None.
    """
    family, stored = _family_of(files), files.shapes
    # MTP modules are numbered after the last layer. `config_json.parse_config` has checked the
    # field.
    if layers is None and family.modules_follow:
        modules = family.complete(files.raw).get("num_nextn_predict_layers") or 0
    else:
        modules = 0
    prefix = family.prefix_in(stored)
    embedding, _ = family.embedding_and_head(stored)
    _compare_sizes(files, config, prefix, embedding, modules, layers)
    left_over = [f"{prefix}layers.{config.num_layers + i}.*" for i in range(modules)]
    left_over += family.left_over(config)
    if family.nested is not None:
        left_over += [name for name in stored if not name.startswith((prefix, "lm_head"))]
    what = f"a {config.model_type} model with this config.json"
    ignored = ("*rotary_emb.inv_freq", *("lm_head.weight",) * config.tie_embeddings, *left_over)
    # Other modules may store experts differently.
    shapes = {name: shape for name, shape in stored.items() if name.startswith(prefix)}
    declared = family.store(declarations.declare(config, layers), prefix, shapes)
    form_of = schemes.of_model(forms_for(files, weights, mesh), config.tie_embeddings)
    declared = schemes.declare(declared, form_of, mesh)
    return declared, checkpoint.reader(files, declared, dtype, what, ignored)


def _say_conversions(files: CheckpointFiles, declared: Params, dtype: DTypeLike) -> None:
    """Say into what NVFP4 and ModelOpt's FP8 are converted, if they are."""
    line = published.conversions(files.tensors, declared, jnp.dtype(dtype), files.file)
    if line is not None:
        say(line, unasked=True)


def forms_for(
    files: CheckpointFiles,
    weights: Weights,
    mesh: Mesh | None,
    stated: Callable[[str], Form | None] | None = None,
) -> schemes.FormOf:
    """Return which parameters of a checkpoint are quantized, and how.

    ``weights`` is as in `Target.from_pretrained`. ``stated`` returns the stored form of a tensor;
    by default it is read from the files.
    """
    schemes.check_weights(weights)
    if weights not in (schemes.AS_STORED, schemes.FLOATS):
        return schemes.scheme_of(weights).form_of
    stored = (stated or files.forms.get) if weights == schemes.AS_STORED else {}.get
    on_cpu = sharding.is_on_cpu(mesh)

    def form_of(param: Param) -> Form | None:
        form = schemes.common(map(stored, param.stored_names)) if param.is_product else None
        # A CPU has no FP8 arithmetic: it would convert all weights at every product.
        return None if form is None or (form.kind == "fp8" and on_cpu) else form

    return form_of


def save(
    directory: Path,
    config: ModelConfig,
    params: Params,
    dtype: DTypeLike | None = None,
    *,
    layers: Layers | None = None,
    part_of: str = "",
) -> None:
    """Write config.json, generation_config.json and model.safetensors; keep other files.

    Args:
        directory: the directory, which is created if it does not exist.
        config: the model's configuration; that of the whole also for a part.
        params: the params of the model.
        dtype: the type of the file; by default that of the params.
        layers: the layers of a part.
        part_of: the fingerprint of the whole, for a part.

    Raises:
        CheckpointError: ``directory`` holds a sharded checkpoint, whose index would hide the new
            weights; or ``dtype`` is not a floating-point type.
    """
    declared = FAMILIES[config.model_type].store(declarations.declare(config, layers))
    declared = schemes.declare_like(declared, params)
    content = config_json.format_config(
        config, checkpoint.float_type(dtype or params["norm"].dtype).name
    )
    if (quantization := saved.format_config(declared)) is not None:
        content["quantization_config"] = quantization
    generation = {name: content[name] for name in ("bos_token_id", "eos_token_id")}
    if layers is not None:
        content |= {"specjax_layers": list(layers), "specjax_part_of": part_of}
    files = {"generation_config.json": generation, "config.json": content}
    checkpoint.save(directory, declared, params, files, dtype)


def embedding_type(files: CheckpointFiles) -> np.dtype:
    """Return the type in which a target's embedding is stored; bfloat16 for FP8."""
    family = _family_of(files)
    return checkpoint.type_of(files, family.embedding_and_head(files.tensor_names)[0])


def _with_names(part: Params, whole: Params) -> Params:
    """Return the declarations of a part, selected from those of the whole model."""
    layers = [
        layer if is_present else {}
        for is_present, layer in zip(part["layers"], whole["layers"], strict=True)
    ]
    return {**whole, "layers": layers}


def _compare_sizes(
    files: CheckpointFiles,
    config: ModelConfig,
    prefix: str,
    embedding: str,
    modules: int,
    part: Layers | None,
) -> None:
    """Compare the sizes in config.json with the stored shapes, before anything is declared.

    ``embedding`` is the name of its tensor. ``part`` are the layers of a saved part, or None.
    """
    field, last = (
        ("num_hidden_layers", config.num_layers)
        if part is None
        else ("the end of specjax_layers", part[1])
    )
    layer = re.compile(re.escape(f"{prefix}layers.") + r"([0-9]{1,9})\.")
    layers = max(
        (int(match[1]) + 1 for match in map(layer.match, files.shapes) if match), default=0
    )
    if layers and not 0 <= layers - last <= modules:
        raise CheckpointError(
            f"{files.file}: {field}={last}, but the tensors are of {layers} layers: "
            "give the configuration and the weights of one model"
        )
    # MTP modules and vision towers may have experts of their own.
    expert = re.compile(layer.pattern + r".*\bexperts\.([0-9]{1,9})\.")
    matches = filter(None, map(expert.match, files.shapes))
    experts = max((int(match[2]) + 1 for match in matches if int(match[1]) < last), default=0)
    if config.moe is not None and experts and experts != config.moe.num_experts:
        raise CheckpointError(
            f"{files.file}: it says {config.moe.num_experts} experts, but the tensors are of"
            f" {experts}: give the configuration and the weights of one model"
        )
    shape = files.shapes.get(embedding, ())
    if len(shape) == 2 and shape != (config.vocab_size, config.hidden_size):
        raise CheckpointError(
            f"{files.file}: vocab_size={config.vocab_size} and hidden_size={config.hidden_size},"
            f" but the embedding is {shape[0]} x {shape[1]}: give the configuration and the"
            " weights of one model"
        )
