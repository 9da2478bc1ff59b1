"""The command line, ``python -m specjax {demo,generate,serve,…}``, and the table of its commands.

A command's module is imported only when the command runs. So ``--help`` and ``--version`` import
neither JAX nor any command.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from specjax.cli import interrupts
from specjax.errors import InputError, LogitsError, NonFiniteError, did_you_mean

if TYPE_CHECKING:
    from specjax.processes import ProcessPlace

_CONTINUES = "the same command continues the run"

_Config = TypeVar("_Config")


@dataclass(frozen=True)
class Command:
    """A command of the command line.

    Attributes:
        about: a description of one line.
        module: the module with the command, in `specjax.cli`.
        config_name: the name of the dataclass of options in that module.
        run_name: the name of the function in that module that runs the command.
        continues: whether the same command continues a run that was interrupted.
        over_hosts: whether several processes may run the command together (`specjax.processes`).
    """

    about: str
    module: str
    config_name: str
    run_name: str
    continues: bool = False
    over_hosts: bool = False

    @property
    def config(self) -> type:
        """The dataclass of options. Imports the module."""
        return getattr(self._import(), self.config_name)

    @property
    def run(self) -> Callable[[Any], int | None]:
        """The function that runs the command. Imports the module.

        It returns an exit status or None; a status other than 0 may mean a negative result.
        """
        return getattr(self._import(), self.run_name)

    def _import(self) -> Any:
        return importlib.import_module(f"specjax.cli.{self.module}")


@dataclass(frozen=True)
class Group:
    """A group of commands. The next word of the command line names one of them.

    Attributes:
        about: a description of one line.
        commands: the commands by name.
    """

    about: str
    commands: "Mapping[str, Command | Group]"


COMMANDS: dict[str, Command | Group] = {
    "demo": Command(
        "show the embedded models: text with accepted tokens in colour, and a table of speeds",
        "demo",
        "DemoConfig",
        "run_demo",
    ),
    "generate": Command(
        "generate text from a model, with a drafter or without",
        "generate",
        "GenerateConfig",
        "run_generate",
        over_hosts=True,
    ),
    "client": Command(
        "draft on this machine and have a server verify it", "client", "ClientConfig", "run_client"
    ),
    "serve": Command(
        "serve a model under OpenAI's interface, with a page to try it",
        "serve",
        "ServeConfig",
        "run_serve",
        over_hosts=True,
    ),
    "train": Command(
        "train a model or a drafter from a configuration file",
        "train",
        "TrainConfig",
        "run_train",
        continues=True,
        over_hosts=True,
    ),
    "regenerate": Command(
        "rewrite a data set with the target's answers, as training data for a drafter",
        "regenerate",
        "RegenerateConfig",
        "run_regenerate",
        continues=True,
    ),
    "env": Command(
        "print installed versions and devices, and check that the packages fit together",
        "env",
        "EnvConfig",
        "run_env",
    ),
    "convert": Command(
        "convert a drafter to the layout of SGLang or vLLM, or quantize a model",
        "convert",
        "ConvertConfig",
        "run_convert",
    ),
    "evaluate": Command(
        "measure the speed and acceptance of drafters on questions, or test that they are lossless",
        "evaluate",
        "EvaluateConfig",
        "run_evaluate",
        over_hosts=True,
    ),
    "plan": Group(
        "estimate what speculative decoding gains, before you deploy it",
        {
            "theory": Command(
                "from a cost and an acceptance rate, by closed formulas",
                "plan.theory",
                "TheoryConfig",
                "run_theory",
            ),
            "roofline": Command(
                "from the shapes of two models, on a chip",
                "plan.roofline",
                "RooflineConfig",
                "run_roofline",
            ),
            "measure": Command(
                "measure which chain or tree is fastest on this machine and your prompts",
                "plan.measure",
                "MeasureConfig",
                "run_measure",
            ),
            "contexts": Command(
                "measure what a compressed cache gains, by context length",
                "plan.contexts",
                "ContextsConfig",
                "run_contexts",
            ),
            "compile": Command(
                "compile decoding for chips that this machine need not have",
                "plan.compile",
                "CompileConfig",
                "run_compile",
            ),
            "compile-training": Command(
                "compile a training step for chips that this machine need not have",
                "plan.compile_training",
                "CompileTrainingConfig",
                "run_compile_training",
            ),
        },
    ),
}
"""All commands and groups, by name."""


def find_command(words: Sequence[str]) -> tuple[str, Command | Group, Sequence[str]]:
    """Find the command or group that the first words name.

    Returns:
        Its full name, such as ``specjax plan theory``; the command or group; and the remaining
        words.
    """
    name, command = "specjax", Group("lossless speculative decoding", COMMANDS)
    while isinstance(command, Group) and words and words[0] in command.commands:
        name, command, words = f"{name} {words[0]}", command.commands[words[0]], words[1:]
    return name, command, words


def usage(name: str, group: Group) -> str:
    """Return the text that is printed if the name of a command is missing."""
    width = max(map(len, group.commands))
    lines = [
        f"usage: {name} COMMAND [--config FILE.yaml] [--option VALUE …]",
        f"       {name} COMMAND --help",
        *([f"       {name} --version"] if group.commands is COMMANDS else []),
        "",
        f"{group.about[0].upper()}{group.about[1:]}. The commands:",
        *(f"  {command:<{width}} {entry.about}" for command, entry in group.commands.items()),
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; 2 means that an input cannot be used."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] in (["--version"], ["-V"]):
        from specjax import __version__

        print(f"specjax {__version__}")
        return 0
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    name, command, options = find_command(words)
    if isinstance(command, Group):
        if not options or options[0] in ("-h", "--help", "help"):
            print(usage(name, command))
            return 0 if options else 2
        hint = (
            f"the commands of {name} are"
            f" {', '.join(command.commands)}{did_you_mean(options[0], command.commands)}"
        )
        print(f"specjax: error: {options[0]!r} is not a command; {hint}", file=sys.stderr)
        return 2
    if command.continues:
        interrupts.say_also(_CONTINUES)
    try:
        status = _run(name, command, options)
        interrupts.hold_if_ending()
        return status
    # OSError: a path is too long or unreadable, or a disk is full.
    except (InputError, LogitsError, NonFiniteError, OSError) as error:
        interrupts.hold_if_ending()
        print(f"specjax: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        hint = f"; {_CONTINUES}" if command.continues else ""
        print(f"specjax: interrupted{hint}", file=sys.stderr)
        return 130


def _run(name: str, command: Command, options: Sequence[str]) -> int:
    """Run a command, alone or with other processes; return its status."""
    from specjax import processes
    from specjax.cli.silence import silence
    from specjax.progress import say, show_waits

    silence()
    _keep_compilations()
    place = _find_place(name, command)
    if place is None or place.number == 0:  # of several processes only the first prints
        show_waits()
    config = parse_options(command.config, options, prog=name)
    if place is None:
        return command.run(config) or 0
    with _one_speaks(place.number == 0):
        together = processes.join(place, task=f"{name} {config}", say=say)
        with processes.waiting_for_report():
            status = command.run(config) or 0
    if together is not None:
        # Without this call the other processes would treat this one as lost, and end.
        together.leave()
    return status


@contextmanager
def _one_speaks(is_first: bool) -> Iterator[None]:
    """Let only the first of several processes print. Errors leave the block, so all are printed."""
    # C++ libraries of JAX print connections to file descriptor 1. Redirect that to the standard
    # error, because the output of the command may be JSON.
    stdout = os.dup(1)
    os.dup2(2, 1)
    with (
        open(stdout, "w", encoding="utf-8") as output,
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        redirect_stdout(output if is_first else nowhere),
        redirect_stderr(sys.stderr if is_first else nowhere),
    ):
        yield


def _find_place(name: str, command: Command) -> "ProcessPlace | None":
    """Return this process's place among the processes that run the command together."""
    from specjax import processes

    if command.over_hosts:
        return processes.find()
    if os.environ.get("JAX_COORDINATOR_ADDRESS"):
        raise InputError(f"{name} runs in one process: unset JAX_COORDINATOR_ADDRESS")
    return None


def _keep_compilations() -> None:
    """Keep compiled programs on disk, so that the next start of the same command is faster.

    By default JAX keeps only programs that take at least a second to compile. A command has dozens
    of smaller ones, so all are kept. JAX's environment variables take precedence:
    ``JAX_COMPILATION_CACHE_DIR`` sets another directory, and ``JAX_ENABLE_COMPILATION_CACHE=0``
    turns this off.
    """
    import jax

    from specjax.cli.env import compiled_programs

    folder = compiled_programs()
    # JAX's type stub does not list this option.
    if folder and getattr(jax.config, "jax_compilation_cache_dir") is None:  # noqa: B009
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def parse_options(kind: type[_Config], options: Sequence[str], prog: str) -> _Config:
    """Return a config from ``--config FILE.yaml``, which is optional, and from options.

    The options override the file.
    """
    import tyro

    from specjax.config import load_yaml

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
