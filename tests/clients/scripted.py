"""An engine that computes nothing, and answers a chat by rules: it calls the tool that it is told.

The rules look at the last message of the prompt:

- After `Use read_note with name "alpha".` it calls the tool `read_note`, or the first tool whose
  name ends so, with this argument. Several such sentences make several calls.
- Where there is no such tool, it writes the arguments as JSON.
- After `Say "Hello".` it writes what is to be said.
- After a tool's result it writes `The tool says: ` and the result.

It thinks before, unless the prompt has ended the thought.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from specjax.assets import embedded
from specjax.errors import InputError
from specjax.grammars import CompiledGrammar, Grammar, GrammarCompiler
from specjax.sampling_params import SamplingParams
from specjax.serving.http.service import Service
from specjax.text import encode_chat, load_tokenizer
from tests.chat.published_templates import template
from tests.serving.http.made_up import MadeUpEngine, MadeUpHandle
from tests.serving.http.test_app import service_of

THOUGHT = "I look at the last message."
_USE = re.compile(r"\bUse (\S+) with (.*?)\.(?=\s|\Z)", re.DOTALL)
_ARGUMENT = re.compile(r'(\w+) ("(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?|true|false)')
_SAY = re.compile(r'\bSay "(.*)"', re.DOTALL)
_MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|\Z)", re.DOTALL)
_RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)


def answer_to(prompt: str) -> str:
    """Return the answer to the last message of a prompt in Qwen3's template."""
    messages = [text for role, text in _MESSAGE.findall(prompt) if role == "user"]
    last = messages[-1] if messages else ""
    return answer_to_message(last, _RESULT.findall(last), _tool_names(prompt))


def answer_to_message(text: str, results: Sequence[str], tools: Sequence[str]) -> str:
    """Return the answer to a message.

    Args:
        text: the text of the message.
        results: the results of tools, if the message has these.
        tools: the names of the tools.
    """
    if results:
        return f"The tool says: {' '.join(results)}"
    calls = []
    for ending, values in _USE.findall(text):
        arguments = dict(map(_argument, _ARGUMENT.findall(values)))
        name = next((tool for tool in tools if tool.endswith(ending)), None)
        if name is None:
            return json.dumps(arguments)
        calls.append(json.dumps({"name": name, "arguments": arguments}))
    if calls:
        return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    say = _SAY.search(text)
    return say[1] if say else "The text."


def _argument(name_and_value: tuple[str, str]) -> tuple[str, Any]:
    name, value = name_and_value
    return name, json.loads(value)


def _tool_names(prompt: str) -> list[str]:
    lines = "\n".join(_TOOLS.findall(prompt)).splitlines()
    return [json.loads(line)["function"]["name"] for line in lines if line.startswith("{")]


class ScriptedEngine(MadeUpEngine):
    """An engine of the family Qwen3 whose answers follow the rules of this module.

    A request whose grammar does not allow the answer is refused.
    """

    capacity, has_grammars = 65_536, True

    def __init__(self) -> None:
        super().__init__()
        self.ends = True
        self.tokenizer = load_tokenizer(embedded("target"))
        self.tokenizer.chat_template = template("qwen3")
        self._compiler = GrammarCompiler(self.tokenizer, len(self.tokenizer))

    def encode(self, prompt: Any, chat_template_kwargs: Any = None) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if isinstance(prompt[0], int):
            return list(prompt)
        return encode_chat(self.tokenizer, prompt, chat_template_kwargs)

    def answer(self, prompt: list[int], params: SamplingParams) -> str:
        text = self.tokenizer.decode(prompt)
        answer = answer_to(text)
        thinks = text.endswith("<|im_start|>assistant\n")
        return f"<think>\n{THOUGHT}\n</think>\n\n{answer}" if thinks else answer

    def compiled_grammar(self, grammar: Grammar) -> CompiledGrammar | None:
        return self._compiler.compiled(grammar, is_bounded=True)

    def compile_grammar(self, grammar: Grammar, *, megabytes: float = 0.0) -> CompiledGrammar:
        return self._compiler.compile(grammar, is_bounded=True, megabytes=megabytes)

    def submit(self, prompt: list[int], params: SamplingParams, **options: Any) -> MadeUpHandle:
        if params.grammar is not None:
            text = self.answer(prompt, params)
            matcher = self.compile_grammar(params.grammar).matcher(stop_token_ids=(0,))
            try:
                matcher.append(self.tokenizer.encode(text, add_special_tokens=False))
            except RuntimeError as error:
                raise InputError(f"grammar: it does not allow {text!r}: {error}") from None
            if not matcher.is_complete:
                raise InputError(f"grammar: it does not allow the end of {text!r}")
        return super().submit(prompt, params, **options)


def scripted_service() -> Service:
    """Return the service of such an engine."""
    return service_of(ScriptedEngine())
