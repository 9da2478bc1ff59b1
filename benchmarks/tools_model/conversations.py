"""Random conversations with tools, from a seed.

A conversation has a system text, a list of tools with random names, and turns: a request, a call
with arguments of the request, the tool's result, and a short answer. Some turns have no call. The
descriptions are sentences from the docstrings of Python's standard library.
"""

import json
import random
import re
import string
import sysconfig
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_SENTENCE = re.compile(r'"""\s*([A-Z][a-z]+ [^"\\]{15,400}?\.)(?:\s|""")')
_PLAIN = re.compile(r"[A-Za-z0-9 ,.'()/_-]{25,120}")
_WORD = re.compile(r"\b[a-z]{3,12}\b")
_OUTSIDE = {"test", "tests", "idlelib", "lib2to3", "site-packages", "pydoc_data"}

_NOUNS = """
    account address airport alarm album amount animal answer article author balance bank bed
    bill bird birthday boat book bottle box bread bridge budget building bus calendar call
    camera car card cat chair chapter charge child city class clock cloud coffee color comment
    company computer concert contact contract cost country course currency customer daily date
    day delivery device dinner discount distance doctor document dog door email employee engine
    error event exchange expense family farm fee film flight floor flower food forecast fruit
    game garden gift goal grade group guest hall head heart history holiday hospital hotel hour
    house humidity image invoice island issue item job journey key kitchen lake language lesson
    letter library light location lunch machine mail map market match meal measure meeting
    member memory menu message meter metro minute model money month moon morning mountain movie
    museum music network news night note number offer office order package page paper park part
    partner party password payment person phone photo picture place plan plane planet plant
    player playlist police population post price printer problem product profile project
    question queue radio rain rate recipe reminder rent repair report reservation restaurant
    result review river road room route sale salary schedule school score sea seat sensor server
    shelf ship shop signal singer size sky snow song speed stage star station stock stone store
    storm story street student subject summer sun supplier surface table task tax taxi teacher
    team temperature theater thing ticket tide time title tool tour town toy traffic train
    translation travel tree trip truck user vehicle village voice volume wall warehouse water
    weather website week weight wind window winter word work world year zone
"""
EVERYDAY = tuple(_NOUNS.split())
_ACTIONS = (
    *(
        "get",
        "find",
        "show",
        "list",
        "create",
        "delete",
        "update",
        "send",
        "read",
        "write",
        "check",
    ),
    *(
        "search",
        "compute",
        "convert",
        "book",
        "cancel",
        "open",
        "close",
        "run",
        "execute",
        "look up",
    ),
    *("fetch", "count", "compare", "plan", "print", "store", "move", "add", "remove", "translate"),
)
_PARAMETERS = (
    *("city", "path", "command", "query", "url", "name", "date", "limit", "file", "text", "code"),
    *(
        "email",
        "id",
        "user",
        "title",
        "language",
        "unit",
        "amount",
        "days",
        "cmd",
        "input",
        "message",
    ),
    *("location", "country", "a", "b", "x", "y", "expression", "workdir", "format", "pattern"),
)
_PLACES = (
    *("Oslo", "Lima", "Cairo", "Kyoto", "Quito", "Delhi", "Porto", "Accra", "Paris", "London"),
    *("Berlin", "Tokyo", "Rome", "Boston", "Zurich", "Madrid", "Vienna", "Dublin", "Sydney"),
)
_COMMANDS = (
    *(
        "ls -la",
        "cat {}",
        "echo {}",
        "pwd",
        "grep -rn {} .",
        "git status",
        "wc -l {}",
        "head -n 5 {}",
    ),
    *("python {}", "mkdir -p {}", "touch {}", "find . -name {}", "rm {}", "echo {} > {}", "date"),
)
_OF = ("of", "for", "in", "by", "from")
_SYLLABLES = ("b", "ch", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "st", "t", "v", "z")
_SMALL_TALK = {
    "Hello": "Hello! What can I do for you?",
    "Hi": "Hello! What can I do for you?",
    "Thanks": "You are welcome.",
    "Thank you very much": "You are welcome.",
    "Good morning": "Good morning! What can I do for you?",
    "Who are you": "I am a small model that calls tools.",
    "Goodbye": "Goodbye.",
    "How are you": "I am fine. What can I do for you?",
}


@dataclass(frozen=True)
class Phrases:
    """The sentences and words that conversations are made from.

    Attributes:
        sentences: descriptions, each a sentence with its full stop.
        words: words in lower case.
    """

    sentences: tuple[str, ...]
    words: tuple[str, ...]


@cache
def read_phrases(is_held_out: bool = False) -> Phrases:
    """Read the sentences of the standard library's docstrings, and all words.

    A tenth of the sentences is held out: no training conversation has one of them. Which these are
    is decided by a hash of the sentence.
    """
    library = Path(sysconfig.get_path("stdlib"))
    sentences = set()
    for path in sorted([*library.glob("*.py"), *library.glob("[a-z]*/*.py")]):
        if not _OUTSIDE.isdisjoint(path.relative_to(library).parts):
            continue
        for text in _SENTENCE.findall(path.read_text(encoding="utf-8", errors="ignore")):
            sentence = " ".join(text.split())
            if _PLAIN.fullmatch(sentence):
                sentences.add(sentence)
    words = {word for sentence in sentences for word in _WORD.findall(sentence)} | {*EVERYDAY}
    chosen = [
        sentence
        for sentence in sorted(sentences)
        if (zlib.crc32(sentence.encode()) % 10 == 0) is is_held_out
    ]
    return Phrases(tuple(chosen), tuple(sorted(words)))


@dataclass
class Conversation:
    """A conversation as a client sends it.

    Attributes:
        tools: declarations of tools, in the form of OpenAI's API.
        messages: the messages, in the same form. The last one is an answer.
    """

    tools: list[dict[str, Any]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class _Tool:
    declaration: dict[str, Any]
    hints: tuple[str, ...]  # texts that choose this tool alone, without its name

    @property
    def name(self) -> str:
        return self.declaration["function"]["name"]

    @property
    def parameters(self) -> dict[str, Any]:
        return self.declaration["function"]["parameters"]


class Writer:
    """A writer of random conversations. Equal seeds give equal conversations."""

    def __init__(self, seed: str, is_held_out: bool = False) -> None:
        """Set the seed.

        ``is_held_out`` chooses the sentences that no training conversation has.
        """
        self._rng = random.Random(seed)
        self._phrases = read_phrases(is_held_out)

    def conversation(
        self,
        list_characters: int,
        system_characters: int = 0,
        turns: int = 1,
        calls_first: bool = False,
    ) -> Conversation:
        """Write a conversation.

        Args:
            list_characters: the size of the list of tools as JSON; 0 for a chat without tools.
            system_characters: the size of the system text; 0 for none.
            turns: the number of requests.
            calls_first: whether the first turn has exactly one call.
        """
        rng = self._rng
        chat, tools = Conversation(), []
        used: set[str] = set()
        while list_characters > 0:
            tool = self._tool(used)
            tools.append(tool)
            list_characters -= len(json.dumps(tool.declaration)) + 1
        chat.tools = [tool.declaration for tool in tools]
        if system_characters:
            chat.messages.append({"role": "system", "content": self._text(system_characters)})
        for turn in range(turns):
            kind = rng.random()
            if not tools or (kind < 0.12 and not (calls_first and turn == 0)):
                self._talk(chat)
            else:
                self._call(chat, rng.sample(tools, 1)[0])
        return chat

    # --- tools ---

    def _tool(self, used: set[str]) -> _Tool:
        """Return a tool with a name and sentences that are not used yet."""
        rng = self._rng
        name = self._unused(self._name, used)
        if rng.random() < 0.35:
            description = self._unused(self._action, used)
        else:
            description = self._unused(lambda: rng.choice(self._phrases.sentences), used)
        first = description[0].lower() + description[1:]
        words = first.removesuffix(".").split()
        # Five words or more say which tool is meant.
        count = rng.randint(min(5, len(words)), len(words))
        start = rng.randrange(len(words) - count + 1)
        part = " ".join(words[start : start + count])
        hints = (first, part)
        while rng.random() < 0.3:
            description += " " + self._unused(lambda: rng.choice(self._phrases.sentences), used)
        function: dict[str, Any] = {"name": name, "description": description}
        if rng.random() < 0.15:
            function["strict"] = rng.random() < 0.5
        function["parameters"] = self._schema()
        return _Tool({"type": "function", "function": function}, hints)

    def _unused(self, write: Callable[[], str], used: set[str]) -> str:
        while (result := write()) in used:
            pass
        used.add(result)
        return result

    def _action(self) -> str:
        """Return a sentence like those of programs of every day."""
        rng = self._rng
        thing, of, more = rng.choice(EVERYDAY), rng.choice(_OF), rng.choice(self._phrases.words)
        sentence = f"{rng.choice(_ACTIONS)} the {thing} {of} a {more}."
        return sentence[0].upper() + sentence[1:]

    def _name(self) -> str:
        rng, words = self._rng, self._phrases.words
        form = rng.random()
        if form < 0.45:
            return "_".join(rng.choice(words) for _ in range(rng.choice((1, 2, 2, 2, 3))))
        if form < 0.55:
            first, *rest = (rng.choice(words) for _ in range(rng.choice((2, 3))))
            return first + "".join(word.capitalize() for word in rest)
        if form < 0.65:
            return rng.choice(_ACTIONS).replace(" ", "_") + "_" + rng.choice(EVERYDAY)
        if form < 0.72:
            return "-".join(rng.choice(words) for _ in range(2))
        if form < 0.8:
            return f"mcp__{rng.choice(words)}__{rng.choice(words)}_{rng.choice(words)}"
        if form < 0.92:
            return "_".join(self._made_up() for _ in range(rng.choice((1, 2))))
        return (
            "".join(rng.choice(string.ascii_lowercase + "_0123456789") for _ in range(8)).strip("_")
            + "x"
        )

    def _made_up(self) -> str:
        rng = self._rng
        count = rng.choice((2, 2, 3))
        return "".join(rng.choice(_SYLLABLES) + rng.choice("aeiou") for _ in range(count))

    def _schema(self) -> dict[str, Any]:
        rng = self._rng
        properties: dict[str, Any] = {}
        for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 4))):
            name = (
                rng.choice(_PARAMETERS) if rng.random() < 0.5 else rng.choice(self._phrases.words)
            )
            if rng.random() < 0.2:
                name += "_" + rng.choice(self._phrases.words)
            kind = rng.random()
            schema: dict[str, Any]
            if kind < 0.6:
                schema = {"type": "string"}
            elif kind < 0.72:
                schema = {"type": "integer"}
            elif kind < 0.78:
                schema = {"type": "number"}
            elif kind < 0.84:
                schema = {"type": "boolean"}
            elif kind < 0.92:
                schema = {"type": "string", "enum": rng.sample(self._phrases.words, 3)}
            else:
                schema = {"type": "array", "items": {"type": "string"}}
            if rng.random() < 0.4:
                schema["description"] = self._short()
            properties[name] = schema
        names = [*properties]
        required = names if rng.random() < 0.7 else names[: rng.randrange(len(names) + 1)]
        result: dict[str, Any] = {"type": "object", "properties": properties}
        if rng.random() < 0.85:
            result["required"] = required
        if rng.random() < 0.3:
            result["additionalProperties"] = False
        return result

    # --- values and texts ---

    def _short(self) -> str:
        rng = self._rng
        words = (rng.choice(self._phrases.words) for _ in range(rng.choice((1, 2, 3))))
        return rng.choice(("The ", "A ", "")) + " ".join(words)

    def _text(self, characters: int) -> str:
        """Return sentences in paragraphs, about so many characters in all."""
        parts: list[str] = []
        while characters > 0:
            parts.append(self._rng.choice(self._phrases.sentences))
            parts.append("\n" if self._rng.random() < 0.2 else " ")
            characters -= len(parts[-2]) + 1
        return "".join(parts).strip()

    def _value(self, name: str, schema: dict[str, Any]) -> Any:
        rng, words = self._rng, self._phrases.words
        if "enum" in schema:
            return rng.choice(schema["enum"])
        kind = schema["type"]
        if kind == "integer":
            return rng.choice((rng.randrange(10), rng.randrange(100), rng.randrange(100_000)))
        if kind == "number":
            return round(rng.uniform(0, 100), rng.choice((1, 2)))
        if kind == "boolean":
            return rng.random() < 0.5
        if kind == "array":
            return [rng.choice(words) for _ in range(rng.choice((1, 2, 3)))]
        form = rng.random()
        if name in ("command", "cmd") or form < 0.1:
            command = rng.choice(_COMMANDS)
            return re.sub(
                r"\{\}", lambda _: rng.choice(words) + rng.choice(("", ".txt", ".py")), command
            )
        if name in ("city", "location") or form < 0.2:
            return rng.choice(_PLACES)
        if form < 0.3:
            folders = [rng.choice(words) for _ in range(rng.choice((1, 2, 3)))]
            return "/".join(folders) + rng.choice((".py", ".txt", ".md", ".json", ""))
        if form < 0.4:
            return f"{rng.choice(words)}@{rng.choice(words)}.com"
        if form < 0.5:
            return (
                f"{rng.randrange(2000, 2040)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}"
            )
        if form < 0.54:
            return rng.choice(self._phrases.sentences)
        if form < 0.75:
            return self._made_up().capitalize()
        return " ".join(rng.choice(words) for _ in range(rng.choice((1, 1, 2, 3))))

    # --- turns ---

    def _talk(self, chat: Conversation) -> None:
        """Append a turn without a call."""
        rng = self._rng
        if rng.random() < 0.4:
            request, answer = rng.choice([*_SMALL_TALK.items()])
            request += rng.choice((".", "!", "?", ""))
        else:
            words = rng.choice((self._short(), rng.choice(self._phrases.sentences)))
            request = f"Say: {words}"
            answer = f"I say: {words}"
        chat.messages.append({"role": "user", "content": request})
        chat.messages.append({"role": "assistant", "content": answer})

    def _call(self, chat: Conversation, tool: _Tool) -> None:
        """Append a request for a tool, the call, its result and an answer."""
        rng = self._rng
        arguments = self._arguments(tool)
        request = self._request(tool, arguments)
        letters = "".join(rng.choice(string.ascii_lowercase) for _ in range(8))
        identifier = rng.choice(("call_", "toolu_", "fc_")) + letters
        function = {"name": tool.name, "arguments": arguments}
        call = {"type": "function", "id": identifier, "function": function}
        result, answer = self._result()
        chat.messages += [
            {"role": "user", "content": request},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": identifier, "content": result},
            {"role": "assistant", "content": answer},
        ]

    def _arguments(self, tool: _Tool) -> dict[str, Any]:
        required = tool.parameters.get("required", [])
        return {
            name: self._value(name, schema)
            for name, schema in tool.parameters["properties"].items()
            if name in required or self._rng.random() < 0.4
        }

    def _request(self, tool: _Tool, arguments: dict[str, Any]) -> str:
        """Return a request that names the tool or describes it, and has the arguments."""
        rng = self._rng
        form = rng.random()
        if form < 0.35:
            name = rng.choice(("`{}`", '"{}"', "`{}`", '"{}"', "the tool `{}`", 'the "{}" tool'))
            what = rng.choice(("Call ", "Use ", "Please call ", "Run ", "I need ", "Please use "))
            what += name.format(tool.name)
        elif form < 0.75:
            what = rng.choice(tool.hints).removesuffix(".")
            lead = rng.choice(("Please ", "", "Could you ", "I want to ", "Now ", "Can you "))
            what = lead + what if lead else what[0].upper() + what[1:]
        else:
            lead = rng.choice(
                ("What is the ", "I need the ", "Show me ", "Please: ", "Tell me the ")
            )
            what = lead + rng.choice(tool.hints).removesuffix(".")
        if not arguments:
            return what + rng.choice((".", "", "?", "!"))
        text = json.dumps(arguments)
        if rng.random() < 0.6:
            lead = rng.choice((" with ", " with ", ": ", " with the arguments "))
        else:
            lead, text = " with ", text[1:-1]
        return what + lead + text

    def _result(self) -> tuple[str, str]:
        """Return a tool's result, and the answer after it, which repeats it."""
        rng = self._rng
        text = rng.choice((self._short(), rng.choice(self._phrases.sentences)))
        if rng.random() < 0.4:
            names = (rng.choice(self._phrases.words) for _ in range(rng.choice((1, 1, 2, 3))))
            kind = rng.choice(("integer", "string"))
            text = json.dumps({name: self._value(name, {"type": kind}) for name in names})
        rest = f"\n{rng.choice(self._phrases.sentences)}" if rng.random() < 0.2 else ""
        return text + rest, text + rest
