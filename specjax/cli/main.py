"""The command line: ``python -m specjax {demo,generate,train,plan}``."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import tyro

from specjax.cli.demo import DemoConfig, run_demo
from specjax.cli.generate import GenerateConfig, run_generate
from specjax.cli.plan import PlanConfig, run_plan
from specjax.cli.train import run_train
from specjax.config import load_yaml
from specjax.errors import InputError
from specjax.training.config import TrainConfig

COMMANDS: dict[str, tuple[type, Callable[[Any], None]]] = {
    "demo": (DemoConfig, run_demo),
    "generate": (GenerateConfig, run_generate),
    "train": (TrainConfig, run_train),
    "plan": (PlanConfig, run_plan),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (2 for input that cannot be used)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] not in COMMANDS:
        names = ", ".join(COMMANDS)
        print(f"usage: specjax {{{names}}} [--config FILE.yaml] [--option VALUE …]\n       specjax COMMAND --help")
        wants_help = bool(arguments) and arguments[0] in ("-h", "--help")
        if arguments and not wants_help:
            print(f"specjax: error: {arguments[0]!r} is not a command; the commands are {names}", file=sys.stderr)
        return 0 if wants_help else 2
    _keep_compilations()
    command, *options = arguments
    kind, run = COMMANDS[command]
    try:
        run(parse_options(kind, options, prog=f"specjax {command}"))
    except InputError as error:
        print(f"specjax: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        hint = "; the same command continues the run" if command == "train" else ""
        print(f"specjax: interrupted{hint}", file=sys.stderr)
        return 130
    return 0


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
