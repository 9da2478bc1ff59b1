"""Odd records in ``specjax regenerate``: the same are left out as in a training."""

import json

import pytest

from specjax.cli.main import main
from specjax.training import data
from specjax.training.config import DataConfig
from specjax.training.unusable import RecordTally
from tests.cli.test_evaluate import TEMPLATE, of_texts, records

pytestmark = pytest.mark.full  # each writes a data set

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
USER = {"role": "user", "content": "Add."}
ANSWER = {"role": "assistant", "content": "Four."}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "4"}


def test_a_training_and_the_command_leave_out_the_same(tiny_pair, tmp_path, capsys) -> None:
    source, output = tmp_path / "texts.jsonl", tmp_path / "out.jsonl"
    lines = [json.dumps({"text": f"def function_{i}(self): pass"}) for i in range(30)]
    lines[7], lines[19] = '{"text": "\\ud800"}', "{"
    source.write_text("\n".join(lines))
    tally = RecordTally(str(source), limit=0.1)
    data.prepare(DataConfig(str(source), tiny_pair[0], window=4, holdout=0.3), tally=tally)
    command = of_texts(tiny_pair[0], source, "--output", str(output))
    assert main(command) == 2
    refused = capsys.readouterr().err
    assert "2 of 30 records cannot be used, more than max_unusable=0.01 allows" in refused
    assert main([*command, "--max-unusable", "0.1"]) == 0
    reported = capsys.readouterr().err
    assert "2 of 30 records are left out" in reported
    assert len(records(output)) == 28
    assert [error.where for error in tally.unusable] == [
        f"{tmp_path.name}/texts.jsonl:{line}" for line in (8, 20)
    ]
    for error in tally.unusable:
        assert str(error) in refused and str(error) in reported
    assert main([*command, "--max-unusable", "0.2"]) == 0  # the limit may change
    assert main([*command, "--max-unusable", "1.2"]) == 2


def test_a_conversation_with_tools_is_answered_up_to_their_results(
    tiny_pair, tmp_path, capsys
) -> None:
    source, output = tmp_path / "chats.jsonl", tmp_path / "out.jsonl"
    template = tmp_path / "template.jinja"
    template.write_text("{{ tools | map(attribute='function.name') | join(',') }}" + TEMPLATE)
    chats = [
        {"messages": [USER, CALLS, RESULT, ANSWER], "tools": [ADD]},
        {"messages": [USER, ANSWER, USER, ANSWER], "tools": [ADD]},
        {"messages": [RESULT, ANSWER], "tools": [ADD]},
    ]
    source.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    command = of_texts(tiny_pair[0], source, "--output", str(output))
    assert main([*command, "--chat-template", str(template)]) == 0
    first, second = records(output)
    assert [message["role"] for message in first["messages"]] == ["user", "assistant"]
    assert [message["role"] for message in second["messages"]] == 2 * ["user", "assistant"]
    assert first["tools"] == second["tools"] == [ADD]
    printed = capsys.readouterr().out
    reason = "the result of a tool belongs to a call of the source, not of the target"
    assert f"cut before a turn, as {reason}: 1 of 3" in printed
    assert f"left out, as {reason}: 1 of 3" in printed


def test_conversations_that_the_template_refuses_count_while_it_writes(
    tiny_pair, tmp_path, capsys
) -> None:
    source, output = tmp_path / "chats.jsonl", tmp_path / "out.jsonl"
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% if messages[0].role == 'tool' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    )
    chats = [[USER, ANSWER], [{"role": "system", "content": "\n"}, USER], [USER, ANSWER, USER]]
    source.write_text("".join(json.dumps({"messages": chat, "tools": []}) + "\n" for chat in chats))
    with source.open("a") as file:
        file.write(json.dumps({"messages": [USER], "tools": [ADD]}) + "\n")
    command = of_texts(tiny_pair[0], source, "--chat-template", str(template), "--copies", "2")
    command += ["--output", str(output)]
    assert main(command) == 2
    assert "chats.jsonl:4: it cannot be encoded (tools:" in capsys.readouterr().err
    assert main([*command, "--max-unusable", "0.25"]) == 0
    printed = capsys.readouterr()
    assert "1 of 4 records are left out" in printed.err and "left out" not in printed.out
    assert len(records(output)) == 6
