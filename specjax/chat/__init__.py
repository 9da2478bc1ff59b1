"""Answers of chat models as regions: content, reasoning and tool calls.

A model writes its reasoning and its calls of tools as text with tags, and each family of models has
tags of its own. An `AnswerParser` reads that text while it grows. What it reads is data: a
``response_template`` of the tokenizer's files, or else the one of the model's family in
``specjax/chat/response_templates``.
"""

from specjax.chat.call_grammars import AfterThought, ToolCalls
from specjax.chat.call_syntax import AnswerSyntax, CallSyntax, ThoughtSyntax
from specjax.chat.events import (
    ChatAnswer,
    Event,
    RegionClosed,
    RegionGrew,
    RegionKind,
    RegionOpened,
    ToolCall,
)
from specjax.chat.forms import ResponseForm
from specjax.chat.parser import AnswerParser
from specjax.chat.recognition import (
    ChatFamily,
    answer_syntax,
    families,
    family_form,
    family_of,
    response_form,
)
from specjax.chat.tokens import AnswerText, prompt_text, tag_tokens

__all__ = [
    "AfterThought",
    "AnswerParser",
    "AnswerSyntax",
    "AnswerText",
    "CallSyntax",
    "ChatAnswer",
    "ChatFamily",
    "Event",
    "RegionClosed",
    "RegionGrew",
    "RegionKind",
    "RegionOpened",
    "ResponseForm",
    "ThoughtSyntax",
    "ToolCall",
    "ToolCalls",
    "answer_syntax",
    "families",
    "family_form",
    "family_of",
    "prompt_text",
    "response_form",
    "tag_tokens",
]
