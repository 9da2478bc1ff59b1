"""Check that files, messages, options and metrics keep the names that `formats.json` records.

A user's command lines, configuration files, checkpoints, dashboards and clients break if one of
these names goes. So a test fails for a name that is missing, and for a name that is new. A new name
is added to the record by hand, in the change that brings it.
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
from specjax import stored_folders
from specjax.assets import embedded
from specjax.chips import Chip
from specjax.cli import client, env
from specjax.cli.evaluate_server import ServerMeasurement
from specjax.cli.main import COMMANDS, Command, Group, main
from specjax.client.events import TextReport
from specjax.drafters import Eagle3, chat_variables
from specjax.drafters.registry import METHODS
from specjax.evaluation import losslessness
from specjax.evaluation.protocols import PROTOCOLS
from specjax.evaluation.questions import Question
from specjax.evaluation.served import MeasuredServer
from specjax.lowering.compiled import Compiled
from specjax.models import fingerprint
from specjax.reports.evaluation import OVERALL, PLAIN, summarise
from specjax.reports.growth import Moment
from specjax.sampling_params import SamplingParams
from specjax.serving import over_hosts
from specjax.serving.http import messages_requests, requests, responses_requests, translation
from specjax.serving.http.metrics import Metrics
from specjax.serving.http.model_objects import VERSION_HEADER
from specjax.serving.sessions import SessionStatistics
from specjax.training import fingerprint as training_fingerprint
from specjax.training.run_directory import Claim
from specjax.training.step import TrainState
from specjax.training.written import WrittenTokens
from specjax.wire import messages
from tests.conftest import tiny_target
from tests.evaluation.stub_server import MadeUpAnswer, VLLMMetrics, stub_server
from tests.reports.test_evaluation import ANSWERS
from tests.serving.http.interfaces import TEXTS, chat_service, post, stream
from tests.serving.http.made_up import MadeUpEngine
from tests.serving.http.test_app import ask, events, service_of

RECORD = Path(__file__).with_name("formats.json")

Names = dict[str, list[str]]


# --- messages -------------------------------------------------------------------------------------


def wire_messages() -> Names:
    """Return the fields of each message between a client that drafts and the server, by type."""
    return _messages(messages)


def host_messages() -> Names:
    """Return the fields of each message between the processes of an engine, by its type."""
    return _messages(over_hosts)


def _messages(module: types.ModuleType) -> Names:
    fields_by_type: Names = {}
    for value in vars(module).values():
        if (
            isinstance(value, type)
            and issubclass(value, msgspec.Struct)
            and value.__module__ == module.__name__
        ):
            described: Any = msgspec.inspect.type_info(value)
            if described.tag is not None and not value.__name__.startswith("_"):
                fields_by_type[described.tag] = [
                    f"{field.encode_name}: {_kind(field.type)}" for field in described.fields
                ]
    return fields_by_type


def _kind(described: Any) -> str:
    """Return the name of a msgspec type, with the types inside it."""
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
    """Return the kinds of events of a text that a client drafts, as its report has them."""
    events = get_args(specjax.client.TextEvent)
    return {"kinds": [Moment.of(event(tokens=(1,), text=""), seconds=0.0).kind for event in events]}


# --- options and files of configuration -----------------------------------------------------------


def command_options() -> Names:
    """Return the options of each command as paths of fields, which are its keys in YAML, too."""
    return {name: sorted(_fields(command.config)) for name, command in _commands("", COMMANDS)}


def _commands(prefix: str, commands: Any) -> Iterator[tuple[str, Command]]:
    for word, command in commands.items():
        if isinstance(command, Group):
            yield from _commands(f"{prefix}{word} ", command.commands)
        else:
            yield f"{prefix}{word}", command


def _fields(kind: Any) -> Iterator[str]:
    """Yield the path of each field of a dataclass.

    A field that may hold several kinds of sections has the paths of each, with the name of the
    kind.
    """
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
    """Return the parameters of requests: those that are read, refused, and ignored.

    A parameter is refused if it would change the answer.
    """
    return {
        "completions": sorted(requests._CompletionFields.__struct_fields__),
        "chat completions": sorted(requests._ChatFields.__struct_fields__),
        "tokenize": sorted(requests._TokenizeFields.__struct_fields__),
        "detokenize": sorted(requests._DetokenizeFields.__struct_fields__),
        "responses": sorted(responses_requests.ResponsesFields.__struct_fields__),
        "messages": sorted(messages_requests.MessagesFields.__struct_fields__),
        "responses and messages": sorted(translation.SHARED),
        "refused": sorted(requests.UNSUPPORTED),
        "ignored": sorted(requests.IGNORED),
    }


def http_answers() -> Names:
    """Return the paths of the fields of each answer."""
    service = service_of(MadeUpEngine(), with_acceptance=True)
    more = {"max_tokens": 2, "prediction": {"type": "content", "content": "The"}}
    chats = chat_service(TEXTS["call"])
    question = [{"role": "user", "content": "Hello"}]
    function = {"type": "function", "name": "get_weather", "parameters": {}}
    response = {"input": question, "tools": [function]}
    described = {"type": "function", "function": {"name": "get_weather"}}
    chat = {"messages": question, "tools": [described]}
    tool = {"name": "get_weather", "input_schema": {}}
    message = {"messages": question, "tools": [tool], "max_tokens": 1000}
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
        "chat completions, a call": post(chats, "/v1/chat/completions", chat).json(),
        "chat completions, a call, streamed": events(
            post(chats, "/v1/chat/completions", chat | {"stream": True})
        ),
        "responses": post(chats, "/v1/responses", response).json(),
        "responses, streamed": stream(post(chats, "/v1/responses", response | {"stream": True})),
        "messages": post(chats, "/v1/messages", message).json(),
        "messages, streamed": stream(post(chats, "/v1/messages", message | {"stream": True})),
        "messages, error": post(chats, "/v1/messages", {}).json(),
        "count_tokens": post(chats, "/v1/messages/count_tokens", message).json(),
        "health": ask(service, "/health", "GET").json(),
        "models": ask(service, "/v1/models", "GET").json(),
        "models, Anthropic": ask(
            service, "/v1/models", "GET", headers={VERSION_HEADER: "2023-06-01"}
        ).json(),
        "tokenize": ask(service, "/tokenize").json(),
        "detokenize": ask(service, "/detokenize", content='{"tokens": [97]}').json(),
        "version": ask(service, "/version", "GET").json(),
    }
    return {name: sorted(set(_paths(answer))) for name, answer in answers.items()}


def _paths(value: Any, prefix: str = "") -> Iterator[str]:
    """Yield the path of each value of JSON; the items of a list share one path."""
    if isinstance(value, list):
        for inner in value:
            yield from _paths(inner, prefix)
    # The names in top_logprobs are tokens.
    elif isinstance(value, dict) and not prefix.endswith("logprobs.top_logprobs"):
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

    labels_by_metric: Names = {}
    for name, labels in re.findall(
        r"^([a-z_:]+)\{(.*)\} ", asyncio.run(exposition()), re.MULTILINE
    ):
        labels_by_metric[name] = sorted(
            {*labels_by_metric.get(name, []), *re.findall(r"(\w+)=", labels)}
        )
    return labels_by_metric


def printed(capsys: pytest.CaptureFixture[str]) -> Names:
    """Return the paths of the fields that commands print with ``--json``, or write."""
    command = ["generate", "--target", "embedded", "--prompt", "import os"]
    assert main([*command, "--max-new-tokens", "1", "--json"]) == 0
    values = {
        "generate": json.loads(capsys.readouterr().out),
        "client": client.as_json(TextReport(round_trips=[0.1], depths=[1])),
    }
    paths = {name: sorted(set(_paths(value))) for name, value in values.items()}
    classes = {
        "env": env.EnvironmentReport,
        "plan compile": Compiled,
        "chip": Chip,
        "evaluate --lossless": losslessness.LosslessnessVerdict,
    }
    paths |= {name: sorted(_fields(kind)) for name, kind in classes.items()}
    figures = summarise(ANSWERS, [PLAIN, "a"], PROTOCOLS["vllm-80"])
    paths["figures of evaluate"] = sorted(figures[OVERALL]["a"])
    paths["evaluate --server"] = sorted(set(_paths(measured_server())))
    tokens = WrittenTokens.of_turns([([5, 6], [7])], "a fingerprint", {"enable_thinking": False})
    paths["tokens of a data set"] = sorted(tokens.record())
    return paths


def measured_server() -> dict[str, Any]:
    """Return what a measurement of a server writes beside its settings and figures."""
    with stub_server(VLLMMetrics(3), [MadeUpAnswer("a", 4, (1, 1))]) as stub:
        measurement = ServerMeasurement(
            model=MeasuredServer(stub.url),
            questions=[Question("mt-bench", ("Why?",))],
            protocol=PROTOCOLS["vllm-80"],
            max_new_tokens=4,
            sampling={"temperature": 0.0},
            seed=0,
            thinking=None,
            variables={},
            settings={},
        )
        content = measurement.run().content
    return {name: content[name] for name in ("server", "protocol")}


# --- checkpoints and fingerprints -----------------------------------------------------------------


def checkpoints(folder: Path) -> Names:
    """Return the fields of config.json and the tensors of a target and of each trained drafter.

    A drafter has a checkpoint in each of its layouts.
    """
    target = tiny_target()
    writers: dict[str, Callable[[Path], None]] = {"target": target.save_pretrained}
    for name, method in METHODS.items():
        if method.trained is None:
            continue
        drafter = method.trained.init(target, jax.random.key(0))
        for layout in drafter.layouts:
            # DeepSpec's layout needs a drafter with its own embedding.
            if (name, layout) != ("dflash", "deepspec"):
                writers[f"{name}, {layout}"] = partial(drafter.save_pretrained, layout=layout)
    names_of: Names = {}
    for number, (name, save) in enumerate(writers.items()):
        path = folder / str(number)
        save(path)
        content = json.loads((path / "config.json").read_text())
        tensors = safetensors.numpy.load_file(path / "model.safetensors")
        names_of[name] = [
            *sorted(set(_paths(content))),
            *(f"tensor {tensor}" for tensor in sorted(tensors)),
        ]
        names_of[name] += [f"file {file.name}" for file in sorted(path.iterdir())]
    return names_of


def training_runs(folder: Path) -> Names:
    """Return the names that a run saves: its claim, state and students, and what is beside them."""
    names_of: Names = {"claim.json": [field.name for field in dataclasses.fields(Claim)]}
    chat_variables.write(folder, {})
    (beside,) = folder.iterdir()
    names_of[f"file {beside.name}"] = sorted(json.loads(beside.read_text()))
    names_of["state"] = [field.name for field in dataclasses.fields(TrainState)]  # pyright: ignore[reportArgumentType]
    file = stored_folders.StoredFile("object", 1, "hash")
    manifest = json.loads(stored_folders.manifest_text({"config.yaml": file}, "writer"))
    names_of[stored_folders.MANIFEST] = list(manifest)
    names_of["file of the manifest"] = list(manifest["files"]["config.yaml"])
    target = tiny_target()
    names_of["student target"] = _leaves(target)
    for name, method in METHODS.items():
        if method.trained is not None:
            names_of[f"student {name}"] = _leaves(method.trained.init(target, jax.random.key(0)))
    return names_of


def _leaves(tree: Any) -> list[str]:
    return sorted(
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    )


def fingerprints() -> Names:
    """Return the fingerprints of the embedded models, of a tokenizer, and of training tokens."""
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


SLOW = {"printed JSON"}  # needs a run of a command


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in SLOW)) for name in FORMATS]
)
def test_a_format_is_as_it_is_recorded(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    find = FORMATS[name]
    fixtures = {"folder": tmp_path, "capsys": capsys}
    current = find(*(fixtures[argument] for argument in inspect.signature(find).parameters))
    recorded = json.loads(RECORD.read_text())[name]
    missing, new = _difference(recorded, current), _difference(current, recorded)
    assert not missing, (
        f"{name}: {missing} are gone or renamed, and somebody's files, programs or command lines"
        " hold them"
    )
    assert not new, f"{name}: {new} are new; add them to {RECORD.name} by hand"
    assert current == recorded, f"{name}: the order has changed"


def _difference(minuend: Names, subtrahend: Names) -> Names:
    """Return the names that are in ``minuend`` and not in ``subtrahend``."""
    difference = {
        key: [name for name in names if name not in subtrahend.get(key, [])]
        for key, names in minuend.items()
    }
    return {key: names for key, names in difference.items() if names or key not in subtrahend}
