"""``specjax convert``: a trained drafter in the layout that another engine loads, a model with quantized weights, or what a
client needs of a target."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax import text
from specjax.drafters import Drafter, registry
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
    """Write a drafter in another layout, a model with quantized weights, or the part of a target with which a client drafts.
    Weights keep their data type, but for those that are quantized.

    Attributes:
        drafter: directory or hub id of the drafter, in any layout that ``generate`` reads; or METHOD:DIRECTORY, such as
            moa,tli=1:DIRECTORY.
        to: of EAGLE-3 "eagle3" for SGLang, SpecForge and SafeAILab's code, "speculators" for vLLM and the speculators package;
            of Mixture of Attentions "authors" for the authors' training code, "vllm" for their fork of vLLM, and "specjax".
        output: directory to write.
        target: directory or hub id of the target, for layouts whose config.json says what the drafter is for: "speculators"
            names it, and vLLM reads it there; "authors" repeats its configuration. With client_parts, the model to cut. With
            quantize and without a drafter, the model whose weights are quantized; a draft model is such a one too.
        client_parts: write no drafter, but what this one needs of the target at a client: embedding, final norm, head, the
            last layers where it runs them, and the tokenizer.
        quantize: "int8", "w8a8", "int4" or "fp8": quantized weights, as compressed-tensors has them, which vLLM reads. See
            `specjax.models.quantization.schemes`.
        calibrate: with quantize and without a drafter, text like that which the model will read, by which the quantized weights
            are chosen (GPTQ). Without it each becomes the nearest number. As ``data.source`` of a training: JSON lines with
            "text" or "messages", a text file, a directory, ``hf:OWNER/NAME``.
        vocabulary: with quantize, the embedding and the head become 8-bit numbers too. This library reads such a checkpoint;
            others may not.
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
    """``specjax convert``."""
    quantizes_target = bool(config.quantize) and not config.drafter
    if config.calibrate and not quantizes_target:
        mend = "needs quantize, such as --quantize int4" if not config.quantize else "is of targets: leave it out for a drafter"
        raise InputError(f"calibrate={config.calibrate!r}: {mend}")
    needed = ("target",) if quantizes_target else ("drafter", *("target",) * config.client_parts)
    for name in (*needed, "output"):
        if not getattr(config, name):
            raise InputError(f"{name}='': give a directory")
    if config.vocabulary and not config.quantize:
        raise InputError("vocabulary: needs quantize, such as --quantize int8")
    if config.quantize and config.client_parts:
        raise InputError("quantize: cut the client's parts of a target first, and give the directory of these as --target")
    if quantizes_target:
        if config.to != ConvertConfig.to:
            raise InputError(f"to={config.to!r}: is of drafters; a target is written as transformers has it: leave it out")
        write_quantized(config)
        return
    if config.client_parts:
        write_client_parts(config)
        return
    method, where, files = registry.find(config.drafter)
    kind = method.trained
    if config.quantize and kind is None and method.recognises is not None:
        raise InputError(f"drafter={config.drafter!r}: is a draft model, a whole one: give it as --target, and no --drafter")
    if kind is None or (len(kind.layouts) < 2 and not config.quantize):
        kinds = {one.trained for one in registry.METHODS.values() if one.trained is not None and len(one.trained.layouts) > 1}
        known = "; ".join(sorted(f"{one.title} ({', '.join(one.layouts)})" for one in kinds))
        what = "no drafter that is trained for its target" if kind is None else f"{kind.title}, which is written in one layout"
        raise InputError(f"drafter={config.drafter!r}: is {what}: there is nothing to convert; several have {known}")
    layout = next(iter(kind.layouts)) if len(kind.layouts) < 2 and config.to == ConvertConfig.to else config.to
    if layout not in kind.layouts:
        raise InputError(f"to={config.to!r}: {kind.title} is written as {', '.join(kind.layouts)}: give one of these")
    files = hub.open_checkpoint(files or where)
    if files.directory.resolve() == Path(config.output).resolve():
        raise InputError(f"output={config.output!r}: is the drafter itself; give another directory")
    dtype = checkpoint.stored_type(files)
    weights = scheme_of(config) if config.quantize else schemes.AS_STORED
    settings: dict[str, Any] = dict(method.settings)
    drafter = kind.from_pretrained(files, dtype=dtype, weights=weights, **settings)
    with waiting(f"writing {config.output}"):
        drafter.save_pretrained(config.output, layout=layout, target=config.target)
    said = [f"{config.output}: layout {layout}, {dtype}", config.quantize, kind.checkpoint_format.describe(drafter, layout)]
    print("; ".join(filter(None, said)))


# --- quantized weights --------------------------------------------------------------------------------------------------


def scheme_of(config: ConvertConfig) -> schemes.Scheme:
    """How weights are quantized. Raises `InputError`."""
    schemes.check_weights(config.quantize, (), "quantize")
    scheme = schemes.SCHEMES[config.quantize]
    return replace(scheme, vocabulary=Form("int8") if config.vocabulary else None)


def write_quantized(config: ConvertConfig) -> None:
    """Write the target with quantized weights, and its tokenizer. All of it or nothing."""
    scheme, output = scheme_of(config), Path(config.output)
    source = hub.open_checkpoint(config.target)
    checkpoint.check_writable(output)
    if source.directory.resolve() == output.resolve():
        raise InputError(f"output={config.output!r}: is the target itself; give another directory")
    dtype, how = huggingface.embedding_type(source), config.quantize
    if config.calibrate:
        tokens = calibration_tokens(config, source)
        wide = Target.from_pretrained(source, dtype=jnp.promote_types(dtype, default_dtype()), weights=schemes.FLOATS)
        target, how = calibrate(wide, scheme, tokens), f"{how}, calibrated on {tokens.size:,} tokens"
    else:
        target = Target.from_pretrained(source, dtype=dtype, weights=scheme)
    with waiting(f"writing {config.output}"), replacing(output) as scratch:
        target.save_pretrained(scratch, dtype=dtype)
        copy_beside(source.directory, scratch)
    size, whole = CheckpointFiles(output).weight_bytes, source.weight_bytes
    of_whole = f"{size / 1e6:,.1f} MB, {size / whole:.1%} of the {whole / 1e6:,.1f} MB of the target"
    print(f"{config.output}: {how}, {of_whole}")


def calibration_tokens(config: ConvertConfig, source: CheckpointFiles) -> np.ndarray:
    """``[W, T]`` windows of the text by which weights are quantized, in the tokens of the target ``source``.

    Raises:
        InputError: there is no such text, or too little of it.
    """
    argument = f"calibrate={config.calibrate!r}"
    shape, tokenizer = config_json.read_config(source), text.load_tokenizer(source.directory)
    with waiting(f"reading {config.calibrate}"):
        documents = read_documents(config.calibrate, "calibrate")
        if any(document.messages for document in documents) and not tokenizer.chat_template:
            raise InputError(f"{argument}: holds conversations, and the target has no chat template for them: give texts")
        texts = [text.encode(tokenizer, document.text) for document in documents if document.text]
        texts += [text.encode_chat(tokenizer, document.messages) for document in documents if document.messages]
    tokens = windows(texts)
    check_text(shape, scheme_of(config), tokens, argument)
    return tokens


def copy_beside(source: Path, output: Path) -> None:
    """Copy what lies beside a target's weights: its tokenizer, and how it is to generate."""
    if text.has_tokenizer(source):
        text.copy_tokenizer(source, output)
    if (source / "generation_config.json").is_file():
        shutil.copyfile(source / "generation_config.json", output / "generation_config.json")


# --- what a client needs of a target ---------------------------------------------------------------------------------


def write_client_parts(config: ConvertConfig) -> None:
    """Write the part of the target that the drafter needs, and its tokenizer. All of it or nothing."""
    output = Path(config.output)
    source = hub.open_checkpoint(config.target, weights=False)
    config_json.check_whole(source)
    checkpoint.check_writable(output)
    if source.directory.resolve() == output.resolve():
        raise InputError(f"output={config.output!r}: is the target itself; give another directory")
    shape = config_json.read_config(source)
    tokenizer = text.load_tokenizer(source.directory)
    drafter = registry.load_drafter(config.drafter, None, shape, tokenizer=tokenizer)
    layers = layers_for(config.drafter, drafter, shape)
    source = hub.open_checkpoint(source)
    part = Target.from_pretrained(source, dtype=huggingface.embedding_type(source), layers=layers)
    drafter.check(part)
    with waiting(f"writing {config.output}"), replacing(output) as scratch:
        part.save_pretrained(scratch)
        copy_beside(source.directory, scratch)
    size, whole = CheckpointFiles(output).weight_bytes, source.weight_bytes
    print(
        f"{config.output}: {parts.describe(part.held, shape.num_layers)}, {part.dtype}; "
        f"{size / 1e6:,.1f} MB, {size / whole:.1%} of the {whole / 1e6:,.1f} MB of the target; fingerprint {part.fingerprint()}"
    )


def layers_for(name: str, drafter: Drafter, target: ModelConfig) -> parts.Layers:
    """The layers of the target that the ``drafter`` of that ``name`` runs.

    Raises:
        InputError: it cannot draft without the target itself.
    """
    reads, count = drafter.reads(target), target.num_layers
    first = reads[0] if reads else count
    if not drafter.drafts_elsewhere or reads != tuple(range(first, count)):
        raise InputError(
            f"drafter={name!r}: needs the target itself while it drafts, which a client does not have: give Mixture of "
            "Attentions, EAGLE, EAGLE-3, a draft model or prompt lookup"
        )
    return first, count
