"""Hugging Face checkpoints of whole models: their weights are read and written, after what their config.json says.

Every failure is a `CheckpointError` that names the file or the field, its value and what to do. `specjax.models.config_json`
reads and writes config.json; the tensors themselves are read and written by `specjax.models.checkpoint`.
"""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from specjax import sharding
from specjax.models import checkpoint, config_json, fingerprint
from specjax.models import params as declarations
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.config import ModelConfig
from specjax.models.families import FAMILIES
from specjax.models.fields import CheckpointError
from specjax.models.params import Param, Params
from specjax.models.parts import Layers
from specjax.models.quantization import Form, saved, schemes
from specjax.models.quantization.schemes import Weights
from specjax.progress import say


def with_stored_head(files: CheckpointFiles, config: ModelConfig) -> ModelConfig:
    """Return ``config``, with a head of its own where the checkpoint says that the embedding is the head, and holds another.

    transformers does the same. Such files are written by training that unties the two and leaves ``tie_word_embeddings`` true.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    if not config.tie_embeddings:
        return config
    stored = files.shapes
    embedding, head = config_json.family_of(files.raw, files.file).embedding_and_head(stored)
    if head not in stored or embedding not in stored or checkpoint.have_same_values(files, embedding, head):
        return config
    say(
        f"{files.file}: tie_word_embeddings is true, but {head!r} differs from the embedding: the stored head is used, as in "
        "transformers; write false to be clear",
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
    """Read the params of all that a checkpoint has.

    Args:
        files: of the checkpoint.
        config: its configuration.
        dtype: of the params.
        mesh: each of its devices reads only its own slice of every tensor; None is the default device.
        weights: which of the params are quantized, as in `Target.from_pretrained`.
        saved_part: the layers of a checkpoint that was saved as a part of a target; None: it is whole.

    Raises:
        CheckpointError: a file is missing or damaged, or the tensors are not those that config.json says. All of it is
            checked before any weight is read.
    """
    declared, values = _reader(files, config, dtype, saved_part, mesh, weights)
    return checkpoint.place(declared, values, mesh, config.axis_units)


def load_part(
    files: CheckpointFiles,
    config: ModelConfig,
    dtype: DTypeLike,
    layers: Layers,
    mesh: Mesh | None = None,
    weights: Weights = schemes.AS_STORED,
) -> tuple[Params, str]:
    """Read the params of a part of a whole checkpoint, and the fingerprint of the whole, for which a few rows are read.

    Args:
        files: of the whole checkpoint, all of which is checked.
        config: its configuration.
        dtype: of the params.
        layers: which the part has.
        mesh: as in `load_params`.
        weights: likewise.

    Raises:
        CheckpointError: as `load_params`.
    """
    declared, values = _reader(files, config, dtype, None, mesh, weights)
    part = _with_names(declarations.declare(config, layers), declared)
    of = fingerprint.of_stored(declared, values, config)
    return checkpoint.place(part, values, mesh, config.axis_units), of


def _reader(
    files: CheckpointFiles, config: ModelConfig, dtype: DTypeLike, layers: Layers | None, mesh: Mesh | None, weights: Weights
) -> tuple[Params, checkpoint.Values]:
    """The declarations of a checkpoint, of a saved part with its ``layers``, and what reads its tensors."""
    family, stored = config_json.family_of(files.raw, files.file), files.shapes
    # Modules are numbered on from the last layer. The field has been checked by `config_json.parse_config`.
    modules = (files.raw.get("num_nextn_predict_layers") or 0) if layers is None and family.modules_follow else 0
    prefix = family.prefix_in(stored)
    _compare_sizes(files, config, prefix, modules, layers)
    left_over = [f"{prefix}layers.{config.num_layers + i}.*" for i in range(modules)]
    left_over += family.left_over(config)
    if family.nested is not None:
        left_over += [name for name in stored if not name.startswith((prefix, "lm_head"))]
    what = f"a {config.model_type} model with this config.json"
    ignored = ("*rotary_emb.inv_freq", *("lm_head.weight",) * config.tie_embeddings, *left_over)
    own = [name for name in stored if name.startswith(prefix)]  # modules beside it may have their experts otherwise
    declared = family.store(declarations.declare(config, layers), prefix, own)
    form_of = schemes.of_model(forms_for(files, weights, mesh), config.tie_embeddings)
    declared = schemes.declare(declared, form_of, mesh)
    return declared, checkpoint.reader(files, declared, dtype, what, ignored)


def forms_for(files: CheckpointFiles, weights: Weights, mesh: Mesh | None) -> schemes.FormOf:
    """Which parameters of a checkpoint are quantized, and how; ``weights`` as in `Target.from_pretrained`."""
    schemes.check_weights(weights)
    if weights not in (schemes.AS_STORED, schemes.FLOATS):
        return schemes.scheme_of(weights).form_of
    stored = files.forms if weights == schemes.AS_STORED else {}
    on_cpu = sharding.is_on_cpu(mesh)

    def form_of(param: Param) -> Form | None:
        form = schemes.common(map(stored.get, param.stored_names)) if param.is_product else None
        # A CPU has no numbers of FP8: it would convert all of them at every product.
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
    """Write config.json, generation_config.json and model.safetensors; other files there stay.

    Args:
        directory: is made where there is none.
        config: the model's configuration, that of the whole also for a part.
        params: of the model.
        dtype: of the file; by default that of the params.
        layers: that are there, of a part.
        part_of: the fingerprint of the whole, of a part.

    Raises:
        CheckpointError: ``directory`` holds a sharded checkpoint, whose index would hide the new weights; or ``dtype`` is none.
    """
    declared = FAMILIES[config.model_type].store(declarations.declare(config, layers))
    declared = schemes.declare_like(declared, params)
    content = config_json.format_config(config, checkpoint.float_type(dtype or params["norm"].dtype).name)
    if (quantization := saved.format_config(declared)) is not None:
        content["quantization_config"] = quantization
    generation = {name: content[name] for name in ("bos_token_id", "eos_token_id")}
    if layers is not None:
        content |= {"specjax_layers": list(layers), "specjax_part_of": part_of}
    files = {"generation_config.json": generation, "config.json": content}
    checkpoint.save(directory, declared, params, files, dtype)


def embedding_type(files: CheckpointFiles) -> np.dtype:
    """The data type in which a target's embedding is stored; bfloat16 where it is in FP8."""
    family = config_json.family_of(files.raw, files.file)
    return checkpoint.type_of(files, f"{family.prefix_in(files.tensor_names)}embed_tokens.weight")


def _with_names(part: Params, whole: Params) -> Params:
    """Of the declarations of a ``whole`` model those of a ``part`` of it."""
    layers = [theirs if ours else {} for ours, theirs in zip(part["layers"], whole["layers"], strict=True)]
    return {**whole, "layers": layers}


def _compare_sizes(files: CheckpointFiles, config: ModelConfig, prefix: str, modules: int, part: Layers | None) -> None:
    """Compare the main sizes in config.json with the shapes that are stored, before declarations are made after them; of a
    ``part`` of a target, with these layers."""
    field, last = ("num_hidden_layers", config.num_layers) if part is None else ("the end of specjax_layers", part[1])
    layer = re.compile(re.escape(f"{prefix}layers.") + r"([0-9]{1,9})\.")
    layers = max((int(match[1]) + 1 for match in map(layer.match, files.shapes) if match), default=0)
    if layers and not 0 <= layers - last <= modules:
        raise CheckpointError(
            f"{files.file}: {field}={last}, but the tensors are of {layers} layers: "
            "give the configuration and the weights of one model"
        )
    indices = (re.search(r"\.mlp\.experts\.([0-9]{1,9})\.", name) for name in files.shapes)
    experts = max((int(index[1]) + 1 for index in indices if index), default=0)
    if config.moe is not None and experts and experts != config.moe.num_experts:
        raise CheckpointError(
            f"{files.file}: it says {config.moe.num_experts} experts, but the tensors are of {experts}: "
            "give the configuration and the weights of one model"
        )
    embedding = files.shapes.get(f"{prefix}embed_tokens.weight", ())
    if len(embedding) == 2 and embedding != (config.vocab_size, config.hidden_size):
        raise CheckpointError(
            f"{files.file}: vocab_size={config.vocab_size} and hidden_size={config.hidden_size}, but the "
            f"embedding is {embedding[0]} x {embedding[1]}: give the configuration and the weights of one model"
        )
