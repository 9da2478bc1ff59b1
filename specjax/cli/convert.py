"""``specjax convert``: a trained drafter in the layout that another engine loads."""

from dataclasses import dataclass
from pathlib import Path

from specjax.drafters import registry
from specjax.errors import InputError
from specjax.models import checkpoint, huggingface
from specjax.progress import waiting


@dataclass(frozen=True)
class ConvertConfig:
    """Write a drafter in another layout. Weights keep their bits and their data type.

    Attributes:
        drafter: directory or hub id of the drafter, in any layout that ``generate`` reads; or METHOD:DIRECTORY.
        to: of EAGLE-3 "eagle3" for SGLang, SpecForge and SafeAILab's code, "speculators" for vLLM and the speculators package;
            of Mixture of Attentions "authors" for the authors' training code, "vllm" for their fork of vLLM, and "specjax".
        output: directory to write.
        target: directory or hub id of the target, for layouts whose config.json says what the drafter is for: "speculators"
            names it, and vLLM reads it there; "authors" repeats its configuration.
    """

    drafter: str = ""
    to: str = "speculators"
    output: str = ""
    target: str = ""


def run_convert(config: ConvertConfig) -> None:
    """``specjax convert``."""
    for name in ("drafter", "output"):
        if not getattr(config, name):
            raise InputError(f"{name}='': give a directory")
    method, where = registry.resolve(config.drafter)
    if (kind := method.trained) is None or len(kind.layouts) < 2:
        kinds = {one.trained for one in registry.METHODS.values() if one.trained is not None and len(one.trained.layouts) > 1}
        known = "; ".join(sorted(f"{one.title} ({', '.join(one.layouts)})" for one in kinds))
        what = "no drafter that is trained for its target" if kind is None else f"{kind.title}, which is written in one layout"
        raise InputError(f"drafter={config.drafter!r}: is {what}: there is nothing to convert; several have {known}")
    if config.to not in kind.layouts:
        raise InputError(f"to={config.to!r}: {kind.title} is written as {', '.join(kind.layouts)}: give one of these")
    directory = huggingface.locate(where)
    if directory.resolve() == Path(config.output).resolve():
        raise InputError(f"output={config.output!r}: is the drafter itself; give another directory")
    dtype = checkpoint.stored_type(directory)
    drafter = kind.from_pretrained(directory, dtype=dtype)
    with waiting(f"writing {config.output}"):
        drafter.save_pretrained(config.output, layout=config.to, target=config.target)
    print("; ".join(filter(None, [f"{config.output}: layout {config.to}, {dtype}", drafter.describe(config.to)])))
