"""Check the options of commands that constrain a text by a grammar."""

import json
import re

import pytest

import specjax
from specjax import pipeline
from specjax.cli.grammars import read_grammar
from specjax.cli.main import main
from specjax.errors import InputError
from tests.cli.test_evaluate import of_texts, records, write_source

SCHEMA = {"type": "integer", "minimum": 1000}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ('{"not": {}}', 'Unimplemented keys: ["not"]'),
        ('{"$ref": "#"}', "grammar=JsonSchema"),
        ('{"enum": []}', "grammar=JsonSchema"),
        ("{", "schema='{': not a JSON schema"),
        (b"\xff", "cannot be read"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--prompt", "x"],
        ["evaluate", "--questions"],
        ["regenerate", "--output", "out.jsonl", "--source"],
    ],
)
def test_a_schema_that_cannot_be_used_is_refused_before_anything_is_loaded(
    command, schema, message, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(pipeline, "load", None)
    source, file = tmp_path / "texts.jsonl", tmp_path / "schema.json"
    write_source(source, ["import os"])
    file.write_bytes(schema if isinstance(schema, bytes) else schema.encode())
    where = [] if command[0] == "generate" else [str(source)]
    assert main([*command, *where, "--json-schema", str(file)]) == 2
    error = capsys.readouterr().err
    assert f"json_schema='{file}': " in error and message in error


def test_wrong_patterns_and_two_grammars_are_refused() -> None:
    with pytest.raises(InputError, match=r"regex='\(': "):
        read_grammar("", "(", ())
    with pytest.raises(InputError, match="choice: regex constrains the text already"):
        read_grammar("", "a", ("b",))
    assert read_grammar("", "é+ß", ()) == specjax.Regex("é+ß")
    assert read_grammar("", "", ("é", "b")) == specjax.Choice(["é", "b"])
    assert read_grammar("", "", ()) is None
    after = read_grammar("", "a", (), "</think>")
    assert after == specjax.After("</think>", specjax.Regex("a"))
    with pytest.raises(InputError, match="grammar_after='x': there is no grammar"):
        read_grammar("", "", (), "x")


@pytest.mark.thorough
def test_answers_of_a_data_set_are_those_of_generate(tiny_pair, tmp_path, capsys) -> None:
    """Check greedy answers, and that a rerun with another schema in the file is refused."""
    source, output, schema = (tmp_path / name for name in ("texts.jsonl", "out.jsonl", "schema"))
    texts = [f"def function_{i}(self): pass" for i in range(6)]
    write_source(source, texts)
    schema.write_text(json.dumps(SCHEMA))
    options = ["--json-schema", str(schema), "--temperature", "0", "--output", str(output)]
    command = of_texts(tiny_pair[0], source, *options)
    assert main(command) == 0
    output_text = output.read_text()
    generate = specjax.load(tiny_pair[0])
    grammar = generate.grammar_compiler.compile(specjax.JsonSchema(SCHEMA))
    for text, record in zip(texts, records(output), strict=True):
        prompt = generate.encode(text)[:4]
        result = specjax.generate(
            generate.target, None, [prompt], max_new_tokens=10, grammar=grammar
        )
        tokens = result.tokens[0, : result.lengths[0]].tolist()
        assert record["tokens"] == tokens
        assert int(generate.tokenizer.decode(tokens[4:], skip_special_tokens=True)) >= 1000
    output.write_text(output_text.splitlines(keepends=True)[0])
    schema.write_text(json.dumps(SCHEMA | {"maximum": 9999}))
    assert main(command) == 2
    assert re.search(r"json_schema=.*its content differs", capsys.readouterr().err)
    schema.write_text(json.dumps(SCHEMA))
    assert main(command) == 0
    assert output.read_text() == output_text
