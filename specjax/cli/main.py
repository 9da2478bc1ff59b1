"""The command line: ``python -m specjax {demo,generate,train,regenerate,convert,evaluate,plan}``."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import tyro

from specjax.cli.convert import ConvertConfig, run_convert
from specjax.cli.demo import DemoConfig, run_demo
from specjax.cli.evaluate import EvaluateConfig, run_evaluate
from specjax.cli.generate import GenerateConfig, run_generate
from specjax.cli.plan import run_plan
from specjax.cli.plan_options import PlanConfig
from specjax.cli.regenerate import RegenerateConfig, run_regenerate
from specjax.cli.train import run_train
from specjax.config import load_yaml
from specjax.errors import InputError
from specjax.training.config import TrainConfig


@dataclass(frozen=True)
class Command:
    """What the first word of a command line may be.

    Attributes:
        about: what it does, in one line.
        config: its options, a dataclass.
        run: does it.
    """

    about: str
    config: type
    run: Callable[[Any], None]


COMMANDS: dict[str, Command] = {
    "demo": Command("show the embedded pair at work: text with accepted tokens in colour, and a table", DemoConfig, run_demo),
    "generate": Command("generate text from a model, with a drafter or without", GenerateConfig, run_generate),
    "train": Command("train a model or a drafter, as a configuration file says", TrainConfig, run_train),
    "regenerate": Command(
        "write a data set anew in the target's own words, to train a drafter on", RegenerateConfig, run_regenerate
    ),
    "convert": Command("write an EAGLE-3 drafter in the layout of SGLang or of vLLM", ConvertConfig, run_convert),
    "evaluate": Command("measure drafters on questions, plain decoding beside them", EvaluateConfig, run_evaluate),
    "plan": Command("reckon what speculation should gain, or measure it here", PlanConfig, run_plan),
}

USAGE = "\n".join(
    [
        "usage: specjax COMMAND [--config FILE.yaml] [--option VALUE …]",
        "       specjax COMMAND --help",
        "",
        "Lossless speculative decoding. The commands:",
        *(f"  {name:<10} {command.about}" for name, command in COMMANDS.items()),
    ]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (2 for input that cannot be used)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] not in COMMANDS:
        print(f"specjax: error: {arguments[0]!r} is not a command; the commands are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    _keep_compilations()
    name, *options = arguments
    command = COMMANDS[name]
    try:
        join_processes()
        command.run(parse_options(command.config, options, prog=f"specjax {name}"))
    except (InputError, OSError) as error:  # OSError: a path that was named is too long, or may not be read; a full disk
        print(f"specjax: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        hint = "; the same command continues the run" if name == "train" else ""
        print(f"specjax: interrupted{hint}", file=sys.stderr)
        return 130
    return 0


def join_processes() -> None:
    """Where the environment names a coordinator, be one of several processes that train or decode together.

    ``JAX_COORDINATOR_ADDRESS`` is host:port of the first, ``JAX_NUM_PROCESSES`` how many there are, ``JAX_PROCESS_ID`` which of
    them this is. On clusters that JAX knows (SLURM, Cloud TPU) the first alone is enough.
    """
    if address := os.environ.get("JAX_COORDINATOR_ADDRESS"):
        jax.distributed.initialize(address, _number_in("JAX_NUM_PROCESSES"), _number_in("JAX_PROCESS_ID"))


def _number_in(variable: str) -> int | None:
    value = os.environ.get(variable)
    if value is not None and not (value.isascii() and value.isdecimal()):
        raise InputError(f"{variable}={value!r}: must be a whole number")
    return None if value is None else int(value)


def _keep_compilations() -> None:
    """Compiled programs outlive the process, so that the same command starts faster the next time.

    JAX's own variables win: ``JAX_COMPILATION_CACHE_DIR`` names another directory, ``JAX_ENABLE_COMPILATION_CACHE=0``
    keeps none.
    """
    if getattr(jax.config, "jax_compilation_cache_dir") is None:  # noqa: B009 - its type stub does not list it
        jax.config.update("jax_compilation_cache_dir", str(Path.home() / ".cache" / "specjax" / "compiled"))


def parse_options(kind: type, options: Sequence[str], prog: str) -> Any:
    """A config from ``--config FILE.yaml`` (optional) and the options that override it."""
    options = list(options)
    default = kind()
    for i, option in enumerate(options):
        name, equals, value = option.partition("=")
        if name == "--config":
            if not equals and i + 1 == len(options):
                raise InputError("--config: give the path of a YAML file")
            default = load_yaml(kind, value if equals else options[i + 1])
            del options[i : i + (1 if equals else 2)]
            break
    return tyro.cli(kind, default=default, args=options, prog=prog)
