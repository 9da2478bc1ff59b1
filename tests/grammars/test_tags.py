"""Check where a grammar begins: after a trigger, and in the tags of structural tags."""

import json
import random
import re
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

import specjax
from specjax.errors import InputError
from specjax.grammars import Grammar, GrammarCompiler
from specjax.grammars.checker import GrammarChecker, grammar_text, nesting
from specjax.grammars.structure import AddedTokens, grammar_parts, tokenized_source
from tests.conftest import tiny_target
from tests.decoding.test_constrained import DRAFTERS
from tests.grammars.oracle import Oracle
from tests.grammars.test_matcher import flags
from tests.grammars.tokenizers_for_tests import small_tokenizer

INTEGER = {"type": "integer", "minimum": 0, "maximum": 99}


def with_added(tokenizer: Any, *tokens: str) -> Any:
    tokenizer.add_tokens(list(tokens))
    return tokenizer


@cache
def embedded() -> tuple[Any, GrammarCompiler, int]:
    """Return the embedded tokenizer with added tokens, a compiler, and a size with unknown ids."""
    tokenizer = with_added(
        specjax.load("embedded").tokenizer, "<tool_call>", "</tool_call>", "</think>", "<im_end>"
    )
    size = len(tokenizer) + 5
    return tokenizer, GrammarCompiler(tokenizer, size), size


def walk(grammar: Any, text: str | list[int]) -> tuple[int, bool, np.ndarray]:
    """Return how many tokens are legal, whether the text is whole, and what may follow."""
    tokenizer, compiler, size = embedded()
    matcher = compiler.compile(grammar).matcher((0,))
    tokens = tokenizer.encode(text, add_special_tokens=False) if isinstance(text, str) else text
    for index, token in enumerate(tokens):
        if not flags(matcher.mask(), size)[token]:
            return index, False, flags(matcher.mask(), size)
        matcher.append([token])
    return len(tokens), matcher.is_complete, flags(matcher.mask(), size)


def accepts(grammar: Any, text: str) -> bool:
    tokenizer = embedded()[0]
    legal, is_complete, _ = walk(grammar, text)
    return legal == len(tokenizer.encode(text, add_special_tokens=False)) and is_complete


# --- After ----------------------------------------------------------------------------------------

AFTER = specjax.After("</think>", specjax.JsonSchema(INTEGER))
OPTIONAL = specjax.After("</think>", specjax.JsonSchema(INTEGER), required=False)


@pytest.mark.parametrize(
    ("grammar", "inside", "outside"),
    [
        (AFTER, ["hm</think>12", "</think>0", "a<tool_call>b</tool_call></think>7"], ["12", "a"]),
        (OPTIONAL, ["hm</think>12", "hm", "", "</thin"], ["hm</think>", "</think>a"]),
        (
            specjax.After("Answer: ", specjax.Choice(["yes", "no"])),
            ["Well. Answer: no", "Answer: yes", "Answer:Answer: yes", "</think>Answer: no"],
            ["Answer: maybe", "no", "Answer: yes."],
        ),
        (
            specjax.After("</think>\n", specjax.Regex("[ab]+")),
            ["x</think>\nab"],
            ["x</think>ab", "x</think></think>\nab"],
        ),
        (
            specjax.After("</think>", specjax.After("= ", specjax.Regex("[0-9]+"))),
            ["= 5 </think>x = 12", "</think>= 3"],
            ["x = 12", "</think>= x"],
        ),
    ],
)
def test_a_grammar_begins_after_its_trigger(grammar, inside, outside) -> None:
    for text in inside:
        assert accepts(grammar, text), text
    for text in outside:
        assert not accepts(grammar, text), text


def test_a_trigger_that_is_an_added_token_counts_in_letters_too() -> None:
    letters = [*embedded()[1]._tokenizer.tokenize_bytes(b"</think"), 30]  # and ">"
    assert embedded()[0].decode(letters) == "</think>" and len(letters) > 1
    assert walk(AFTER, letters)[2][17:27].any()  # digits
    assert not walk(AFTER, letters)[2][95]


@pytest.mark.parametrize("grammar", [AFTER, OPTIONAL, specjax.After("<a>", specjax.Regex("b"))])
@pytest.mark.parametrize("seed", range(4))
def test_before_the_trigger_every_token_is_legal(grammar, seed) -> None:
    """Check masks along random walks, bytes within characters included."""
    tokenizer, compiler, size = embedded()
    rng, count = np.random.default_rng(seed), len(tokenizer)
    matcher = compiler.compile(grammar).matcher((0,))
    may_end = grammar is OPTIONAL
    for _ in range(60):
        legal = flags(matcher.mask(), size)
        expected = np.arange(size) < count
        expected[0] = may_end  # the token that ends a text
        assert (legal == expected).all()
        assert matcher.is_complete == may_end
        token = int(rng.integers(1, count))
        # Tokens with parts of a trigger could complete it, where other rules apply.
        matcher.append([token if not set("</think>a") & set(tokenizer.decode([token])) else 1])


def test_a_trigger_may_end_within_a_token() -> None:
    """Check after each beginning of a trigger which tokens complete it, and go on legally."""
    tokenizer, compiler, size = embedded()
    grammar = specjax.After(' "', specjax.Choice(["name", "na", "of"]))
    matcher = compiler.compile(grammar).matcher((0,))
    legal = flags(matcher.mask(), size)
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    checked = 0
    for token in range(1, 3072):
        before, trigger, after = texts[token].partition(' "')
        if trigger:
            checked += len(after) > 0
            assert legal[token] == any(word.startswith(after) for word in ("name", "na", "of")), (
                texts[token]
            )
        elif "\ufffd" not in before:
            assert legal[token]
    assert checked > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: specjax.After("", specjax.Regex("a")), "give the text after which"),
        (lambda: specjax.After(3, specjax.Regex("a")), "give the text after which"),
        (lambda: specjax.After("x", "a"), "give specjax.JsonSchema"),
    ],
)
def test_what_is_no_trigger_is_refused(make, message) -> None:
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (specjax.After("x</think>", specjax.Regex("a")), "'x' comes before an added token"),
        (specjax.After("x", specjax.Regex("(")), "grammar=After.*regex"),
        (
            specjax.StructuralTag({"format": {"type": "token", "token": "<unheard of>"}}),
            "no such added token",
        ),
        (
            specjax.StructuralTag(
                {
                    "format": {
                        "type": "star",
                        "content": {"type": "any_text"},
                    }
                }
            ),
            "free text must be the last part",
        ),
    ],
)
def test_what_does_not_fit_the_tokenizer_is_refused(grammar, message) -> None:
    with pytest.raises(InputError, match=message):
        embedded()[1].compile(grammar)


def test_a_text_is_split_at_its_longest_added_tokens() -> None:
    tokens = AddedTokens({7: "<a>", 8: "<a><b>", 9: "b"})
    assert tokens.split("x<a><b>b<a>y") == ["x", 8, 9, 7, "y"]
    assert tokens.split("") == [] and tokens.split("<a") == ["<a"]


# --- structural tags ------------------------------------------------------------------------------


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": name},
            "arguments": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            },
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def tag(begin: str, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": value}


CALLS = [
    tag("<tool_call>\n", schema(tool("add", x=INTEGER)), "\n</tool_call>"),
    tag("<tool_call>\n", schema(tool("say", text={"type": "string"})), "\n</tool_call>"),
]
ADD = '<tool_call>\n{"name": "add", "arguments": {"x": 12}}\n</tool_call>'
SAY = '<tool_call>\n{"name": "say", "arguments": {"text": "<call>é"}}\n</tool_call>'
THOUGHT = tag("", {"type": "any_text"}, "</think>")
FUNCTIONS = [tag(f"<function={name}>", schema(INTEGER), "</function>") for name in ("f", "g")]


def triggered(tags: list[Any], *triggers: str, **options: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": tags, **options}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "tool calls between text": (
        {"format": triggered(CALLS, "<tool_call>")},
        ["", "hello", ADD, f"I call {ADD} and {SAY}", f"{ADD}{SAY}\n</tool_call>"],
        ["<tool_call>", "<tool_call>x", ADD[:-1], ADD.replace("12", "100"), ADD.replace("x", "y")],
    ),
    "the older form": (
        {
            "type": "structural_tag",
            "structures": [
                {"begin": "<function=f>", "schema": INTEGER, "end": "</function>"},
                {"begin": "<function=g>", "schema": {"type": "string"}, "end": "</function>"},
            ],
            "triggers": ["<function="],
        },
        ["", 'a<function=f>1</function>b<function=g>"x"</function>', "<function", "</function>"],
        ["<function=", "<function=h>", "<function=f>100</function>", "<function=f>1"],
    ),
    "a call is required": (
        {"format": triggered(CALLS, "<tool_call>", at_least_one=True)},
        [ADD, f"{ADD} and {SAY}", f"{ADD}."],
        ["", "hello", f"hello {ADD}"],
    ),
    "one call only": (
        {"format": triggered(FUNCTIONS, "<function=", stop_after_first=True)},
        ["", "hello", "x<function=f>1</function>"],
        ["<function=f>1</function>x"],
    ),
    "one call, at once": (
        {"format": triggered(FUNCTIONS, "<function=", stop_after_first=True, at_least_one=True)},
        ["<function=g>1</function>"],
        ["", "x<function=g>1</function>", "<function=g>1</function>x"],
    ),
    "a thought, then calls": (
        {"format": sequence(THOUGHT, triggered(CALLS, "<tool_call>", at_least_one=True))},
        [f"hm <tool_call></think>{ADD}", f"</think>{ADD}{SAY} bye"],
        [ADD, "hm</think>", f"hm</think> {ADD}"],
    ),
    "several ends": (
        {"format": tag("<a>", {"type": "any_text"}, ["</a>", "</think>"])},
        ["<a>text</a>", "<a></think>", "<a><tool_call></a>"],
        ["<a>text", "text</a>", "<a></a></a>"],
    ),
    "calls within a tag": (
        {"format": tag("<a>", triggered(FUNCTIONS, "<function="), "</a>")},
        ["<a></a>", "<a>x<function=f>1</function>y</a>"],
        ["<a><function=f></a>", "<a>x</a>y", "<a>x"],
    ),
    "excluded strings": (
        {"format": {"type": "any_text", "excludes": ["bad", "</think>"]}},
        ["ba", "good", "b ad<tool_call>"],
        ["bad", "x bad y", "</think>"],
    ),
    "tags with a separator": (
        {"format": {"type": "tags_with_separator", "tags": FUNCTIONS, "separator": ", "}},
        ["", "<function=f>1</function>", "<function=f>1</function>, <function=g>2</function>"],
        ["<function=f>1</function>,<function=g>2</function>", "x", "<function=f>1</function>, "],
    ),
    "parts of other kinds": (
        {
            "format": sequence(
                {"type": "const_string", "value": "n="},
                {"type": "or", "elements": [schema(INTEGER), {"type": "regex", "pattern": "x*"}]},
                {"type": "optional", "content": {"type": "const_string", "value": "!"}},
                {"type": "repeat", "min": 1, "max": 2, "content": {"type": "token", "token": 3074}},
                {"type": "grammar", "grammar": 'start: "(" start ")" | "y"'},
            )
        },
        ["n=12</think>y", "n=xxx!</think></think>((y))", "n=</think>(y)"],
        ["n=12y", "n=1</think></think></think>y", "n=1!!</think>y", "n=1</think>(y"],
    ),
    "a regular expression that could hold the end": (
        {"format": tag("<a>", {"type": "regex", "pattern": "(?s).*"}, "</a>")},
        ["<a></a>", "<a>x</a>", "<a>x</a></a>"],
        ["<a>", "<a>x</a", "x</a>"],
    ),
    "dispatch": (
        {"format": {"type": "dispatch", "rules": [["#", schema(INTEGER)]], "loop": False}},
        ["", "x", "x#1"],
        ["#", "#a", "#1 "],
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_structural_tags_have_the_meaning_of_their_form(name) -> None:
    spec, inside, outside = CASES[name]
    grammar = specjax.StructuralTag(json.dumps(spec))
    assert specjax.StructuralTag(spec) == grammar
    for text in inside:
        assert accepts(grammar, text), text
    for text in outside:
        assert not accepts(grammar, text), text


SOURCES = [
    *(grammar.source for grammar in (AFTER, OPTIONAL, specjax.After("x", AFTER))),
    *(specjax.StructuralTag(spec).source for spec, _, _ in CASES.values()),
]


@pytest.mark.parametrize("source", SOURCES)
def test_a_grammar_with_tags_stays_what_it_is_when_a_client_states_it(source) -> None:
    _, compiler, _ = embedded()
    stated = Grammar.of_source(source)
    assert compiler.source(stated) == tokenized_source(source, compiler._added_tokens)
    assert grammar_parts(stated.source) == grammar_parts(Grammar.of_source(stated.source).source)
    assert list(json.loads(stated.source)) == ["structure"]


@pytest.mark.parametrize(
    "node",
    [
        {"grammar": {"lark_grammar": "%llguidance {}\nstart: /a/"}},
        {"grammar": {"lark_grammar": "start: /a/", "name": "g0"}},
        {"grammar": {"json_schema": {"x-guidance": {"lenient": True}}}},
        {"grammar": {"structure": {"text": "a"}}},
        {"regex": '/a/ "b" /c/'},
        {"regex": "/a/\nTEXT2: /b/"},
        {"regex": "/a\\/"},
        {"regex": "a"},
        {"text": "a", "token": 3},
        {"text": 3},
        {"any": {"text": "a"}},
        {"repeat": {"text": "a"}, "min": 2, "max": 1},
        {"repeat": {"text": "a"}, "min": 0, "max": "1} x{2"},
        {"free": {"tags": [{"trigger": "a", "begin": "b", "content": {"text": ""}}]}},
        {"free": {"tags": [{"trigger": "", "begin": "b", "content": {"text": ""}}]}},
        {"free": {"excludes": [3]}},
        {"free": {"is_once": 1}},
        {"free": {"rules": []}},
        {},
        None,
    ],
)
def test_what_no_tag_makes_is_no_grammar(node) -> None:
    """Check it alone and within another node, among them rules of llguidance's own."""
    for source in (node, {"all": [{"any": [node]}]}):
        with pytest.raises(InputError, match="it is not the source of a specjax grammar"):
            Grammar.of_source(json.dumps({"structure": source}))


def changed(value: Any, rng: random.Random) -> Any:
    """Return JSON with some part in the place of another one."""
    parts: list[Any] = ["", "a", 0, 10**9, None, True, [], {}, "/a/", {"text": "</think>"}]

    def visit(value: Any) -> Any:
        parts.append(value)
        if rng.random() < 0.04:
            return rng.choice(parts)
        if isinstance(value, dict):
            names = {
                name: rng.choice([*value, "max"]) if rng.random() < 0.02 else name for name in value
            }
            return {names[name]: visit(part) for name, part in value.items()}
        return [visit(part) for part in value] if isinstance(value, list) else value

    return visit(value)


def test_whatever_a_client_states_is_a_grammar_or_is_refused() -> None:
    rng, accepted = random.Random(0), 0
    for _ in range(1500):
        source = json.dumps(changed(json.loads(rng.choice(SOURCES)), rng))
        try:
            grammar = Grammar.of_source(source)
            assert embedded()[1].source(grammar)
            assert grammar_text(grammar)
        except InputError:
            continue
        accepted += 1
    assert 100 < accepted < 1400


def test_constants_are_written_with_added_tokens() -> None:
    """Check that the end of a call is the token, and not its letters."""
    *_, legal = walk(specjax.StructuralTag(CASES["tool calls between text"][0]), f"{ADD[:-12]}")
    assert np.flatnonzero(legal).tolist() == [3073]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{", "not JSON"),
        ([], "give an object with"),
        ({"type": "json_schema"}, "give an object with"),
        ({}, "it has no 'structures'"),
        ({"structures": [], "triggers": ["a"]}, "give a list that is not empty"),
        (
            {"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b>"]},
            "0 of them start the tag '<a>'",
        ),
        (
            {"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<", "<a"]},
            "2 of them start the tag '<a>'",
        ),
        ({"structures": [{"begin": "<a>", "end": ""}], "triggers": ["<"]}, "it has no 'schema'"),
        ({"format": {"type": "any_tokens"}}, r"format\.type='any_tokens': not supported"),
        ({"format": {"type": "any_text", "max_tokens": 5}}, r"max_tokens=5: not supported"),
        ({"format": schema({}) | {"style": "qwen_xml"}}, r"style='qwen_xml': not supported"),
        ({"format": schema({}) | {"any_order": True}}, r"any_order=True: not supported"),
        ({"format": {"type": "grammar", "grammar": "root ::= x"}}, "Lark grammar"),
        ({"format": {"type": "const_string"}}, "it has no 'value'"),
        ({"format": sequence()}, "give a list that is not empty"),
        ({"format": {"type": "regex", "pattern": "a", "x": 1}}, r"format\.x=1: not supported"),
        ({"format": triggered(FUNCTIONS, "<function=", at_least_one=1)}, "give true or false"),
        ({"format": triggered(FUNCTIONS, "<function=", "#")}, "no tag starts with '#'"),
        ({"format": {"type": "repeat", "min": 2, "max": 1, "content": schema({})}}, "min=2, max=1"),
        ({"format": sequence({"type": "nothing"})}, r"elements\[0\]\.type='nothing'"),
    ],
)
def test_a_wrong_form_is_refused_by_name(spec, message) -> None:
    with pytest.raises(InputError, match=message):
        specjax.StructuralTag(spec)


def test_a_form_that_is_nested_too_deeply_is_refused() -> None:
    spec: dict[str, Any] = {"type": "any_text"}
    for _ in range(400):
        spec = sequence(spec)
    with pytest.raises(InputError, match="nested too deeply"):
        embedded()[1].compile(specjax.StructuralTag({"format": spec}))


def test_a_server_measures_and_checks_every_part() -> None:
    content = {"type": "regex", "pattern": "(" * 70 + ")" * 70}
    deep = specjax.StructuralTag({"format": tag("<a>", content, "")})
    assert nesting(grammar_text(deep)) == 70
    assert "12345" in grammar_text(specjax.After("12345", specjax.Regex("a")))
    with GrammarChecker(embedded()[1]) as checker:
        checker.check(AFTER)
        with pytest.raises(InputError, match="nested 70 deep"):
            checker.check(deep)


def test_strings_that_get_in_each_others_way_are_refused() -> None:
    tags = [tag("<a>", schema(INTEGER), ""), tag("b<a>", schema(INTEGER), "")]
    grammar = specjax.StructuralTag({"format": triggered(tags, "<a>", "b<a>")})
    with pytest.raises(InputError, match="'b<a>' contains '<a>', which comes first"):
        embedded()[1].compile(grammar)


# --- texts ----------------------------------------------------------------------------------------

VOCABULARY, END, NEW = 23, 19, 24
GRAMMARS = {
    "after letters": specjax.After("ab", specjax.Regex("(de|cab){1,4}f")),
    "after a token": specjax.After("<a>", specjax.Choice(["abcabcde", "d01d01"])),
    "optional": specjax.After("01", specjax.Regex("[ab]{3}"), required=False),
    "calls": specjax.StructuralTag(
        {
            "format": triggered(
                [
                    tag("<a>d", {"type": "regex", "pattern": "[abc]{2,3}"}, "</a>"),
                    tag("e", schema({"enum": [0, 1, 10, "a"]}), "f"),
                ],
                "<a>",
                "e",
            )
        }
    ),
    "a call at once": specjax.StructuralTag(
        {"format": triggered([tag("ab", {"type": "any_text"}, "d")], "a", at_least_one=True)}
    ),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "nucleus": {"temperature": 1.5, "top_p": 0.6},
}
PROMPTS = np.random.default_rng(0).integers(0, 19, (len(GRAMMARS), 6))


@cache
def small() -> tuple[Any, Any, Any, GrammarCompiler]:
    """Return a tokenizer with two added tokens, a target, a draft model and a compiler."""
    tokenizer = with_added(small_tokenizer(), "<a>", "</a>")
    target = tiny_target(vocab_size=VOCABULARY)
    model = tiny_target(seed=5, num_layers=1, vocab_size=VOCABULARY)
    return tokenizer, target, model, GrammarCompiler(tokenizer, VOCABULARY)


@cache
def expected(setting: str) -> list[list[int]]:
    """Return the oracle's output for each grammar."""
    _, target, _, compiler = small()
    key = jax.random.key(3)
    return [
        Oracle(target, compiler, grammar, (END,), **SETTINGS[setting]).text(
            PROMPTS[row].tolist(), jax.random.fold_in(key, row), NEW
        )
        for row, grammar in enumerate(GRAMMARS.values())
    ]


@pytest.mark.full
@pytest.mark.thorough_except("none-greedy")
@pytest.mark.parametrize("setting", list(SETTINGS))
@pytest.mark.parametrize("drafter", ["none", "the target itself", "dynamic tree", "sampled tree"])
def test_every_text_is_the_oracles(drafter, setting) -> None:
    """Check texts whose triggers lie in drafts: those of the target itself cross them."""
    _, target, model, compiler = small()
    result = specjax.generate(
        target,
        DRAFTERS[drafter](target, model),
        PROMPTS,
        grammar=[compiler.compile(grammar) for grammar in GRAMMARS.values()],
        max_new_tokens=NEW,
        eos_token_ids=(END,),
        key=jax.random.key(3),
        sampling=specjax.Sampling(**SETTINGS[setting]),
    )
    texts = [
        row[PROMPTS.shape[1] : length].tolist()
        for row, length in zip(result.tokens, result.lengths, strict=True)
    ]
    assert texts == expected(setting)


@pytest.mark.full
def test_the_oracles_texts_hold_triggers() -> None:
    """Check that the comparison is not one of free texts."""
    patterns = {
        "after letters": "ab(de|cab)+f</s>$",
        "after a token": "<a>(abcabcde|d01d01)</s>$",
        "optional": "01[ab]{3}</s>$",
        "calls": '<a>d[abc]+</a>|e(0|1|10|"a")f',
        "a call at once": "^ab[^d]*d",
    }
    tokenizer = small()[0]
    texts = [[tokenizer.decode(text) for text in expected(setting)] for setting in SETTINGS]
    for pattern, rows in zip(patterns.values(), zip(*texts, strict=True), strict=True):
        assert any(re.search(pattern, text) for text in rows), (pattern, rows)
