"""Check that the guide's tables of paths and parameters are those of the code.

A parameter that is added to or taken from either side alone fails here.
"""

import json
import re
from collections.abc import Callable, Iterator

import pytest
from starlette.routing import Route, WebSocketRoute

from specjax.serving.http import messages_requests, requests, responses_requests, translation
from specjax.serving.http.app import make_app
from specjax.serving.http.errors import RequestError
from tests.documents import ROOT
from tests.serving.http.made_up import MadeUpEngine
from tests.serving.http.test_app import service_of

PAGE = (ROOT / "docs" / "guides" / "serve.md").read_text()

Row = tuple[list[str], str]
"""The names in the first cell of a row of a table, and its second cell."""


def rows_under(page: str, heading: str) -> Iterator[Row]:
    """Yield the rows of the table under a heading."""
    section = page.partition(f"\n{heading}\n")[2]
    table = re.search(r"^\|.*\n\|[-|]+\n((?:\|.*\n)+)", section, re.MULTILINE)
    assert table is not None, heading
    for line in table[1].splitlines():
        _, names, meaning, _ = re.split(r"(?<!\\)\|", line)
        yield re.findall(r"`([^`]+)`", names), meaning.strip()


def once(names: list[str]) -> set[str]:
    """Return names that a table must not have twice."""
    assert sorted(set(names)) == sorted(names)
    return set(names)


# --- paths ----------------------------------------------------------------------------------------


def paths_of_page(page: str) -> set[str]:
    """Return the paths in the table of endpoints, each with its methods: ``GET /metrics``."""
    paths: list[str] = []
    for names, _ in rows_under(page, "## Endpoints"):
        methods, is_complete = ["WebSocket"], True
        for name in names:
            words = name.split()
            if stated := [word for word in words if not word.startswith("/")]:
                methods = stated if is_complete else [*methods, *stated]
            is_complete = words[-1].startswith("/")
            if is_complete:
                paths += [f"{method} {words[-1]}" for method in methods]
    return once(paths)


def paths_of_code() -> set[str]:
    """Return the routes of the application, each with its methods."""
    paths: list[str] = []
    for route in make_app(service_of(MadeUpEngine())).routes:
        assert isinstance(route, Route | WebSocketRoute)
        path = re.sub(r"\{(\w+):path\}", r"{\1}", route.path)
        if isinstance(route, WebSocketRoute):
            paths.append(f"WebSocket {path}")
        elif path != "/v1/drafts":  # its GET only says that it needs a WebSocket
            paths += [f"{method} {path}" for method in (route.methods or set()) - {"HEAD"}]
    return once(paths)


def test_the_table_of_endpoints_has_the_routes_of_the_application() -> None:
    assert paths_of_page(PAGE) == paths_of_code()


# --- parameters -----------------------------------------------------------------------------------


def shared_by(kind: str) -> Callable[[str], set[str]]:
    """Return a function that reads the parameters of completions or of chats from the page."""

    def read(page: str) -> set[str]:
        opposite = {"completions": "chats:", "chats": "completions:"}[kind]
        rows = rows_under(page, "## Request parameters")
        return once(
            [name for names, meaning in rows if not meaning.startswith(opposite) for name in names]
        )

    return read


def all_under(heading: str) -> Callable[[str], set[str]]:
    """Return a function that reads all parameters of a table from the page."""
    return lambda page: once([name for names, _ in rows_under(page, heading) for name in names])


def of_path(path: str) -> Callable[[str], set[str]]:
    """Return a function that reads the parameters of one path from a table of small paths."""

    def read(page: str) -> set[str]:
        rows = rows_under(page, "### Parameters of `/tokenize` and `/detokenize`")
        ((_, meaning),) = ((names, meaning) for names, meaning in rows if names == [path])
        return once(re.findall(r"`([^`]+)`", meaning))

    return read


TABLES: dict[str, tuple[Callable[[str], set[str]], set[str]]] = {
    "completions": (
        shared_by("completions"),
        set(requests._CompletionFields.__struct_fields__),
    ),
    "chats": (shared_by("chats"), set(requests._ChatFields.__struct_fields__)),
    "responses": (
        all_under("### Parameters of `/v1/responses`"),
        set(responses_requests.ResponsesFields.__struct_fields__),
    ),
    "messages": (
        all_under("### Parameters of `/v1/messages`"),
        set(messages_requests.MessagesFields.__struct_fields__),
    ),
    "responses and messages": (
        all_under("### Parameters of both"),
        set(translation.SHARED),
    ),
    "tokenize": (of_path("/tokenize"), set(requests._TokenizeFields.__struct_fields__)),
    "detokenize": (of_path("/detokenize"), set(requests._DetokenizeFields.__struct_fields__)),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_parameters_has_the_fields_that_the_code_reads(name) -> None:
    read, fields = TABLES[name]
    assert read(PAGE) == fields


@pytest.mark.parametrize("name", TABLES)
def test_a_parameter_that_is_on_one_side_alone_is_detected(name) -> None:
    read, fields = TABLES[name]
    for parameter in fields:
        # The name is taken out of the tables only; the text below them may still have it.
        without = re.sub(rf"^(\|.*?)`{parameter}`", r"\1", PAGE, flags=re.MULTILINE)
        assert read(without) == fields - {parameter}


READERS: dict[str, Callable[[bytes], object]] = {
    "completions": lambda body: requests.read_completion(body, LIMITS),
    "chats": lambda body: requests.read_chat(body, LIMITS),
    "responses": lambda body: responses_requests.read_response(body, LIMITS),
    "messages": lambda body: messages_requests.read_messages(body, LIMITS),
    "tokenize": lambda body: requests.read_tokenize(body, LIMITS),
    "detokenize": lambda body: requests.read_detokenize(body, LIMITS),
}
LIMITS = requests.Limits(names=("tiny",), vocab_size=3072, takes_tools=True)
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
BODIES: dict[str, dict] = {
    "completions": {"model": "tiny", "prompt": "a"},
    "chats": {"model": "tiny", **CHAT},
    "responses": {"model": "tiny", "input": "Hello"},
    "messages": {"model": "tiny", "max_tokens": 4, **CHAT},
    "tokenize": {"prompt": "a"},
    "detokenize": {"tokens": [1]},
}


@pytest.mark.parametrize("path", READERS)
def test_a_documented_parameter_with_a_value_of_a_wrong_type_is_refused_by_its_name(path) -> None:
    """A name that nothing reads would be ignored."""
    parameters = set(TABLES[path][1])
    if path in ("responses", "messages"):
        parameters |= translation.SHARED
    for parameter in parameters:
        errors: list[RequestError] = []
        for value in (0.5, "x", [0.5]):
            try:
                READERS[path](json.dumps(BODIES[path] | {parameter: value}).encode())
            except RequestError as error:
                errors.append(error)
        assert errors, f"{parameter} of {path} takes any value"
        assert all(parameter in (error.param or str(error)) for error in errors), (
            f"{parameter} of {path}: {errors}"
        )
