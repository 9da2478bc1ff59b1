"""The command line: ``python -m specjax {demo,generate,serve,train,regenerate,env,…}``, and what each command does.

A command's module is imported when it is asked for: ``--help`` and ``--version`` import neither JAX nor any command.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from specjax.cli import interrupts
from specjax.errors import InputError, LogitsError, did_you_mean

if TYPE_CHECKING:
    from specjax.processes import ProcessPlace

_CONTINUES = "the same command continues the run"

_Config = TypeVar("_Config")


@dataclass(frozen=True)
class Command:
    """What a command line may ask for.

    Attributes:
        about: what it does, in one line.
        module: where it is, in `specjax.cli`.
        config_name: of its options, a dataclass in the module.
        run_name: of the function in the module that does it.
        continues: whether the same command goes on where it was interrupted.
        over_hosts: whether several processes may run it together (`specjax.processes`).
    """

    about: str
    module: str
    config_name: str
    run_name: str
    continues: bool = False
    over_hosts: bool = False

    @property
    def config(self) -> type:
        """The dataclass of its options. Imports the module."""
        return getattr(self._import(), self.config_name)

    @property
    def run(self) -> Callable[[Any], int | None]:
        """The function that does it. Imports the module. The status may be other than 0, where the answer is no."""
        return getattr(self._import(), self.run_name)

    def _import(self) -> Any:
        return importlib.import_module(f"specjax.cli.{self.module}")


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
    "demo": Command(
        "show the embedded pair at work: text with accepted tokens in colour, and a table", "demo", "DemoConfig", "run_demo"
    ),
    "generate": Command(
        "generate text from a model, with a drafter or without", "generate", "GenerateConfig", "run_generate", over_hosts=True
    ),
    "client": Command("draft on this machine and have a server verify it", "client", "ClientConfig", "run_client"),
    "serve": Command(
        "serve a model under OpenAI's interface, with a page to try it", "serve", "ServeConfig", "run_serve", over_hosts=True
    ),
    "train": Command(
        "train a model or a drafter, as a configuration file says",
        "train",
        "TrainConfig",
        "run_train",
        continues=True,
        over_hosts=True,
    ),
    "regenerate": Command(
        "rewrite a data set in the target's own words, to train a drafter on",
        "regenerate",
        "RegenerateConfig",
        "run_regenerate",
        continues=True,
    ),
    "env": Command(
        "print what is installed, and what does not fit with the command that puts it right", "env", "EnvConfig", "run_env"
    ),
    "convert": Command(
        "write a drafter in the layout of another engine: SGLang, vLLM", "convert", "ConvertConfig", "run_convert"
    ),
    "evaluate": Command(
        "measure drafters on questions, plain decoding beside them",
        "evaluate",
        "EvaluateConfig",
        "run_evaluate",
        over_hosts=True,
    ),
    "plan": Group(
        "say what speculation should gain, before anything is generated",
        {
            "theory": Command(
                "from a cost and an acceptance rate, by closed forms", "plan.theory", "TheoryConfig", "run_theory"
            ),
            "roofline": Command("from the shapes of two models, on a chip", "plan.roofline", "RooflineConfig", "run_roofline"),
            "measure": Command(
                "which chain or tree is fastest on this machine and your prompts",
                "plan.measure",
                "MeasureConfig",
                "run_measure",
            ),
            "contexts": Command(
                "what a compressed cache gains on this machine, by context", "plan.contexts", "ContextsConfig", "run_contexts"
            ),
            "compile": Command(
                "compile decoding for chips that need not be here", "plan.compile", "CompileConfig", "run_compile"
            ),
            "compile-training": Command(
                "compile a step of a training for chips that need not be here",
                "plan.compile_training",
                "CompileTrainingConfig",
                "run_compile_training",
            ),
        },
    ),
}
"""Every command by the word that names it."""


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
        *([f"       {name} --version"] if group.commands is COMMANDS else []),
        "",
        f"{group.about[0].upper()}{group.about[1:]}. The commands:",
        *(f"  {command:<{width}} {found.about}" for command, found in group.commands.items()),
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 2 for input that cannot be used, otherwise the command's own."""
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
        known = f"the commands of {name} are {', '.join(command.commands)}{did_you_mean(options[0], command.commands)}"
        print(f"specjax: error: {options[0]!r} is not a command; {known}", file=sys.stderr)
        return 2
    if command.continues:
        interrupts.say_also(_CONTINUES)
    try:
        status = _run(name, command, options)
        interrupts.hold_if_ending()
        return status
    # OSError: a path that was named is too long, or may not be read; a full disk.
    except (InputError, LogitsError, OSError) as error:
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


def _find_place(name: str, command: Command) -> "ProcessPlace | None":
    """This process's place among several that run the ``command`` together."""
    from specjax import processes

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
    import jax

    from specjax.cli.env import compiled_programs

    folder = compiled_programs()
    if folder and getattr(jax.config, "jax_compilation_cache_dir") is None:  # noqa: B009 - its type stub does not list it
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def parse_options(kind: type[_Config], options: Sequence[str], prog: str) -> _Config:
    """A config from ``--config FILE.yaml`` (optional) and the options that override it."""
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
