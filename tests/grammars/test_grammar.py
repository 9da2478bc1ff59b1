"""Grammars as users give them: what they mean, what is refused, and the errors."""

import dataclasses
import itertools
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import pytest

import specjax
from specjax.decoding import generation
from specjax.errors import InputError
from specjax.grammars import CompiledGrammar, Grammar, GrammarCompiler
from specjax.grammars import compiler as compiler_module
from tests.grammars.tokenizers_for_tests import small_tokenizer


@dataclasses.dataclass
class Point:
    """A dataclass whose schema a grammar can be made of."""

    x: int
    name: Literal["a", "b"]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(specjax.load("embedded").tokenizer, 3072)


@pytest.fixture(scope="module")
def tokenizer():
    return specjax.load("embedded").tokenizer


@pytest.fixture(scope="module")
def bytewise() -> GrammarCompiler:
    return GrammarCompiler.of_tokens([*(bytes([b]) for b in range(255)), b""], end_id=255)


def accepts(compiler, tokenizer, grammar, text: str) -> bool:
    """Return whether a text is in the language of a grammar."""
    matcher = compiler.compile(grammar).matcher(stop_token_ids=(0,))
    try:
        matcher.append(tokenizer.encode(text, add_special_tokens=False))
    except RuntimeError:
        return False
    return matcher.is_complete


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.full
@pytest.mark.thorough_except(
    "grammar0-inside0-outside0",
    "grammar1-inside1-outside1",
    "grammar2-inside2-outside2",
    "grammar3-inside3-outside3",
    "grammar4-inside4-outside4",
)
@pytest.mark.parametrize(
    ("grammar", "inside", "outside"),
    [
        (specjax.JsonSchema(SCHEMA), ['{"a": 1}', '{"a":1,"b":"x"}', '{\n "a": 1}'], ["{}", "1"]),
        (specjax.JsonSchema(SCHEMA, whitespace=False), ['{"a":1}'], ['{"a": 1}']),
        (specjax.JsonSchema(json.dumps(SCHEMA)), ['{"a": 1}'], ["{}"]),
        (specjax.JsonSchema(Point), ['{"x": 1, "name": "a"}'], ['{"x": 1, "name": "c"}']),
        (specjax.JsonSchema(True), ["1", '"x"', "null"], ["nil"]),
        (specjax.JsonObject(), ['{"k": [1, {"z": null}]}', "{}"], ["[]", "1"]),
        (specjax.Regex(r"[0-9]{2}/\d\/x"), ["12/3/x"], ["123/x", "12/3/xx"]),
        (specjax.Regex("a\nb"), ["a\nb"], ["anb"]),
        (specjax.Regex("a\\\nb"), ["a\nb"], ["anb", "a\\nb"]),
        (specjax.Choice(["yes", 'n"o', "a\\b"]), ["yes", 'n"o', "a\\b"], ["no", "ye"]),
        (specjax.Lark('start: "(" start ")" | "x"'), ["((x))", "x"], ["((x)", "xx"]),
    ],
)
def test_a_grammar_accepts_its_texts_and_no_others(
    compiler, tokenizer, grammar, inside, outside
) -> None:
    for text in inside:
        assert accepts(compiler, tokenizer, grammar, text), text
    for text in outside:
        assert not accepts(compiler, tokenizer, grammar, text), text


def test_a_pydantic_model_is_a_schema(compiler, tokenizer) -> None:
    pydantic = pytest.importorskip("pydantic")
    model = pydantic.create_model("Answer", yes=(bool, ...))
    assert accepts(compiler, tokenizer, specjax.JsonSchema(model), '{"yes": true}')
    assert not accepts(compiler, tokenizer, specjax.JsonSchema(model), '{"yes": 1}')


def test_options_of_llguidance_in_a_schema_change_nothing() -> None:
    plain = {"type": "object", "properties": {"x-guidance": {"type": "integer"}}}
    options = {"x-guidance": {"whitespace_flexible": False, "lenient": True}}
    assert specjax.JsonSchema(plain | options) == specjax.JsonSchema(plain)
    assert (
        "x-guidance"
        in json.loads(specjax.JsonSchema(plain).source)["grammars"][0]["json_schema"]["properties"]
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: specjax.JsonSchema("{"), "not a JSON schema"),
        (lambda: specjax.JsonSchema([1]), "an object, true or false"),
        (lambda: specjax.JsonSchema({"a": {1}}), "not a JSON schema"),
        (lambda: specjax.Regex(3), "give a regular expression"),
        (lambda: specjax.Choice("yes"), "give a list of strings"),
        (lambda: specjax.Choice([]), "give a list of strings"),
        (lambda: specjax.Choice(["a", ""]), "none of them empty"),
        (lambda: specjax.Lark(None), "give a Lark grammar"),
        (lambda: specjax.Lark('%llguidance {}\nstart: "a"'), "text: %llguidance is not"),
        (lambda: specjax.Lark('start: "a" // b\r%llguidance {"no_forcing": true}'), "%llguidance"),
        (
            lambda: specjax.Lark('start: %json {"\\u0078-guidance": {"lenient": true}}'),
            "x-guidance",
        ),
        (lambda: specjax.Lark('start: %json {"x-guidance": {"lenient": true}}'), "x-guidance"),
        (lambda: specjax.Lark("start[temperature=0.5]: /a+/"), "attribute temperature"),
        (lambda: specjax.JsonSchema('{"not":' * 100_000 + "{}" + "}" * 100_000), ""),
    ],
)
def test_what_is_no_grammar_is_refused_at_once(make, message) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_a_schema_that_contains_itself_is_refused() -> None:
    schema: dict = {}
    schema["properties"] = {"a": schema}
    with pytest.raises(InputError, match="not a JSON schema"):
        specjax.JsonSchema(schema)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (specjax.JsonSchema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (specjax.JsonSchema({"not": {"type": "string"}}), '"not"|not'),
        (
            specjax.JsonSchema({"properties": {"a": {"x-guidance": {}, "uniqueItems": True}}}),
            "uniqueItems",
        ),
        (specjax.JsonSchema({"$ref": "file:///etc/passwd"}), "ref"),
        (specjax.JsonSchema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), ""),
        (specjax.JsonSchema(False), ""),
        (specjax.Regex("("), "(?i)regex|parse"),
        (specjax.Regex(r"(a)\1"), "(?i)regex|parse|backref"),
        (specjax.Lark("start: nothing"), "nothing"),
        ("yes|no", "give specjax.JsonSchema"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(compiler, grammar, message) -> None:
    with pytest.raises(InputError, match="grammar=") as caught:
        compiler.compile(grammar)
    assert re.search(message, str(caught.value))


@pytest.mark.full
@pytest.mark.parametrize(
    "pattern",
    [
        *("^ab$", "^a|b$", "(^a$|b)", r"\Aab\Z", "a$|b", "(?i)^a$", r"\^a\$", "[$]a", "[a^]"),
        *(r"\d+", r"\s", r"\W", ".*", "(?s).", "a*?b", "a++", "[^]a]", r"[\w-]", r"\x41", "a|", ""),
        *(r"[^\W\d]", r"[\s\S]", "a\nb", "(?P<n>a)b", "(?x)a b", "a{1,2}", r"[\[a]", "[a&]"),
    ],
)
def test_a_regular_expression_means_what_it_means_in_python(bytewise, pattern) -> None:
    """Compare all texts of up to three characters with ``re.fullmatch``."""
    alphabet = "ab1-[&\n \r_Aé^$"
    grammar = bytewise.compile(specjax.Regex(pattern))
    for length in range(4 if len(pattern) < 7 else 3):
        for text in map("".join, itertools.product(alphabet, repeat=length)):
            matcher = grammar.matcher((255,))
            is_legal = matcher._matcher.try_consume_tokens(list(text.encode())) == len(
                text.encode()
            )
            expected = re.fullmatch(pattern, text) is not None
            assert (is_legal and matcher.is_complete) == expected, text


@pytest.mark.parametrize(
    "pattern",
    ["[a&&b]", "[[:alpha:]]", "[a[b]]", "[a--b]", "[a~~b]", "[^a&&b]", r"[\]a[]", "[]a[]", "a[[]"],
)
def test_classes_that_rust_reads_in_another_way_are_refused(pattern) -> None:
    with pytest.raises(InputError, match="within a class has another meaning"):
        specjax.Regex(pattern)


@pytest.mark.parametrize("pattern", ["\\", "a\\", "a\\\\\\", "a\n\\"])
def test_a_backslash_at_the_end_is_refused_before_it_escapes_what_follows(
    bytewise, pattern
) -> None:
    """Check it in a structural tag, too, where another expression may follow."""
    with pytest.raises(InputError, match="the backslash at its end escapes nothing"):
        specjax.Regex(pattern)
    elements = [{"type": "regex", "pattern": it} for it in (pattern, "b/")]
    spec = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    with pytest.raises(InputError, match="the backslash at its end escapes nothing"):
        specjax.StructuralTag(spec)
    matcher = bytewise.compile(specjax.Regex(f"{pattern}\\")).matcher((255,))  # a pair is a text
    matcher.append(re.sub(r"\\\\", r"\\", f"{pattern}\\").encode())
    assert matcher.is_complete


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(?=a)", "look-ahead"),
        (r"(a)\1", "backreferences"),
        (r"a\b", "lookarounds"),
        ("a^b", "lookarounds"),
        ("(?m)^a$", "lookarounds"),
        ("a{,2}", "repetition quantifier"),
        ("(?a)a", "unrecognized flag"),
    ],
)
def test_expressions_of_other_languages_are_refused_by_name(bytewise, pattern, message) -> None:
    with pytest.raises(InputError, match=message):
        bytewise.compile(specjax.Regex(pattern))


def test_a_grammar_is_compiled_once(compiler) -> None:
    first = compiler.compile(specjax.Choice(["a", "b"]))
    assert compiler.compile(specjax.Choice(["a", "b"])) is first


def test_threads_that_need_one_grammar_compile_it_once(monkeypatch) -> None:
    compiler, grammar = GrammarCompiler(small_tokenizer(), 20), specjax.Regex("[ab]+")
    compile_it, may_go_on = compiler._compile, threading.Event()
    compiled: list[CompiledGrammar] = []

    def slowly(grammar: Grammar, is_bounded: bool) -> CompiledGrammar:
        assert may_go_on.wait(20)
        compiled.append(compile_it(grammar, is_bounded))
        if grammar != specjax.Regex("[ab]+"):
            raise InputError("it is refused")
        return compiled[-1]

    monkeypatch.setattr(compiler, "_compile", slowly)
    with ThreadPoolExecutor(8) as threads:
        jobs = [threads.submit(compiler.compile, grammar) for _ in range(4)]
        refused = [threads.submit(compiler.compile, specjax.Regex("a")) for _ in range(4)]
        may_go_on.set()
        assert {id(job.result(20)) for job in jobs} <= set(map(id, compiled))
        assert {str(job.exception(20)) for job in refused} == {"it is refused"}
    assert compiler.compile(grammar) is jobs[0].result() is compiler.compiled(grammar)
    assert [it for it in compiled if it.grammar == grammar] == [jobs[0].result()]
    assert not compiler._running and compiler.compiled(specjax.Regex("a")) is None


def test_compiled_grammars_are_kept_within_bounds_of_number_and_memory(monkeypatch) -> None:
    compiler = GrammarCompiler(small_tokenizer(), 20)
    grammars = [specjax.Regex(letter) for letter in "abcde"]

    def kept() -> str:
        return "".join("abcde"[grammars.index(grammar)] for grammar, _ in compiler._compiled)

    monkeypatch.setattr(compiler_module, "MAX_COMPILED", 3)
    monkeypatch.setattr(compiler_module, "MAX_COMPILED_MEGABYTES", 100)
    for grammar, megabytes in zip(grammars, [40, 40, 40, 0, 0], strict=True):
        compiler.compile(grammar, megabytes=megabytes)
        assert sum(size for _, size in compiler._compiled.values()) <= 100
    assert kept() == "cde"  # a has gone for its size, b for the number
    assert compiler.compiled(grammars[2]) is not None
    assert kept() == "dec"
    compiler.compile(grammars[3], megabytes=70)  # its size is learned later
    assert kept() == "d"
    compiler.compile(grammars[0], megabytes=5000)
    assert kept() == "a"  # the last one stays, whatever its size


def test_a_grammar_for_another_vocabulary_is_refused_before_anything_runs(
    target, monkeypatch
) -> None:
    monkeypatch.setattr(generation, "prefill", None)
    compiled = GrammarCompiler(small_tokenizer(), 20).compile(specjax.Regex("a"))
    with pytest.raises(InputError, match=r"compiled for 20 tokens, and the target has 11"):
        specjax.generate(target, None, [[1]], grammar=compiled)
    with pytest.raises(InputError, match="compile it for the target's tokenizer"):
        specjax.generate(target, None, [[1]], grammar=specjax.Regex("a"))
    with pytest.raises(InputError, match="2 grammars; give one, or one for each of the 1 rows"):
        specjax.generate(target, None, [[1]], grammar=[None, None])


def test_a_tokenizer_that_is_not_fast_is_refused() -> None:
    with pytest.raises(InputError, match="needs a fast tokenizer"):
        GrammarCompiler(object(), 20)


def test_ids_beyond_the_tokenizer_are_never_legal() -> None:
    matcher = GrammarCompiler(small_tokenizer(), 64).compile(specjax.Regex("(?s).*")).matcher((19,))
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    assert bits[:20].sum() > 10 and bits[20:].sum() == 0


def test_a_string_is_no_grammar() -> None:
    generate = specjax.load("embedded")
    with pytest.raises(InputError, match=r"give specjax\.JsonSchema"):
        generate("x = ", grammar="[0-9]+", max_new_tokens=4)
