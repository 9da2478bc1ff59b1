"""Answers with reasoning and tool calls, and their text in the templates of published models."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from specjax.chat import ChatAnswer, ChatFamily, ToolCall, families
from tests.chat.published_templates import template

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {"type": "object", "properties": properties, "required": []},
        },
    }
    for name, properties in {
        "get_weather": {
            "city": {"type": "string", "description": "where"},
            "days": {"type": "integer", "description": "how many"},
            "is_short": {"type": "boolean", "description": "whether"},
            "limits": {"type": "object", "description": "bounds"},
            "hours": {"type": "array", "description": "when", "items": {"type": "number"}},
        },
        "run-code.v2": {"code": {"type": "string", "description": "a program"}},
    }.items()
]

WEATHER = ToolCall(
    "get_weather",
    json.dumps(
        {
            "city": "Zürich 🎉",
            "days": -3,
            "is_short": True,
            "limits": {"low": 1.5, "nested": {"keys": [1, "two", {}]}},
            "hours": [6, 12.25],
        },
        ensure_ascii=False,
    ),
)
CODE = ToolCall(
    "run-code.v2",
    json.dumps({"code": '    if a["x"] == \'y\':\n        print(f"{b}: {{\\\\}}")\n\n# [1]</p>'}),
)
LINES = ToolCall(
    "run-code.v2",
    json.dumps({"code": "\n\tdef é():\n\n\t\treturn '日本\u2028🎉'\r\n  "}, ensure_ascii=False),
)
EMPTY = ToolCall("get_weather", "{}")

ANSWERS = {
    "text": ChatAnswer('It rains.\n\n  - much\n  - 日本語 {"a": 1}'),
    "thought": ChatAnswer("4", "2 + 2\n\nis <b>4</b>"),
    "call": ChatAnswer("", "", (WEATHER,)),
    "code": ChatAnswer("", "", (CODE,)),
    "lines": ChatAnswer("", "", (LINES,)),
    "three calls": ChatAnswer("", "", (EMPTY, LINES, EMPTY)),
    "no arguments": ChatAnswer("", "", (EMPTY,)),
    "two calls": ChatAnswer("", "", (WEATHER, CODE)),
    "text and calls": ChatAnswer("I look it up.", "", (CODE, WEATHER)),
    "thought and call": ChatAnswer("", "I need the weather.", (WEATHER,)),
}


@dataclass(frozen=True)
class Published:
    """A published template.

    Attributes:
        template: its name.
        family: the family that it belongs to.
        ends: what the template writes behind an answer. The end token has no text in an answer.
        cases: the answers that the template writes.
        settings: variables for the template.
        field: the name of a message's reasoning.
    """

    template: str
    family: str
    ends: tuple[str, ...]
    cases: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    field: str = "reasoning_content"

    def prompt(self) -> str:
        """Return the text of a chat up to the answer."""
        return self._render([_QUESTION], add_generation_prompt=True)

    def written(self, answer: ChatAnswer) -> tuple[str, str]:
        """Return the text of a prompt, and the text of an answer to it."""
        prompt = self.prompt()
        chat = self._render([_QUESTION, self._message(answer)], add_generation_prompt=False)
        for end in self.ends:
            chat = chat.removesuffix(end)
        if not chat.startswith(prompt):
            # The prompt of an answer without reasoning has tags that a chat in the past lacks, or
            # the other way round.
            anchor = self.chat_family().form.anchor.pattern
            prompt = chat[: list(anchor.finditer(chat))[-1].end()]
        return prompt, chat[len(prompt) :]

    def chat_family(self) -> ChatFamily:
        """Return the family that the template belongs to."""
        (family,) = (family for family in families() if family.name == self.family)
        return family

    def _message(self, answer: ChatAnswer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if answer.reasoning:
            message[self.field] = answer.reasoning
        if answer.tool_calls:
            calls = []
            for index, call in enumerate(answer.tool_calls):
                arguments = call.arguments if self.template == "deepseek_v3" else call.values()
                function = {"name": call.name, "arguments": arguments}
                calls.append({"type": "function", "id": f"call0000{index}", "function": function})
            message["tool_calls"] = calls
            if not answer.content and self.template in ("deepseek_v3", "deepseek_v3_1"):
                message["content"] = None
            elif not answer.content and self.template == "gpt_oss":
                del message["content"]
        return message

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        (text,), _ = render_jinja_template(
            conversations=[messages],
            chat_template=template(self.template),
            tools=TOOLS,
            add_generation_prompt=add_generation_prompt,
            bos_token="<s>",
            eos_token="</s>",
            **self.settings,
        )
        return text


_QUESTION = {"role": "user", "content": "Weather? <think> <tool_call> [TOOL_CALLS] <|channel|> {"}

_DEEPSEEK_END = "<\N{FULLWIDTH VERTICAL LINE}end▁of▁sentence\N{FULLWIDTH VERTICAL LINE}>"

_CALLS = ("call", "code", "lines", "no arguments", "two calls", "three calls")
_ALL = tuple(ANSWERS)

PUBLISHED = [
    Published("qwen2_5", "qwen3", ("<|im_end|>\n",), ("text", *_CALLS, "text and calls")),
    Published("qwen3", "qwen3", ("<|im_end|>\n",), _ALL),
    Published("qwen3_5", "qwen3_5", ("<|im_end|>\n",), _ALL),
    Published("qwen3_coder", "qwen3_5", ("<|im_end|>\n",), ("text", *_CALLS, "text and calls")),
    Published("granite4", "granite4", ("<|end_of_text|>\n",), ("text", *_CALLS, "text and calls")),
    Published("granite3_3", "granite3", ("<|end_of_text|>\n",), ("text",)),
    Published(
        "llama3_1", "llama3", ("<|eot_id|>",), ("text", "call", "code", "lines", "no arguments")
    ),
    Published(
        "llama3_2", "llama3", ("<|eot_id|>",), ("text", "call", "code", "lines", "no arguments")
    ),
    Published("llama4", "llama4", ("<|eot|>",), ("text", *_CALLS, "text and calls")),
    Published("mistral_nemo", "mistral_list", ("</s>",), ("text", *_CALLS)),
    Published("mistral_small_3_2", "mistral_named", ("</s>",), ("text", *_CALLS)),
    Published("ministral_3", "mistral_named", ("</s>",), ("text", *_CALLS, "text and calls")),
    # DeepSeek-V3's template ends the answer behind each call after the first.
    Published("deepseek_v3", "deepseek_v3", (_DEEPSEEK_END,), ("text", *_CALLS[:-1])),
    Published(
        "deepseek_v3_1",
        "deepseek_v3_1",
        (_DEEPSEEK_END,),
        ("text", *_CALLS, "text and calls"),
    ),
    Published(
        "gpt_oss",
        "gpt_oss",
        ("<|return|>", "<|call|>"),
        ("text", "thought", "call", "code", "lines", "no arguments", "thought and call"),
        field="thinking",
    ),
    Published(
        "gemma4",
        "gemma4",
        ("<|tool_response>", "<turn|>\n"),
        ("text", *_CALLS, "thought and call"),
        {"enable_thinking": True},
    ),
    Published("phi4_mini", "phi4_mini", ("</s>", "<|end|>"), ("text",)),
    Published("phi4_reasoning", "thoughts", ("<|im_end|>",), ("text",)),
]
