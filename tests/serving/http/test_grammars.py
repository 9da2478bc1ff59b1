"""Tests of requests that state a grammar: how they are read, and a real server's answers."""

import asyncio
import json
import re
import subprocess
import sys
import threading
from collections.abc import Awaitable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

import specjax
from specjax.errors import InputError
from specjax.grammars import Choice, JsonObject, JsonSchema, Lark, Regex, StructuralTag
from specjax.grammars.checker import CONCURRENT
from specjax.serving.http.errors import RequestError
from specjax.serving.http.grammar_jobs import MAX_JOBS
from specjax.serving.http.grammars import PARAMETERS
from specjax.serving.http.requests import Limits
from specjax.serving.http.service import AppOptions, Service
from tests.serving.http.conftest import KEY, Server
from tests.serving.http.made_up import MadeUpEngine, serving
from tests.serving.http.test_requests import LIMITS, both, read, refusal

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}


TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f>"],
}
FORMAT = {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}


# --- reading --------------------------------------------------------------------------------------


STATED: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": {"type": "json_object"}}, JsonObject()),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "number", "schema": SCHEMA, "strict": True},
            }
        },
        JsonSchema(SCHEMA),
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}},
        JsonSchema(True),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, JsonSchema(SCHEMA)),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, JsonSchema(SCHEMA)),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        JsonSchema(SCHEMA, whitespace=False),
    ),
    ({"structured_outputs": {"json_object": True, "regex": None}}, JsonObject()),
    ({"structured_outputs": {"regex": "a+"}}, Regex("a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, Choice(["a", "b"])),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Lark('start: "a"')),
    ({"response_format": TAG}, StructuralTag(TAG)),
    ({"response_format": FORMAT}, StructuralTag(FORMAT)),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, StructuralTag(TAG)),
    ({"guided_json": SCHEMA}, JsonSchema(SCHEMA)),
    ({"guided_json": json.dumps(SCHEMA), "guided_regex": None}, JsonSchema(SCHEMA)),
    ({"guided_regex": "[ab]"}, Regex("[ab]")),
    ({"guided_choice": ["a", "b"], "guided_decoding_backend": "auto"}, Choice(["a", "b"])),
    ({"guided_grammar": 'start: "a"'}, Lark('start: "a"')),
]


@both
@pytest.mark.parametrize(("stated", "grammar"), STATED, ids=str)
def test_a_grammar_is_read_under_each_of_its_names(kind: str, stated: dict, grammar: Any) -> None:
    request = read(kind, **stated)
    assert request.params.grammar == grammar
    assert request.grammar_name == next(name for name in stated if name in PARAMETERS)
    assert request.ignored == ()


@both
@pytest.mark.parametrize(
    "stated",
    [
        {"response_format": {"type": "text"}},
        {"response_format": None, "guided_json": None},
        {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False}},
        {"guided_regex": "", "guided_choice": [], "guided_grammar": ""},
    ],
    ids=str,
)
def test_these_state_no_grammar(kind: str, stated: dict) -> None:
    assert read(kind, **stated) == read(kind)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "xml"}}, "'xml'"),
    ({"response_format": {}}, "None"),
    ({"response_format": {"type": ["json_object"]}}, "json_object"),
    ({"response_format": {"type": "json_schema"}}, "schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}}, "object"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": "{"}}}, "not a JSON"),
    ({"response_format": "json_object"}, "object"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "json and regex"),
    ({"structured_outputs": {"xml": "a"}}, "'xml'"),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " *"}}, "whitespace_pattern"),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": 1}}, "whitespace"),
    ({"structured_outputs": {"json_object": "yes"}}, "json_object"),
    ({"structured_outputs": {"structural_tag": "{"}}, "structural_tag"),
    ({"response_format": {"type": "structural_tag"}}, "structures"),
    ({"structured_outputs": {"regex": ["a"]}}, "regular expression"),
    ({"structured_outputs": {"choice": []}}, "words"),
    ({"structured_outputs": {"choice": "abc"}}, "words"),
    ({"structured_outputs": {"grammar": "%llguidance {}"}}, "llguidance"),
    ({"guided_choice": ["a", ""]}, "words"),
    ({"guided_choice": ["a", 1]}, "guided_choice"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_json too"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format too"),
]


@both
@pytest.mark.parametrize(("stated", "part"), REFUSED, ids=str)
def test_a_wrong_grammar_is_refused_by_its_parameter(kind: str, stated: dict, part: str) -> None:
    error = refusal(kind, **stated)
    assert error.status == 400
    assert error.param in stated
    assert error.message.startswith(str(error.param))
    assert part in error.message


@both
def test_a_server_without_grammars_says_so(kind: str) -> None:
    limits = Limits(names=LIMITS.names, vocab_size=100, has_grammars=False)
    error = refusal(kind, limits, guided_choice=["a"])
    assert (error.param, error.code) == ("guided_choice", "unsupported_parameter")
    assert "--grammars" in error.message
    assert read(kind, limits, response_format={"type": "text"}).params.grammar is None


# --- a real server --------------------------------------------------------------------------------


class Person(BaseModel):
    """A type with a nested list and a choice."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)
    kind: Literal["friend", "stranger"]
    scores: list[int] = Field(max_length=2)


PROMPT: Any = [{"role": "user", "content": "person = "}]


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60)


def completed(choice: Any) -> Any:
    """Return the field that OpenAI's classes do not declare."""
    return getattr(choice, "grammar_completed", "missing")


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_openais_client_parses_typed_answers(client: openai.OpenAI, temperature: float) -> None:
    """Check several choices, one by one and in a stream."""
    options: Any = {"temperature": temperature, "seed": 1, "max_tokens": 230}
    parsed = client.chat.completions.parse(
        model="tiny", messages=PROMPT, response_format=Person, n=3, **options
    )
    for choice in parsed.choices:
        assert isinstance(choice.message.parsed, Person)
        assert choice.finish_reason == "stop"
        assert completed(choice) is True
    texts = [choice.message.content for choice in parsed.choices]
    assert (len(set(texts)) > 1) == (temperature > 0)
    with client.chat.completions.stream(
        model="tiny", messages=PROMPT, response_format=Person, **options
    ) as stream:
        whole = stream.get_final_completion()
    assert whole.choices[0].message.content == texts[0]
    assert whole.choices[0].message.parsed == parsed.choices[0].message.parsed


@pytest.mark.full
@pytest.mark.thorough_except("answer: ")
@pytest.mark.parametrize("prompt", ["answer: ", "import sys"])
def test_a_text_is_the_one_that_the_library_generates(client: openai.OpenAI, prompt: str) -> None:
    """Check each way to state a grammar, among requests without one."""
    generate = specjax.load("embedded")
    ways: list[tuple[dict[str, Any], Any, str]] = [
        ({"guided_regex": "[0-9]{3}-[a-z]{2,5}"}, Regex("[0-9]{3}-[a-z]{2,5}"), "[0-9]{3}-[a-z]+"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, Choice(["yes", "no"]), "yes|no"),
        (
            {"structured_outputs": {"grammar": 'start: "(" start ")" | "x"'}},
            Lark('start: "(" start ")" | "x"'),
            r"\(*x\)*",
        ),
        ({"guided_json": SCHEMA}, JsonSchema(SCHEMA), r"\{\s*\"n\"\s*:\s*[0-9]{1,2}\s*\}"),
    ]
    for seed, (stated, grammar, pattern) in enumerate(ways):
        options: Any = {"max_tokens": 40, "temperature": 0.9, "top_p": 0.9, "seed": seed}
        answer = client.completions.create(
            model="tiny", prompt=prompt, extra_body=stated, **options
        )
        expected = generate(
            prompt,
            grammar=grammar,
            max_new_tokens=40,
            temperature=0.9,
            top_p=0.9,
            seed=seed,
        )
        choice = answer.choices[0]
        assert choice.text == expected.text
        assert completed(choice) == expected.grammar_completed
        assert choice.finish_reason == ("stop" if completed(choice) else "length")
        assert not completed(choice) or re.fullmatch(pattern, choice.text)


AMBIGUOUS = 'start start start | start start | "a" | "b" | ""'


@pytest.mark.full
@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (
            {"guided_json": {"allOf": [{"multipleOf": 9973}, {"multipleOf": 10007}]}},
            "to compile; simplify it",
        ),
        ({"guided_regex": "(" * 70 + "a" + ")" * 70}, "nested 70 deep; at most 64"),
        ({"guided_grammar": 'start: "' + "a" * 300_000 + '"'}, "at most 256000 are allowed"),
        (
            {"guided_grammar": f"start: {AMBIGUOUS}", "min_tokens": 48},
            "this text failed: grammar: the text cannot go on",
        ),
    ],
)
def test_what_exceeds_a_bound_is_the_requests_error(
    client: openai.OpenAI, stated: dict[str, Any], message: str
) -> None:
    """Check grammars that the checker refuses, and one that ends its text later."""
    options: Any = {"model": "tiny", "prompt": "x = ", "max_tokens": 48, "temperature": 2}
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**options, extra_body=stated)
    assert message in str(refused.value)
    answer = client.completions.create(**options, extra_body={"guided_choice": ["yes", "no"]})
    assert answer.choices[0].text in ("yes", "no")


@pytest.mark.full
def test_a_text_that_is_cut_says_that_it_is_not_whole(client: openai.OpenAI) -> None:
    """Check max_tokens and a stop string inside a grammar, whole and streamed."""
    options: Any = {"model": "tiny", "prompt": "x = ", "temperature": 0}
    cut = client.completions.create(
        **options, max_tokens=4, extra_body={"guided_regex": "[0-9]{60}"}
    ).choices[0]
    assert (cut.finish_reason, completed(cut)) == ("length", False)
    assert re.fullmatch("[0-9]+", cut.text)
    stopped = client.completions.create(
        **options, max_tokens=40, stop="b", extra_body={"guided_regex": "aab{3}"}
    ).choices[0]
    assert (stopped.text, stopped.finish_reason) == ("aa", "stop")
    assert completed(stopped) is False
    chunks = list(
        client.completions.create(
            **options, max_tokens=40, stream=True, extra_body={"guided_regex": "aab{3}"}
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == "aabbb"
    assert completed(chunks[-1].choices[0]) is True
    assert completed(chunks[0].choices[0]) == "missing"
    free = client.completions.create(**options, max_tokens=4).choices[0]
    assert completed(free) == "missing"


@pytest.mark.full
def test_a_grammar_that_does_not_compile_is_refused_and_the_server_goes_on(
    client: openai.OpenAI,
) -> None:
    bad: list[dict[str, Any]] = [
        {"guided_regex": "(a"},
        {"guided_regex": "(?=a)b"},
        {"guided_json": {"type": "array", "uniqueItems": True}},
        {"guided_json": {"$ref": "http://example.org/schema.json"}},
        {"structured_outputs": {"grammar": "start: nothing"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": False}}},
    ]
    for stated in bad:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", prompt="a", max_tokens=4, extra_body=stated)
        (name,) = stated
        assert caught.value.param == name
        assert f"{name}: " in str(caught.value)
    answer = client.completions.create(
        model="tiny", prompt="a", max_tokens=9, extra_body={"guided_choice": ["yes", "no"]}
    )
    assert answer.choices[0].text in ("yes", "no")


@pytest.mark.thorough
def test_instructor_and_pydantic_ai_get_typed_answers(server: Server, tmp_path) -> None:
    """Check both with their own versions of other packages, in an environment of their own."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True)
    python = tmp_path / "bin" / "python"
    packages = ["instructor>=1.17,<2", "pydantic-ai-slim[openai]>=2.38,<3"]
    command = [python, "-m", "pip", "install", "--quiet", *packages]
    installed = subprocess.run(command, capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"instructor and pydantic-ai cannot be had: {installed.stderr[-300:]}")
    script = Path(__file__).with_name("typed_clients.py")
    run = subprocess.run(
        [python, script, f"{server.url}/v1", KEY], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    answers = [Person.model_validate(answer) for answer in json.loads(run.stdout)]
    assert len(answers) == 2


def test_the_errors_are_errors_of_requests() -> None:
    """Check that no reader of a grammar raises anything else."""
    with pytest.raises(RequestError):
        read(structured_outputs={"json": {"a": float("inf")}})


# --- waiting for a grammar, in a server whose engine is made up -----------------------------------


class Compiling(MadeUpEngine):
    """An engine whose grammars are compiled as soon as the test allows it.

    Attributes:
        may_go_on: set by the test.
        begun: the grammars whose compilation has begun.
        ready: the compiled grammars.
    """

    has_grammars = True

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on, self.begun = threading.Event(), []
        self.ready: dict[Any, Any] = {}

    def compiled_grammar(self, grammar: Any) -> Any:
        return self.ready.get(grammar)

    def compile_grammar(self, grammar: Any, *, megabytes: float = 0.0) -> Any:
        self.begun.append(grammar)
        assert self.may_go_on.wait(20)
        if grammar == Regex("wrong"):
            raise InputError(f"grammar={grammar!r}: no")
        return SimpleNamespace(grammar=grammar)


def asking(service: Service, stated: dict[str, Any]) -> Awaitable[Any]:
    """Return what waits for the grammar of a request."""
    return service.compile_grammar(read("completion", **stated), [])


def test_requests_that_wait_for_one_grammar_take_one_thread_and_compile_it_once() -> None:
    """Check that others do not wait, whatever number of requests has a slow grammar."""
    engine = Compiling()
    service = Service(cast(Any, engine), AppOptions(("tiny",)))
    engine.ready[Regex("known")] = compiled_before = object()

    async def ask() -> list[Any]:
        slow = [asyncio.ensure_future(asking(service, {"guided_regex": "a"})) for _ in range(100)]
        wrong = [
            asyncio.ensure_future(asking(service, {"guided_regex": "wrong"})) for _ in range(2)
        ]
        assert await asking(service, {"guided_regex": "known"}) is compiled_before
        while len(engine.begun) < 2:
            await asyncio.sleep(0.001)
        slow.pop().cancel()  # its client has gone, and the others still wait
        assert len(service.grammar_jobs._running) == 2
        engine.may_go_on.set()
        return await asyncio.gather(*slow, *wrong, return_exceptions=True)

    *compiled, first, second = asyncio.run(asyncio.wait_for(ask(), 30))
    assert len(set(map(id, compiled))) == 1 and len(compiled) == 99
    for error in (first, second):
        assert isinstance(error, RequestError) and error.message == "guided_regex: no"
    assert sorted(engine.begun, key=str) == [Regex("a"), Regex("wrong")]
    assert not service.grammar_jobs._running


def test_too_many_grammars_that_wait_are_refused_and_known_ones_are_not() -> None:
    engine = Compiling()
    service = Service(cast(Any, engine), AppOptions(("tiny",)))
    engine.ready[Regex("known")] = compiled_before = object()

    async def ask() -> None:
        waiting = [
            asyncio.ensure_future(asking(service, {"guided_regex": "a" * (count + 1)}))
            for count in range(MAX_JOBS)
        ]
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="32 grammars are being compiled") as refused:
            await asking(service, {"guided_regex": "b"})
        assert refused.value.status == 429
        assert await asking(service, {"guided_regex": "known"}) is compiled_before
        assert len(engine.begun) <= CONCURRENT  # memory: each may take as much as in the checker
        engine.may_go_on.set()
        await asyncio.gather(*waiting)

    asyncio.run(asyncio.wait_for(ask(), 30))


def test_a_grammar_for_which_there_is_no_thread_leaves_nothing_behind(monkeypatch) -> None:
    service = Service(cast(Any, Compiling()), AppOptions(("tiny",)))

    def submit(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(service.grammar_jobs._threads, "submit", submit)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="new thread"):
            asyncio.run(asyncio.wait_for(asking(service, {"guided_regex": "a"}), 30))
    assert not service.grammar_jobs._running


def test_a_compiled_grammar_stays_with_its_request() -> None:
    """Check that the texts of a request get what was compiled for it, whatever is forgotten."""
    engine = Compiling()
    engine.may_go_on.set()
    with serving(engine) as (host, port):
        client = openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none", timeout=60)
        for stated in ({"guided_regex": "a"}, {}):
            client.completions.create(
                model="tiny", prompt="x", max_tokens=2, n=2, extra_body=stated
            )
    *constrained, free, _ = [it.settings["compiled_grammar"] for it in engine.submitted]
    assert len({*map(id, constrained)}) == 1 and constrained[0] is not None and free is None
