"""Grammars of answers: calls of tools, text in which calls may come, and a thought before both."""

from collections.abc import Mapping
from typing import Any

from specjax.chat.call_syntax import CallSyntax, ThoughtSyntax
from specjax.chat.tagged_arguments import any_tagged_arguments, tagged_arguments
from specjax.chat.tool_schemas import without_annotations
from specjax.chat.unquoted_arguments import unquoted_arguments
from specjax.errors import InputError
from specjax.grammars import Grammar, JsonObject, JsonSchema
from specjax.grammars.grammar import check_grammar
from specjax.grammars.structure import (
    Node,
    all_of,
    constant,
    node_of_source,
    structure_source,
)

_SPACE: Node = {"regex": r"/[ \n]{0,4}/"}
"""The white space that may follow a thought."""


class ToolCalls(Grammar):
    """An answer with calls of tools.

    Args:
        syntax: how the model writes calls.
        tools: the tools that may be called: names, and the JSON schemas of their arguments; None:
            any arguments.
        thought: the thought that comes before; None: there is none.
        required: whether the answer is calls alone. If not, it is text in which calls may come, and
            a thought may stay open.
        several: whether there may be more than one call.
        instead: the grammar of content that may come instead of calls. Then the answer is either
            calls or such content, whatever ``required`` says.
        content: the text before content, see `AnswerSyntax`.

    Raises:
        InputError: there are no tools, or the begin of a call in text may also be text, or a schema
            is not supported.

    Examples:
        >>> import specjax
        >>> from specjax.chat import CallSyntax, ToolCalls
        >>> syntax = CallSyntax(begin="CALL {name}", end=";", trigger="CALL", between=" ")
        >>> generate = specjax.load("embedded")
        >>> compiled = generate.grammar_compiler.compile(ToolCalls(syntax, {"f": None}))
        >>> matcher = compiled.matcher(stop_token_ids=(0,))
        >>> tokens = generate.tokenizer.encode("CALL f{}; CALL f{};", add_special_tokens=False)
        >>> matcher.count_legal(tokens) == len(tokens)
        True
    """

    def __init__(
        self,
        syntax: CallSyntax,
        tools: Mapping[str, Mapping[str, Any] | None],
        thought: ThoughtSyntax | None = None,
        *,
        required: bool = True,
        several: bool = True,
        instead: Grammar | None = None,
        content: str = "",
    ) -> None:
        """Make the grammar."""
        if not tools:
            raise InputError("tools={}: give at least one tool")
        is_text = not required and instead is None
        if is_text and not syntax.trigger:
            raise InputError("syntax.trigger='': calls in text need one; give required=True")
        bodies = {
            name: all_of(arguments_node(syntax, schema), constant(syntax.end))
            for name, schema in tools.items()
        }
        several = several and syntax.between is not None
        if is_text:
            answer = _text_with_calls(syntax, bodies, several)
            self._write(structure_source(_perhaps_after(thought, answer)))
            return
        answer = all_of(
            constant(syntax.first), _listed(syntax, bodies, several), constant(syntax.last)
        )
        if instead is not None:
            answer = {"any": [answer, _content(instead, content)]}
        self._write(structure_source(all_of(*_before_answer(thought), answer)))


class AfterThought(Grammar):
    """A grammar of an answer that begins where a thought before it has ended.

    Args:
        thought: the thought; None: there is none.
        grammar: the grammar of the content.
        content: the text before the content.

    Examples:
        >>> import specjax
        >>> from specjax.chat import AfterThought, ThoughtSyntax
        >>> thought = ThoughtSyntax("<think>", "</think>", is_open=True)
        >>> grammar = AfterThought(thought, specjax.Choice(["yes", "no"]))
        >>> generate = specjax.load("embedded")
        >>> matcher = generate.grammar_compiler.compile(grammar).matcher(stop_token_ids=(0,))
        >>> matcher.append(generate.tokenizer.encode("Hm.</think>yes", add_special_tokens=False))
        >>> matcher.is_complete
        True
    """

    def __init__(
        self, thought: ThoughtSyntax | None, grammar: Grammar, *, content: str = ""
    ) -> None:
        """Make the grammar."""
        answer = _content(grammar, content)
        self._write(structure_source(all_of(*_before_answer(thought), answer)))


def arguments_node(syntax: CallSyntax, schema: Mapping[str, Any] | None) -> Node:
    """Return the node of the arguments of a call, which are an object.

    There are no arguments that the tool does not declare: JSON Schema allows undeclared keys unless
    ``additionalProperties`` says otherwise, but the authors of tools expect none. A schema without
    ``properties`` allows any.

    Args:
        syntax: how the arguments are written.
        schema: their JSON schema; None: any arguments.

    Raises:
        InputError: the schema is not supported.

    Examples:
        >>> from specjax.chat import CallSyntax
        >>> from specjax.chat.call_grammars import arguments_node
        >>> arguments_node(CallSyntax("", ""), {"type": "string"})
        Traceback (most recent call last):
        specjax.errors.InputError: schema.type='string': arguments are an object; give 'object'
    """
    if schema is not None:
        kind = schema.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise InputError(f"schema.type={kind!r}: arguments are an object; give 'object'")
        schema = without_annotations(schema) | {"type": "object"}
        schema.pop("nullable", None)
        if set(schema) <= {"type", "$defs", "definitions"}:
            schema = None
    if syntax.arguments == "xml":
        return any_tagged_arguments() if schema is None else tagged_arguments(schema)
    if syntax.arguments == "gemma":
        return unquoted_arguments(schema)
    if schema is None:
        return node_of_source(JsonObject().source)
    # Where parts of a schema are combined, all of them declare keys.
    if set(schema) <= {"type", "properties", "required", "$defs", "definitions"}:
        schema["additionalProperties"] = False
    return node_of_source(JsonSchema(schema).source)


def _before_answer(thought: ThoughtSyntax | None) -> list[Node]:
    """Return the parts of a thought that ends before something else begins."""
    if thought is None:
        return []
    space = [_SPACE] if thought.with_space else []
    if thought.is_open:
        return [_inside(thought), constant(thought.end), constant(thought.behind), *space]
    return [{"repeat": all_of(_whole(thought), *space), "min": 0, "max": 1}]


def _content(grammar: Grammar, begin: str) -> Node:
    """Return content that a grammar describes, with the text before it."""
    check_grammar(grammar)
    return all_of(constant(begin), node_of_source(grammar.source))


def _perhaps_after(thought: ThoughtSyntax | None, answer: Node) -> Node:
    """Return an answer after a thought, where the answer need not come."""
    if thought is None:
        return answer
    if thought.is_open:
        content = all_of(constant(thought.behind), answer)
        tag = {"trigger": thought.end, "begin": thought.end, "content": content}
        return {"free": {"tags": [tag], "excludes": list(thought.excludes), "is_once": True}}
    return all_of({"repeat": _whole(thought), "min": 0, "max": 1}, answer)


def _whole(thought: ThoughtSyntax) -> Node:
    parts = (
        constant(thought.begin),
        _inside(thought),
        constant(thought.end),
        constant(thought.behind),
    )
    return all_of(*parts)


def _inside(thought: ThoughtSyntax) -> Node:
    return {"free": {"excludes": list(thought.excludes)}}


def _listed(syntax: CallSyntax, bodies: Mapping[str, Node], several: bool) -> Node:
    """Return one call, or several with what is between them."""
    call: Node = {
        "any": [all_of(constant(syntax.before(name)), body) for name, body in bodies.items()]
    }
    if not several:
        return call
    more = all_of(constant(syntax.between or ""), call)
    return all_of(call, {"repeat": more, "min": 0, "max": None})


def _text_with_calls(syntax: CallSyntax, bodies: Mapping[str, Node], several: bool) -> Node:
    """Return free text in which calls may come."""
    if syntax.first:
        content = all_of(_listed(syntax, bodies, several), constant(syntax.last))
        begins = [(syntax.first, content)]
    else:
        begins = [(syntax.before(name), body) for name, body in bodies.items()]
    tags = [
        {"trigger": syntax.trigger, "begin": begin, "content": content} for begin, content in begins
    ]
    # A list has all the calls of an answer.
    return {"free": {"tags": tags, "is_once": not several or bool(syntax.first)}}
