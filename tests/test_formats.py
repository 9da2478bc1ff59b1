"""Names that others hold: files, messages, options and metrics keep the names that `formats.json` records.

A user's command lines, configuration files, checkpoints, dashboards and clients break where one of these names goes. So a test
fails for a name that is gone, and for one that is new. A new name is added to the record by hand, in the change that brings it.
"""

import asyncio
import dataclasses
import inspect
import json
import re
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import jax
import msgspec
import numpy as np
import pytest
import safetensors.numpy

import specjax
from specjax.assets import embedded
from specjax.chips import Chip
from specjax.cli import client, env
from specjax.cli.main import COMMANDS, Command, Group, main
from specjax.client.events import TextReport
from specjax.drafters import Eagle3
from specjax.drafters.registry import METHODS
from specjax.evaluation import losslessness
from specjax.lowering.compiled import Compiled
from specjax.models import fingerprint
from specjax.reports.growth import Moment
from specjax.sampling_params import SamplingParams
from specjax.serving import over_hosts
from specjax.serving.http import requests
from specjax.serving.http.metrics import Metrics
from specjax.serving.sessions import SessionStatistics
from specjax.training import fingerprint as training_fingerprint
from specjax.training.run_directory import Claim
from specjax.training.step import TrainState
from specjax.training.written import WrittenTokens
from specjax.wire import messages
from tests.conftest import tiny_target
from tests.serving.http.made_up import MadeUpEngine
from tests.serving.http.test_app import ask, events, service_of

RECORD = Path(__file__).with_name("formats.json")

Names = dict[str, list[str]]


# --- messages -------------------------------------------------------------------------------------


def wire_messages() -> Names:
    """Return the fields of each message between a client that drafts and the server, by its type."""
    return _messages(messages)


def host_messages() -> Names:
    """Return the fields of each message between the processes of an engine, by its type."""
    return _messages(over_hosts)


def _messages(module: types.ModuleType) -> Names:
    found: Names = {}
    for value in vars(module).values():
        if (
            isinstance(value, type)
            and issubclass(value, msgspec.Struct)
            and value.__module__ == module.__name__
        ):
            described: Any = msgspec.inspect.type_info(value)
            if described.tag is not None and not value.__name__.startswith("_"):
                found[described.tag] = [
                    f"{field.encode_name}: {_kind(field.type)}" for field in described.fields
                ]
    return found


def _kind(described: Any) -> str:
    """Return the name of a msgspec type, those inside it too."""
    name = type(described).__name__.removesuffix("Type").lower()
    inside = [described.types] if hasattr(described, "types") else []
    inside += [
        [getattr(described, part)]
        for part in ("key_type", "value_type", "item_type")
        if hasattr(described, part)
    ]
    parts = [_kind(part) for group in inside for part in group]
    return f"{name}[{', '.join(parts)}]" if parts else name


def client_events() -> Names:
    """Return the kinds of events of a text that a client drafts, which its report tells apart."""
    events = get_args(specjax.client.TextEvent)
    return {"kinds": [Moment.of(event(tokens=(1,), text=""), seconds=0.0).kind for event in events]}


# --- options and files of configuration -----------------------------------------------------------


def command_options() -> Names:
    """Return the options of each command as paths of fields: they are its keys in a YAML file, too."""
    return {name: sorted(_fields(command.config)) for name, command in _commands("", COMMANDS)}


def _commands(prefix: str, commands: Any) -> Iterator[tuple[str, Command]]:
    for word, command in commands.items():
        if isinstance(command, Group):
            yield from _commands(f"{prefix}{word} ", command.commands)
        else:
            yield f"{prefix}{word}", command


def _fields(kind: Any) -> Iterator[str]:
    """Yield the path of each field of a dataclass; those of a section that may be several, by the name of each."""
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        sections = [part for part in _parts(hints[field.name]) if dataclasses.is_dataclass(part)]
        if not sections:
            yield field.name
        for section in sections:
            tag = f"[{section.name}]" if len(sections) > 1 else ""  # pyright: ignore[reportAttributeAccessIssue]
            yield from (f"{field.name}{tag}.{inner}" for inner in _fields(section))


def _parts(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) is Annotated:
        return _parts(get_args(hint)[0])
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


# --- HTTP -----------------------------------------------------------------------------------------


def http_parameters() -> Names:
    """Return the parameters of requests: those that are read, refused where they would change something, and ignored."""
    return {
        "completions": sorted(requests._CompletionFields.__struct_fields__),
        "chat completions": sorted(requests._ChatFields.__struct_fields__),
        "tokenize": sorted(requests._TokenizeFields.__struct_fields__),
        "refused": sorted(requests.UNSUPPORTED),
        "ignored": sorted(requests.IGNORED),
    }


def http_answers() -> Names:
    """Return the paths of the fields of each answer."""
    service = service_of(MadeUpEngine(), with_acceptance=True)
    more = {"max_tokens": 2, "prediction": {"type": "content", "content": "The"}}
    usage = {"stream": True, "stream_options": {"include_usage": True, "include_accepted": True}}
    answers = {
        "completions": ask(service, logprobs=1, **more).json(),
        "completions, streamed": events(ask(service, logprobs=1, **more, **usage)),
        "chat completions": (
            ask(service, "/v1/chat/completions", logprobs=True, top_logprobs=1, **more).json()
        ),
        "chat completions, streamed": events(
            ask(service, "/v1/chat/completions", logprobs=True, **more, **usage)
        ),
        "error": ask(service, temperature=-1).json(),
        "health": ask(service, "/health", "GET").json(),
        "models": ask(service, "/v1/models", "GET").json(),
        "tokenize": ask(service, "/tokenize").json(),
    }
    return {name: sorted(set(_paths(answer))) for name, answer in answers.items()}


def _paths(value: Any, prefix: str = "") -> Iterator[str]:
    """Yield the path of each value of JSON. What a list holds has no number in it."""
    if isinstance(value, list):
        for inner in value:
            yield from _paths(inner, prefix)
    elif isinstance(value, dict) and not prefix.endswith(
        "logprobs.top_logprobs"
    ):  # whose names are tokens
        for name, inner in value.items():
            yield from _paths(inner, f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix


def metrics() -> Names:
    """Return the labels of each metric."""

    async def exposition() -> str:
        measured = Metrics(MadeUpEngine(), "tiny", SessionStatistics())
        handle: Any = MadeUpEngine().submit([5, 6], SamplingParams(max_new_tokens=2))
        measured.watch(handle, 2)
        while measured._watching:
            await asyncio.sleep(0.001)
        return measured.exposition().decode()

    found: Names = {}
    for name, labels in re.findall(
        r"^([a-z_:]+)\{(.*)\} ", asyncio.run(exposition()), re.MULTILINE
    ):
        found[name] = sorted({*found.get(name, []), *re.findall(r"(\w+)=", labels)})
    return found


def printed(capsys: pytest.CaptureFixture[str]) -> Names:
    """Return the paths of the fields of what commands print with ``--json``, or write."""
    assert (
        main(
            [
                "generate",
                "--target",
                "embedded",
                "--prompt",
                "import os",
                "--max-new-tokens",
                "1",
                "--json",
            ]
        )
        == 0
    )
    said = {
        "generate": json.loads(capsys.readouterr().out),
        "client": client.as_json(TextReport(round_trips=[0.1], depths=[1])),
    }
    found = {name: sorted(set(_paths(value))) for name, value in said.items()}
    classes = {
        "env": env.EnvironmentReport,
        "plan compile": Compiled,
        "chip": Chip,
        "evaluate --lossless": losslessness.LosslessnessVerdict,
    }
    found |= {name: sorted(_fields(kind)) for name, kind in classes.items()}
    written = WrittenTokens.of_turns([([5, 6], [7])], "a fingerprint")
    found["tokens of a data set"] = sorted(written.record())
    return found


# --- checkpoints and fingerprints -----------------------------------------------------------------


def checkpoints(folder: Path) -> Names:
    """Return the fields of config.json and the tensors of a target and of each trained drafter, in each of its layouts."""
    target = tiny_target()
    made: dict[str, Callable[[Path], None]] = {"target": target.save_pretrained}
    for name, method in METHODS.items():
        if method.trained is None:
            continue
        drafter = method.trained.init(target, jax.random.key(0))
        for layout in drafter.layouts:
            if (name, layout) != (
                "dflash",
                "deepspec",
            ):  # which wants a drafter with an embedding of its own
                made[f"{name}, {layout}"] = partial(drafter.save_pretrained, layout=layout)
    found: Names = {}
    for number, (name, save) in enumerate(made.items()):
        path = folder / str(number)
        save(path)
        content = json.loads((path / "config.json").read_text())
        tensors = safetensors.numpy.load_file(path / "model.safetensors")
        found[name] = [
            *sorted(set(_paths(content))),
            *(f"tensor {tensor}" for tensor in sorted(tensors)),
        ]
        found[name] += [f"file {file.name}" for file in sorted(path.iterdir())]
    return found


def training_runs() -> Names:
    """Return the names of what a training keeps to go on from: its claim, its state, and each kind of student."""
    found: Names = {"claim.json": [field.name for field in dataclasses.fields(Claim)]}
    found["state"] = [field.name for field in dataclasses.fields(TrainState)]  # pyright: ignore[reportArgumentType]
    target = tiny_target()
    found["student target"] = _leaves(target)
    for name, method in METHODS.items():
        if method.trained is not None:
            found[f"student {name}"] = _leaves(method.trained.init(target, jax.random.key(0)))
    return found


def _leaves(tree: Any) -> list[str]:
    return sorted(
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    )


def fingerprints() -> Names:
    """Return the fingerprints of the models that come with the library, of a tokenizer, and of a training's tokens."""
    generate = specjax.load("embedded")
    windows = {"tokens": np.arange(12, dtype=np.int32).reshape(2, 6)}
    return {
        "target": [fingerprint.of_params(generate.target.params, generate.target.config)],
        "drafter": [Eagle3.from_pretrained(embedded("eagle3")).fingerprint()],
        "target of a training": [str(training_fingerprint.of_target(generate.target))],
        "tokenizer": [training_fingerprint.of_tokenizer(generate.tokenizer)],
        "windows": [training_fingerprint.of_windows(windows)],
    }


# --- the record -----------------------------------------------------------------------------------

FORMATS: dict[str, Callable[..., Names]] = {
    "wire messages": wire_messages,
    "messages between hosts": host_messages,
    "events of a client": client_events,
    "options and keys of configuration": command_options,
    "parameters of HTTP": http_parameters,
    "answers of HTTP": http_answers,
    "metrics": metrics,
    "printed JSON": printed,
    "checkpoints": checkpoints,
    "training runs": training_runs,
    "fingerprints": fingerprints,
}


SLOW = {"printed JSON"}  # for which a command runs


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in SLOW)) for name in FORMATS]
)
def test_a_format_is_as_it_is_recorded(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    find = FORMATS[name]
    fixtures = {"folder": tmp_path, "capsys": capsys}
    found = find(*(fixtures[argument] for argument in inspect.signature(find).parameters))
    recorded = json.loads(RECORD.read_text())[name]
    gone, new = _difference(recorded, found), _difference(found, recorded)
    assert not gone, (
        f"{name}: {gone} are gone or renamed, and somebody's files, programs or command lines hold"
        " them"
    )
    assert not new, f"{name}: {new} are new; add them to {RECORD.name} by hand"
    assert found == recorded, f"{name}: the order has changed"


def _difference(left: Names, right: Names) -> Names:
    """Return what is in ``left`` and not in ``right``."""
    left_over = {
        key: [name for name in names if name not in right.get(key, [])]
        for key, names in left.items()
    }
    return {key: names for key, names in left_over.items() if names or key not in right}
