"""The grammars of requests: their own ones, and those of their calls of tools."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from typing import Any

from specjax.chat import AfterThought, AnswerSyntax, ThoughtSyntax, ToolCalls
from specjax.errors import InputError
from specjax.grammars import CompiledGrammar, Grammar
from specjax.serving.http.errors import invalid
from specjax.serving.http.grammar_jobs import GrammarJobs
from specjax.serving.http.requests import TextRequest

MAX_FAULTY_SCHEMAS = 8
"""The number of tools with a schema that is not supported, after which no more are compiled.

The arguments of the tools behind them are any object.
"""


class AnswerGrammars:
    """The grammars of requests to a model.

    A grammar that a request states holds for the content of an answer, behind a thought. Calls of
    tools have a grammar too, so that they can be required, and their arguments are valid.

    Attributes:
        can_require_calls: whether a request may require calls.
    """

    def __init__(
        self,
        jobs: GrammarJobs,
        syntax: AnswerSyntax,
        chat_template: Any,
        *,
        has_grammars: bool,
    ) -> None:
        """Take what is known of the model.

        Args:
            jobs: compiles the grammars.
            syntax: how the model writes its answers.
            chat_template: the model's chat template; None: it has none.
            has_grammars: whether the engine has grammars.
        """
        self._jobs, self._syntax, self._chat_template = jobs, syntax, chat_template
        self.can_require_calls = has_grammars and syntax.calls is not None

    def has_calls(self, request: TextRequest) -> bool:
        """Return whether calls in the answer to a request follow a grammar, so that all parse."""
        mode, calls = request.tool_choice.mode, self._syntax.calls
        if calls is None or not self.can_require_calls or mode == "none":
            return False
        return mode == "required" or bool(calls.trigger) or request.params.grammar is not None

    def is_needed(self, request: TextRequest) -> bool:
        """Return whether a request has a grammar: its own, or that of its calls."""
        return request.params.grammar is not None or self.has_calls(request)

    async def compile(self, request: TextRequest, begin: str) -> CompiledGrammar | None:
        """Compile the grammar of a request; None if it has none.

        Args:
            request: the request.
            begin: what the prompt has of the answer, see
                `specjax.chat.ResponseForm.after_anchor`.

        Raises:
            RequestError: the grammar is wrong, or has a part that is not supported, or too many
                grammars are being compiled.
        """
        grammar, name = request.params.grammar, request.grammar_name
        thought, content = None, ""
        if request.is_chat:
            thought = self._syntax.thought_after(begin, self._chat_template)
            content = "" if begin.strip() and thought is None else self._syntax.content
        if self.has_calls(request):
            return await self._compile_calls(request, thought, content)
        if grammar is None:
            return None
        if thought is not None or content:
            grammar = AfterThought(thought, grammar, content=content)
        return await self._compile_stated(grammar, name)

    async def _compiled(self, grammar: Grammar, name: str) -> CompiledGrammar:
        """Compile a grammar. An InputError is of the reason alone, without the grammar."""
        try:
            return await self._jobs.compile(grammar, name)
        except InputError as error:
            raise InputError(str(error).removeprefix(f"grammar={grammar!r}: ")) from None

    async def _compile_stated(self, grammar: Grammar, name: str) -> CompiledGrammar:
        """Compile the grammar that a parameter states, and name the parameter in errors."""
        try:
            return await self._compiled(grammar, name)
        except InputError as error:
            raise invalid(name, f"{name}: {error}") from None

    async def _compile_calls(
        self, request: TextRequest, thought: ThoughtSyntax | None, content: str
    ) -> CompiledGrammar:
        """Compile the grammar of a request's calls.

        A schema that is not supported is refused if the tool is strict or a call is required. For
        all others, the arguments are any object. So they are for the largest schemas if all of them
        together are too large.
        """
        choice = request.tool_choice
        functions: dict[int, Mapping[str, Any]] = {
            index: tool["function"]
            for index, tool in enumerate(request.tools)
            if choice.name in ("", tool["function"]["name"])
        }
        lenient: set[int] = set()

        def grammar_of(numbers: Iterable[int], instead: Grammar | None = None) -> Grammar:
            assert self._syntax.calls is not None
            schemas = {
                functions[index]["name"]: (
                    None if index in lenient else functions[index]["parameters"]
                )
                for index in numbers
            }
            return ToolCalls(
                self._syntax.calls,
                schemas,
                thought,
                required=choice.mode == "required",
                several=request.parallel_tool_calls and not choice.name,
                instead=instead,
                content=content,
            )

        instead = None if choice.mode == "required" else request.params.grammar

        async def compiled(numbers: Iterable[int], instead: Grammar | None) -> CompiledGrammar:
            # A large schema takes long, and other requests go on meanwhile.
            grammar = await asyncio.to_thread(grammar_of, numbers, instead)
            return await self._compiled(grammar, "tools")

        try:
            return await compiled(functions, instead)
        except InputError as error:
            refusal = error
        # It is the fault of the request's own grammar, or of schemas. Each is compiled alone.
        if instead is not None:
            await self._compile_stated(instead, request.grammar_name)
        for index, function in functions.items():
            is_strict = bool(function.get("strict")) or choice.mode == "required"
            if len(lenient) >= MAX_FAULTY_SCHEMAS and not is_strict:
                lenient.add(index)
                continue
            try:
                await compiled([index], None)
            except InputError as error:
                if is_strict:
                    message = f"tools[{index}].function.parameters: {error}"
                    raise invalid("tools", message) from None
                lenient.add(index)
        # Where no schema is at fault alone, all of them together are too large.
        while True:
            if lenient:
                try:
                    return await compiled(functions, instead)
                except InputError as error:
                    refusal = error
            larger = set() if choice.mode == "required" else _larger_half(functions, lenient)
            if not larger:
                raise invalid("tools", f"tools: {refusal}")
            lenient |= larger


def _larger_half(functions: Mapping[int, Mapping[str, Any]], lenient: set[int]) -> set[int]:
    """Return the tools that have the larger half of the schemas that may be left out.

    Those of strict tools may not, and those of ``lenient`` tools are left out already.
    """
    sizes = {
        index: len(json.dumps(function["parameters"]))
        for index, function in functions.items()
        if index not in lenient and not function.get("strict")
    }
    by_size = sorted(sizes, key=lambda index: -sizes[index])
    return set(by_size[: (len(by_size) + 1) // 2])
