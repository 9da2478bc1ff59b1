"""``specjax convert``: an EAGLE-3 drafter in the layout that another engine loads."""

from dataclasses import dataclass
from pathlib import Path

from specjax.drafters import eagle3_checkpoint
from specjax.drafters.eagle3_checkpoint import Layout
from specjax.errors import InputError
from specjax.models import checkpoint, huggingface


@dataclass(frozen=True)
class ConvertConfig:
    """Write an EAGLE-3 drafter in another layout. Weights keep their bits and their data type.

    Attributes:
        drafter: directory or hub id of the drafter, in any layout that ``generate`` reads.
        to: "eagle3" for SGLang, SpecForge and SafeAILab's code; "speculators" for vLLM and the speculators package.
        output: directory to write.
        target: directory or hub id of the target, which config.json names in the layout "speculators"; vLLM reads from it what
            the drafter is for.
    """

    drafter: str = ""
    to: Layout = "speculators"
    output: str = ""
    target: str = ""


def run_convert(config: ConvertConfig) -> None:
    """``specjax convert``."""
    for name in ("drafter", "output"):
        if not getattr(config, name):
            raise InputError(f"{name}='': give a directory")
    directory = huggingface.locate(config.drafter)
    if directory.resolve() == Path(config.output).resolve():
        raise InputError(f"output={config.output!r}: is the drafter itself; give another directory")
    dtype = checkpoint.stored_type(directory)
    params, shape = eagle3_checkpoint.load(directory, dtype)
    eagle3_checkpoint.save(Path(config.output), params, shape, config.to, target=config.target)
    print(f"{config.output}: layout {config.to}, {dtype}; {eagle3_checkpoint.describe(shape, config.to)}")
