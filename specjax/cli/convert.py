"""The command ``specjax convert``: convert drafters, quantize models, and extract client parts."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax import text
from specjax.drafters import Drafter, chat_variables, registry
from specjax.errors import InputError
from specjax.files import replacing
from specjax.models import checkpoint, config_json, hub, huggingface, parts
from specjax.models.calibration import calibrate, check_text, windows
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.config import ModelConfig
from specjax.models.quantization import Form, schemes
from specjax.models.transformer import Target, default_dtype
from specjax.progress import waiting
from specjax.training.documents import read_documents


@dataclass(frozen=True)
class ConvertConfig:
    """Convert a drafter to another layout, quantize a model, or extract what a client needs of it.

    Weights keep their data type, except those that are quantized.

    Attributes:
        drafter: the drafter, a directory or hub id in any layout that ``generate`` reads; or
            METHOD:DIRECTORY, such as moa,tli=1:DIRECTORY.
        to: layout to write. For EAGLE-3: "eagle3" for SGLang, SpecForge and SafeAILab's
            code, "speculators" for vLLM and the speculators package. For Mixture of
            Attentions: "authors" for the authors' training code, "vllm" for their fork of
            vLLM, "specjax".
        output: directory to write.
        target: the target, a directory or hub id. Layouts whose config.json refers to it need
            it: "speculators" has its name, from which vLLM loads it; "authors" has a copy of its
            configuration. With client_parts, the model to extract from. With quantize and no
            drafter, the model to quantize, which may be a draft model.
        client_parts: write, instead of a drafter, the parts of the target that this drafter needs
            on a client: the embedding, the final norm, the head, the last layers if it runs them,
            and the tokenizer.
        quantize: "int8", "w8a8", "int4" or "fp8" quantizes the weights, in the format of
            compressed-tensors, which vLLM reads. See `specjax.models.quantization.schemes`.
        calibrate: with quantize and no drafter, text similar to what the model will read, to choose
            the quantized weights by (GPTQ). Without it, each weight is rounded to the nearest
            value. As ``data.source`` of a training: JSON lines with "text" or "messages", a text
            file, a directory, ``hf:OWNER/NAME``.
        vocabulary: with quantize, also quantize the embedding and the head, to 8 bits. specjax
            reads such a checkpoint; other libraries may not.
    """

    drafter: str = ""
    to: str = "speculators"
    output: str = ""
    target: str = ""
    client_parts: bool = False
    quantize: str = ""
    calibrate: str = ""
    vocabulary: bool = False


def run_convert(config: ConvertConfig) -> None:
    """Run ``specjax convert``."""
    quantizes_target = bool(config.quantize) and not config.drafter
    if config.calibrate and not quantizes_target:
        mend = (
            "needs quantize, such as --quantize int4"
            if not config.quantize
            else "it is for targets: leave it out"
        )
        raise InputError(f"calibrate={config.calibrate!r}: {mend}")
    needed = ("target",) if quantizes_target else ("drafter", *("target",) * config.client_parts)
    for name in (*needed, "output"):
        if not getattr(config, name):
            raise InputError(f"{name}='': give a directory")
    if config.vocabulary and not config.quantize:
        raise InputError("vocabulary: it needs quantize, such as --quantize int8")
    if config.quantize and config.client_parts:
        raise InputError(
            "quantize: extract the client's parts of a target first, and give their directory as"
            " --target"
        )
    if quantizes_target:
        if config.to != ConvertConfig.to:
            raise InputError(
                f"to={config.to!r}: it is for drafters, and targets have the layout of"
                " transformers: leave it out"
            )
        write_quantized(config)
        return
    if config.client_parts:
        write_client_parts(config)
        return
    method, where, files = registry.find(config.drafter)
    kind = method.trained
    if config.quantize and kind is None and method.recognises is not None:
        raise InputError(
            f"drafter={config.drafter!r}: a draft model is a whole model: give it as --target,"
            " without --drafter"
        )
    if kind is None or (len(kind.layouts) < 2 and not config.quantize):
        kinds = {
            method.trained
            for method in registry.METHODS.values()
            if method.trained and len(method.trained.layouts) > 1
        }
        listed = "; ".join(sorted(f"{kind.title} ({', '.join(kind.layouts)})" for kind in kinds))
        what = (
            "not a drafter trained for its target"
            if kind is None
            else f"{kind.title}, which has a single layout"
        )
        raise InputError(
            f"drafter={config.drafter!r}: it is {what}, so there is nothing to convert; give one of"
            f" {listed}"
        )
    layout = (
        next(iter(kind.layouts))
        if len(kind.layouts) < 2 and config.to == ConvertConfig.to
        else config.to
    )
    if layout not in kind.layouts:
        raise InputError(
            f"to={config.to!r}: {kind.title} is written as {', '.join(kind.layouts)}: give one of"
            " these"
        )
    files = hub.open_checkpoint(files or where)
    if files.directory.resolve() == Path(config.output).resolve():
        raise InputError(
            f"output={config.output!r}: it is the drafter's directory; give another one"
        )
    dtype = checkpoint.stored_type(files)
    weights = scheme_of(config) if config.quantize else schemes.AS_STORED
    settings: dict[str, Any] = dict(method.settings)
    drafter = kind.from_pretrained(files, dtype=dtype, weights=weights, **settings)
    with waiting(f"writing {config.output}"):
        drafter.save_pretrained(config.output, layout=layout, target=config.target)
        chat_variables.copy(files, Path(config.output))
    parts_of_line = [f"{config.output}: layout {layout}, {dtype}", config.quantize]
    print(
        "; ".join(filter(None, [*parts_of_line, kind.checkpoint_format.describe(drafter, layout)]))
    )


# --- quantized weights ----------------------------------------------------------------------------


def scheme_of(config: ConvertConfig) -> schemes.Scheme:
    """Return the quantization scheme of the options.

    Raises:
        InputError: there is no such scheme.
    """
    schemes.check_weights(config.quantize, (), "quantize")
    scheme = schemes.SCHEMES[config.quantize]
    return replace(scheme, vocabulary=Form("int8") if config.vocabulary else None)


def write_quantized(config: ConvertConfig) -> None:
    """Write the quantized target and its tokenizer, completely or not at all."""
    scheme = scheme_of(config)
    source = hub.open_checkpoint(config.target)
    _check_output(source, config)
    dtype, how = huggingface.embedding_type(source), config.quantize
    if config.calibrate:
        tokens = calibration_tokens(config, source)
        wide = Target.from_pretrained(
            source, dtype=jnp.promote_types(dtype, default_dtype()), weights=schemes.FLOATS
        )
        target = calibrate(wide, scheme, tokens)
        how = f"{how}, calibrated on {tokens.size:,} tokens"
    else:
        target = Target.from_pretrained(source, dtype=dtype, weights=scheme)
    print(f"{config.output}: {how}, {_write(target, source, config.output, dtype=dtype)}")


def _check_output(source: CheckpointFiles, config: ConvertConfig) -> None:
    output = Path(config.output)
    checkpoint.check_writable(output)
    if source.directory.resolve() == output.resolve():
        raise InputError(f"output={config.output!r}: is the target itself; give another directory")


def _write(target: Target, source: CheckpointFiles, output: str, **options: Any) -> str:
    """Write a model and the files beside it, and return its size in words."""
    with waiting(f"writing {output}"), replacing(Path(output)) as scratch:
        target.save_pretrained(scratch, **options)
        copy_beside(source.directory, scratch)
        chat_variables.copy(source, scratch)
    size, whole = CheckpointFiles(Path(output)).weight_bytes, source.weight_bytes
    return f"{size / 1e6:,.1f} MB, {size / whole:.1%} of the {whole / 1e6:,.1f} MB of the target"


def calibration_tokens(config: ConvertConfig, source: CheckpointFiles) -> np.ndarray:
    """Return ``[W, T]`` windows of the calibration text, in the target's tokens.

    Raises:
        InputError: there is no such text, or too little of it.
    """
    argument = f"calibrate={config.calibrate!r}"
    shape, tokenizer = config_json.read_config(source), text.load_tokenizer(source.directory)
    with waiting(f"reading {config.calibrate}"):
        documents = read_documents(config.calibrate, "calibrate")
        if any(document.messages for document in documents) and not tokenizer.chat_template:
            raise InputError(
                f"{argument}: holds conversations, and the target has no chat template for them:"
                " give texts"
            )
        texts = [text.encode(tokenizer, document.text) for document in documents if document.text]
        texts += [
            text.encode_chat(tokenizer, document.messages)
            for document in documents
            if document.messages
        ]
    tokens = windows(texts)
    check_text(shape, scheme_of(config), tokens, argument)
    return tokens


def copy_beside(source: Path, output: Path) -> None:
    """Copy the files beside a target's weights: its tokenizer and its generation_config.json."""
    if text.has_tokenizer(source):
        text.copy_tokenizer(source, output)
    if (source / "generation_config.json").is_file():
        shutil.copyfile(source / "generation_config.json", output / "generation_config.json")


# --- what a client needs of a target --------------------------------------------------------------


def write_client_parts(config: ConvertConfig) -> None:
    """Write the parts of the target that the drafter needs, and the tokenizer, or nothing."""
    source = hub.open_checkpoint(config.target, weights=False)
    config_json.check_whole(source)
    _check_output(source, config)
    shape = config_json.read_config(source)
    tokenizer = text.load_tokenizer(source.directory)
    drafter = registry.load_drafter(config.drafter, None, shape, tokenizer=tokenizer)
    layers = layers_for(config.drafter, drafter, shape)
    source = hub.open_checkpoint(source)
    part = Target.from_pretrained(source, dtype=huggingface.embedding_type(source), layers=layers)
    drafter.check(part)
    size = _write(part, source, config.output)
    print(
        f"{config.output}: {parts.describe(part.held, shape.num_layers)}, {part.dtype}; {size};"
        f" fingerprint {part.fingerprint()}"
    )


def layers_for(name: str, drafter: Drafter, target: ModelConfig) -> parts.Layers:
    """Return the range of the target's layers that the drafter runs.

    Raises:
        InputError: the drafter needs the whole target to draft.
    """
    reads, count = drafter.reads(target), target.num_layers
    first = reads[0] if reads else count
    if not drafter.drafts_elsewhere or reads != tuple(range(first, count)):
        raise InputError(
            f"drafter={name!r}: needs the target itself while it drafts, which a client does not"
            " have: give Mixture of Attentions, EAGLE, EAGLE-3, a draft model or prompt lookup"
        )
    return first, count
