"""Response templates that are not valid, and those of a tokenizer's own files."""

import json
import re
import sys
from typing import Any

import pytest

from specjax import text
from specjax.chat import (
    AnswerParser,
    ChatAnswer,
    ResponseForm,
    ToolCall,
    families,
    family_form,
    family_of,
    response_form,
)
from specjax.chat import calls as calls_module
from specjax.chat.parameter_types import ParameterTypes
from specjax.errors import InputError
from tests.chat.published_templates import template
from tests.conftest import ASSETS

CALLS = {
    "open": "<call>",
    "close": "</call>",
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}


@pytest.fixture(scope="module", autouse=True)
def _imports() -> None:
    """Import what loads tokenizers once, in no test's time."""
    text.load_tokenizer(ASSETS / "target")


def _template(**fields: Any) -> dict[str, Any]:
    return {"start_anchor": "Model:", "fields": {"content": {}, **fields}}


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (5, "the template: must be an object"),
        ({"fields": {"content": {}}}, "start_anchor: is missing"),
        ({"start_anchor": "a", "fields": {}}, "at least one field"),
        ({"start_anchor": "a", "extra": 1}, "unknown key 'extra'"),
        ({"start_anchor": "a", "version": 2, "fields": {"content": {}}}, "version=2: must be 1"),
        (_template(thinking={}), "only one may have neither"),
        (_template(thinking={"open": "a", "open_pattern": "b"}), "cannot be given together"),
        (_template(thinking={"open": ""}), "none of them empty"),
        (_template(thinking={"open": []}), "none of them empty"),
        (_template(thinking={"open": 5}), "not a valid response template"),
        (_template(thinking={"open_pattern": "("}), "missing )"),
        (_template(thinking={"opens": "a"}), "unknown key 'opens'"),
        (_template(tool_calls={**CALLS, "content": "yaml"}), "content='yaml'"),
        (
            _template(tool_calls={**CALLS, "content": "xml-inline"}),
            "content_args.tag_pattern: must have the groups",
        ),
        (
            _template(
                tool_calls={
                    **CALLS,
                    "content": "xml-inline",
                    "content_args": {"tag_pattern": "(?P<key>"},
                }
            ),
            "missing )",
        ),
    ],
)
def test_a_template_that_is_not_valid_is_refused(broken, message) -> None:
    with pytest.raises(InputError, match="response_template: not a valid") as caught:
        ResponseForm.from_template(broken)
    assert message in str(caught.value)


def test_the_template_of_a_tokenizers_files_comes_first(tmp_path) -> None:
    tokenizer = text.load_tokenizer(ASSETS / "target")
    tokenizer.chat_template = template("qwen3")
    assert response_form(tokenizer) == family_form("qwen3")
    text.copy_tokenizer(ASSETS / "target", tmp_path)
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {
        "response_template": _template(tool_calls=CALLS),
        "chat_template": template("qwen3"),
    }
    file.write_text(json.dumps(config))
    form = response_form(text.load_tokenizer(tmp_path))
    assert form is not None
    answer = AnswerParser(form).parse('a<call>{"name": "f", "arguments": {}}</call>')
    assert answer == ChatAnswer("a", "", (ToolCall("f", "{}"),))


def test_a_template_of_a_file_that_is_not_valid_is_refused() -> None:
    tokenizer = text.load_tokenizer(ASSETS / "target")
    tokenizer.response_template = {}
    with pytest.raises(InputError, match="correct it, or remove it"):
        response_form(tokenizer)


def test_a_tokenizer_without_a_template_has_no_family() -> None:
    tokenizer = text.load_tokenizer(ASSETS / "target")
    assert family_of(tokenizer) is None and response_form(tokenizer) is None


def test_of_several_templates_the_one_with_tools_counts() -> None:
    tokenizer = text.load_tokenizer(ASSETS / "target")
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": template("mistral_nemo")}
    family = family_of(tokenizer)
    assert family is not None and family.name == "mistral_list"


def test_a_family_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match=r"no such family.*qwen3"):
        family_form("qwen33")


def test_every_family_has_sources_and_a_title() -> None:
    assert len({family.title for family in families()}) == len(families())
    for family in families():
        assert family.sources and all(source.startswith("https://") for source in family.sources)
        assert family.signs and all(family.signs)


def test_tags_of_no_length_do_not_open_and_close_for_ever() -> None:
    fields = {"thinking": {"open_pattern": "(?=b)", "close_pattern": "(?=b|c)"}}
    form = ResponseForm.from_template(_template(**fields))
    for pieces in (["abbcb"], list("abbcb")):
        parser = AnswerParser(form)
        events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
        answer = ChatAnswer.from_events(events)
        assert sorted(answer.content + answer.reasoning) == ["a", "b", "b", "b", "c"]


def test_the_name_of_a_call_may_stand_in_its_closing_tag() -> None:
    function = {"name": "{name}", "arguments": "{content}"}
    field = {
        "open": "<call>",
        "close_pattern": r"</call (?P<name>\w+)>",
        "content": "json",
        "transform": {"type": "function", "function": function},
    }
    form = ResponseForm.from_template(_template(tool_calls=field))
    answer = AnswerParser(form).parse('<call>{"a": 1}</call f>')
    assert answer == ChatAnswer("", "", (ToolCall("f", '{"a": 1}'),))


def test_regions_of_unknown_fields_are_content() -> None:
    form = ResponseForm.from_template(_template(notes={"open": "(", "close": ")"}))
    assert AnswerParser(form).parse("a(b)c") == ChatAnswer("abc")


def test_text_outside_of_all_regions_is_dropped_if_the_template_says_so() -> None:
    fields = {"content": {"open": "[[", "close": "]]"}, "tool_calls": CALLS}
    form = ResponseForm.from_template({"start_anchor": "Model:", "fields": fields})
    assert AnswerParser(form).parse("a[[b]]c") == ChatAnswer("b")
    # What follows a call that does not parse is not dropped with it.
    assert AnswerParser(form).parse("a<call>[1]</call>").content == "<call>[1]</call>"


def test_one_of_two_tags_may_begin_with_the_other() -> None:
    fields = {"thinking": {"open": ["<t>", "<t>\n-"], "close": "</t>"}}
    form = ResponseForm.from_template(_template(**fields))
    for pieces in (["<t>\n-a</t>"], ["<t>", "\n", "-", "a</t>"]):
        parser = AnswerParser(form)
        events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
        assert ChatAnswer.from_events(events) == ChatAnswer("", "a")


PYTHON_CALLS = {
    "open": "<call>",
    "close": "</call>",
    "content": "python-call-list",
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
    "transform_each": True,
}


def test_calls_in_pythons_form_are_read_when_they_end() -> None:
    pytest.importorskip(
        "transformers.utils.chat_parsing", reason="NOT TESTED: transformers is older than 5.13"
    )
    form = ResponseForm.from_template(_template(tool_calls=PYTHON_CALLS))
    answer = AnswerParser(form).parse("<call>[f(a='x', b=[1, True]), g()]</call>")
    assert [(call.name, call.values()) for call in answer.tool_calls] == [
        ("f", {"a": "x", "b": [1, True]}),
        ("g", {}),
    ]
    broken = "<call>[f(1)]</call>"
    assert AnswerParser(form).parse(broken) == ChatAnswer(broken)


def test_the_families_need_no_newer_transformers(monkeypatch) -> None:
    monkeypatch.setattr(calls_module, "_parse_content", None)
    for family in families():
        AnswerParser(family.form)


def test_an_older_transformers_is_named(monkeypatch) -> None:
    name = "transformers.utils.chat_parsing.content_parsers"
    monkeypatch.setitem(sys.modules, name, None)
    form = ResponseForm.from_template(_template(tool_calls=PYTHON_CALLS))
    with pytest.raises(
        InputError, match=re.escape("'python-call-list'; install transformers>=5.13")
    ):
        AnswerParser(form)


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("{}", {}),
        ('{a:<|"|>x<|"|>}', {"a": "x"}),
        ('{a : <|"|>say "b:1", {c:2} \\n\n<|"|>}', {"a": 'say "b:1", {c:2} \\n\n'}),
        (
            "{a:{b:[{c-d:1},null],e:true},f:-1.5}",
            {"a": {"b": [{"c-d": 1}, None], "e": True}, "f": -1.5},
        ),
        ('{<|"|>a<|"|>:"{b:1}"}', {"a": "{b:1}"}),
        ("{a:b}", None),
        ("{a:NaN}", None),
        ('{a:<|"|>x}', None),
    ],
)
def test_gemmas_dialect_of_json_is_read(body, value) -> None:
    text = f"<|tool_call>call:f{body}<tool_call|>"
    answer = AnswerParser(family_form("gemma4")).parse(text)
    if value is None:
        assert answer == ChatAnswer(text)
    else:
        assert [call.values() for call in answer.tool_calls] == [value]


@pytest.mark.parametrize(
    ("text_value", "schema", "value"),
    [
        ("5", {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5),
        ("5.5", {"type": "integer"}, "5.5"),
        ("5.5", {"type": "number"}, 5.5),
        ("5", {"type": "string"}, "5"),
        ("True", {"type": "boolean"}, True),
        ("true", {"type": "boolean"}, True),
        ("1", {"type": "boolean"}, "1"),
        ("true", {"type": "integer"}, "true"),
        ("None", {"type": ["string", "null"]}, None),
        ("None", {"type": "string"}, "None"),
        ("[1]", {"type": "array"}, [1]),
        ("[1]", {"type": "object"}, "[1]"),
        ('{"a": 1}', {"anyOf": [{"type": "object"}, {"type": "null"}]}, {"a": 1}),
        ("NaN", {"type": "number"}, "NaN"),
        ("x", {}, "x"),
    ],
)
def test_arguments_without_types_are_read_as_the_schema_says(text_value, schema, value) -> None:
    types = ParameterTypes({"properties": {"a": schema}}).of("a")
    typed = calls_module.typed_value(text_value, types)
    assert typed == value and type(typed) is type(value)


_DEFINITIONS = {
    "Count": {"type": "integer"},
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Count"}]},
    "Own": {"$ref": "#/$defs/Own"},
    "Parent": {"properties": {"b": {"$ref": "#/$defs/Count"}}},
}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"$ref": "#/$defs/Count"}, {"integer"}),
        ({"$ref": "#/$defs/Missing"}, None),
        ({"$ref": "https://example.org/schema"}, None),
        ({"$ref": "#/$defs/Own"}, None),
        ({"$ref": "#/$defs/Loop"}, None),
        ({"allOf": [{"type": ["integer", "string"]}, {"type": ["integer", "null"]}]}, {"integer"}),
        ({"allOf": [{"$ref": "#/$defs/Count"}, {"description": "how many"}]}, {"integer"}),
        ({"allOf": [{"type": "number"}, {"type": "integer"}]}, {"integer"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"integer", "null"}),
        ({"anyOf": [{"type": "integer"}, {}]}, None),
        ({"oneOf": [{"enum": [1, None]}, {"const": "a"}]}, {"integer", "null", "string"}),
        ({"type": "integer", "nullable": True}, {"integer", "null"}),
        ({"type": 5, "anyOf": 5, "allOf": 5, "enum": 5, "$ref": 5}, None),
        (True, None),
    ],
)
def test_the_types_of_a_parameter_are_found_behind_references_and_unions(schema, types) -> None:
    parameters = {"properties": {"a": schema}, "$defs": _DEFINITIONS}
    assert ParameterTypes(parameters).of("a") == types


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/Parent", "$defs": _DEFINITIONS},
        {"allOf": [{"$ref": "#/$defs/Parent"}, {"type": "object"}], "$defs": _DEFINITIONS},
        {"properties": {"b": {"$ref": "#/$defs/Count"}}, "$defs": _DEFINITIONS},
    ],
)
def test_parameters_may_stand_behind_a_reference(parameters) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    text = "<tool_call><function=f><parameter=b>5</parameter></function></tool_call>"
    answer = AnswerParser(family_form("qwen3_5"), tools=tools).parse(text)
    assert [call.values() for call in answer.tool_calls] == [{"b": 5}]


def test_references_that_multiply_cost_bounded_work() -> None:
    """Refer twice to the next definition, 60 times: 2 to the 60 schemas."""
    definitions = {
        f"d{level}": {"allOf": [{"$ref": f"#/$defs/d{level + 1}"}] * 2} for level in range(60)
    }
    types = ParameterTypes({"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": definitions})
    assert types.of("a") is None


SURROGATES = {
    "in an argument": (
        "qwen3",
        lambda text: f'<tool_call>{{"name": "f", "arguments": {{"a": "{text}"}}}}</tool_call>',
    ),
    "in a key": (
        "qwen3",
        lambda text: f'<tool_call>{{"name": "f", "arguments": {{"{text}": 1}}}}</tool_call>',
    ),
    "in a name": (
        "qwen3",
        lambda text: f'<tool_call>{{"name": "{text}", "arguments": {{}}}}</tool_call>',
    ),
    "in a text of arguments": (
        "qwen3",
        lambda text: (
            '<tool_call>{"name": "f", "arguments": '
            + json.dumps(f'{{"a": "{text}"}}')
            + "}</tool_call>"
        ),
    ),
    "in Gemma's form": ("gemma4", lambda text: f'<|tool_call>call:f{{a:"{text}"}}<tool_call|>'),
}


@pytest.mark.parametrize(("family", "text_of"), SURROGATES.values(), ids=SURROGATES)
def test_escapes_of_lone_surrogates_do_not_leave_the_parser(family, text_of) -> None:
    for escape in (r"\ud83c", r"\udf89", r"\ud83cx", r"\ud83c\n", r"\ud83c\u0041"):
        answer = AnswerParser(family_form(family)).parse(text_of(escape))
        assert answer == ChatAnswer(text_of(escape))
    (call,) = AnswerParser(family_form(family)).parse(text_of(r"\ud83c\udf89")).tool_calls
    assert "\N{PARTY POPPER}" in call.name + json.dumps(call.values(), ensure_ascii=False)


def test_surrogates_of_the_text_itself_are_replaced() -> None:
    text = "<function=f\ud83c>\n<parameter=a>\n\udf89\n</parameter>\n</function>"
    answer = AnswerParser(family_form("qwen3_5")).parse(f"\ud83c<tool_call>{text}</tool_call>")
    assert answer == ChatAnswer("\ufffd", "", (ToolCall("f\ufffd", '{"a": "\ufffd"}'),))


@pytest.mark.parametrize(
    "body", ["{a:1,a:2}", "{a:{b:1,b:1}}", '{a:1,"a":2}', "{a:[{b:1,c:2,b:3}]}"]
)
def test_the_last_of_repeated_arguments_counts(body) -> None:
    argument = body.replace("{a", '{"a"').replace("{b", '{"b"').replace(",b", ',"b"')
    argument = argument.replace(",a", ',"a"').replace(",c", ',"c"')
    for family, written_call in (
        ("gemma4", f"<|tool_call>call:f{body}<tool_call|>"),
        ("qwen3", f'<tool_call>{{"name": "f", "arguments": {argument}}}</tool_call>'),
        ("mistral_named", f"[TOOL_CALLS]f[ARGS]{argument}"),
    ):
        answer = AnswerParser(family_form(family)).parse(written_call)
        assert [call.values() for call in answer.tool_calls] == [json.loads(argument)]
        assert not answer.content


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen3", '<tool_call>{"name": "f", "arguments": {}, "arguments": {}}</tool_call>'),
        ("qwen3", '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>'),
        ("mistral_list", '[TOOL_CALLS][{"name": "f", "arguments": {}, "name": "g"}]'),
    ],
)
def test_repeated_keys_of_a_call_are_no_call(family: str, text: str) -> None:
    assert AnswerParser(family_form(family)).parse(text) == ChatAnswer(text)


def test_the_last_of_repeated_tags_counts() -> None:
    tags = "<parameter=a>\n1\n</parameter>\n<parameter=a>\n2\n</parameter>\n"
    text = f"<tool_call>\n<function=f>\n{tags}</function>\n</tool_call>"
    answer = AnswerParser(family_form("qwen3_5")).parse(text)
    assert answer == ChatAnswer("", "", (ToolCall("f", '{"a": "2"}'),))
