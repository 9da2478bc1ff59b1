"""The command line: ``python -m specjax {demo,generate,serve,train,regenerate,env,…}``, and what each command does."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import tyro

from specjax import processes
from specjax.cli.client import ClientConfig, run_client
from specjax.cli.convert import ConvertConfig, run_convert
from specjax.cli.demo import DemoConfig, run_demo
from specjax.cli.env import EnvConfig, compiled_programs, run_env
from specjax.cli.evaluate import EvaluateConfig, run_evaluate
from specjax.cli.generate import GenerateConfig, run_generate
from specjax.cli.plan.compile import CompileConfig, run_compile
from specjax.cli.plan.compile_training import CompileTrainingConfig, run_compile_training
from specjax.cli.plan.contexts import ContextsConfig, run_contexts
from specjax.cli.plan.measure import MeasureConfig, run_measure
from specjax.cli.plan.roofline import RooflineConfig, run_roofline
from specjax.cli.plan.theory import TheoryConfig, run_theory
from specjax.cli.regenerate import RegenerateConfig, run_regenerate
from specjax.cli.serve import ServeConfig, run_serve
from specjax.cli.train import run_train
from specjax.config import load_yaml
from specjax.errors import InputError
from specjax.progress import say, show_waits
from specjax.training.config import TrainConfig

_Config = TypeVar("_Config")


@dataclass(frozen=True)
class Command:
    """What a command line may ask for.

    Attributes:
        about: what it does, in one line.
        config: its options, a dataclass.
        run: does it. The exit status may be other than 0, where the answer to what was asked is no.
        continues: whether the same command goes on where it was interrupted.
        over_hosts: whether several processes may run it together (`specjax.processes`).
    """

    about: str
    config: type
    run: Callable[[Any], int | None]
    continues: bool = False
    over_hosts: bool = False


@dataclass(frozen=True)
class Group:
    """Commands of which the next word of the command line names one.

    Attributes:
        about: what they do, in one line.
        commands: by their names.
    """

    about: str
    commands: "Mapping[str, Command | Group]"


COMMANDS: dict[str, Command | Group] = {
    "demo": Command("show the embedded pair at work: text with accepted tokens in colour, and a table", DemoConfig, run_demo),
    "generate": Command("generate text from a model, with a drafter or without", GenerateConfig, run_generate, over_hosts=True),
    "client": Command("draft on this machine and have a server verify it", ClientConfig, run_client),
    "serve": Command("serve a model under OpenAI's interface, with a page to try it", ServeConfig, run_serve, over_hosts=True),
    "train": Command(
        "train a model or a drafter, as a configuration file says", TrainConfig, run_train, continues=True, over_hosts=True
    ),
    "regenerate": Command(
        "rewrite a data set in the target's own words, to train a drafter on",
        RegenerateConfig,
        run_regenerate,
        continues=True,
    ),
    "env": Command("print what is installed, and what does not fit with the command that puts it right", EnvConfig, run_env),
    "convert": Command("write a drafter in the layout of another engine: SGLang, vLLM", ConvertConfig, run_convert),
    "evaluate": Command(
        "measure drafters on questions, plain decoding beside them", EvaluateConfig, run_evaluate, over_hosts=True
    ),
    "plan": Group(
        "say what speculation should gain, before anything is generated",
        {
            "theory": Command("from a cost and an acceptance rate, by closed forms", TheoryConfig, run_theory),
            "roofline": Command("from the shapes of two models, on a chip", RooflineConfig, run_roofline),
            "measure": Command("which chain or tree is fastest on this machine and your prompts", MeasureConfig, run_measure),
            "contexts": Command("what a compressed cache gains on this machine, by context", ContextsConfig, run_contexts),
            "compile": Command("compile decoding for chips that need not be here", CompileConfig, run_compile),
            "compile-training": Command(
                "compile a step of a training for chips that need not be here", CompileTrainingConfig, run_compile_training
            ),
        },
    ),
}


def find_command(words: Sequence[str]) -> tuple[str, Command | Group, Sequence[str]]:
    """The command that the first of ``words`` name, or the group of which the next names none.

    Returns:
        Its name, such as ``specjax plan theory``; the command or group; and the words after those.
    """
    name, found = "specjax", Group("lossless speculative decoding", COMMANDS)
    while isinstance(found, Group) and words and words[0] in found.commands:
        name, found, words = f"{name} {words[0]}", found.commands[words[0]], words[1:]
    return name, found, words


def usage(name: str, group: Group) -> str:
    """What is printed where the name of a command is missing."""
    width = max(map(len, group.commands))
    lines = [
        f"usage: {name} COMMAND [--config FILE.yaml] [--option VALUE …]",
        f"       {name} COMMAND --help",
        "",
        f"{group.about[0].upper()}{group.about[1:]}. The commands:",
        *(f"  {command:<{width}} {found.about}" for command, found in group.commands.items()),
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 2 for input that cannot be used, otherwise the command's own."""
    name, command, options = find_command(sys.argv[1:] if arguments is None else arguments)
    if isinstance(command, Group):
        if not options or options[0] in ("-h", "--help"):
            print(usage(name, command))
            return 0 if options else 2
        known = f"the commands of {name} are {', '.join(command.commands)}"
        print(f"specjax: error: {options[0]!r} is not a command; {known}", file=sys.stderr)
        return 2
    _keep_compilations()
    try:
        place = _find_place(name, command)
        if place is None or place.number == 0:  # of several processes one speaks
            show_waits()
        config = parse_options(command.config, options, prog=name)
        if place is None:
            return command.run(config) or 0
        with _one_speaks(place.number == 0):
            together = processes.join(place, task=f"{name} {config}", say=say)
            status = command.run(config) or 0
        if together is not None:
            together.leave()  # one that does not come here is lost to the others, and they end too
        return status
    except (InputError, OSError) as error:  # OSError: a path that was named is too long, or may not be read; a full disk
        print(f"specjax: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        hint = "; the same command continues the run" if command.continues else ""
        print(f"specjax: interrupted{hint}", file=sys.stderr)
        return 130


@contextmanager
def _one_speaks(is_first: bool) -> Iterator[None]:
    """What the first of several processes prints is all that is printed. Errors are printed, for they leave the body."""
    # Libraries of JAX's print who is connected, past Python. It goes to the standard error: the output may be JSON.
    own = os.dup(1)
    os.dup2(2, 1)
    with (
        open(own, "w", encoding="utf-8") as output,
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        redirect_stdout(output if is_first else nowhere),
        redirect_stderr(sys.stderr if is_first else nowhere),
    ):
        yield


def _find_place(name: str, command: Command) -> processes.Place | None:
    """This process's place among several that run the ``command`` together."""
    if command.over_hosts:
        return processes.find()
    if os.environ.get("JAX_COORDINATOR_ADDRESS"):
        raise InputError(f"{name} runs in one process: unset JAX_COORDINATOR_ADDRESS")
    return None


def _keep_compilations() -> None:
    """Compiled programs outlive the process, so that the same command starts faster the next time.

    All of them: JAX by itself would leave out those that compile in less than a second, of which a command has dozens. JAX's
    own variables win: ``JAX_COMPILATION_CACHE_DIR`` names another directory, ``JAX_ENABLE_COMPILATION_CACHE=0`` keeps none.
    """
    folder = compiled_programs()
    if folder and getattr(jax.config, "jax_compilation_cache_dir") is None:  # noqa: B009 - its type stub does not list it
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def parse_options(kind: type[_Config], options: Sequence[str], prog: str) -> _Config:
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
