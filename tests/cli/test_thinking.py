"""Check the options of commands for thinking budgets."""

import json
from typing import Any

import pytest

import specjax
from specjax.cli.generate import GenerateConfig, read_options
from specjax.cli.main import main
from specjax.cli.serve import ServeConfig, engine_options
from specjax.errors import InputError


@pytest.mark.thorough
def test_a_generated_text_has_the_budget(capsys) -> None:
    main(
        [
            *("generate", "--prompt", "import os\nimport ", "--thinking-budget", "3"),
            *("--thought-tokens", "import", " as", "--max-new-tokens", "24", "--json"),
        ]
    )
    answer = json.loads(capsys.readouterr().out)
    generate = specjax.load("embedded")
    options: dict[str, Any] = {"thinking_budget": 3, "thought_tokens": ("import", " as")}
    expected = generate("import os\nimport ", max_new_tokens=24, **options)
    assert answer["token_ids"] == list(expected.tokens)
    assert "grammar_completed" not in answer


def test_options_are_read() -> None:
    options = read_options(GenerateConfig(thinking_budget=5, thought_tokens=("<a>", "</a>")))
    assert options.thinking_budget == specjax.ThinkingBudget(5, ("<a>", "</a>"))
    assert read_options(GenerateConfig()).thinking_budget is None
    with pytest.raises(InputError, match="thinking_budget=-1: must be a whole number"):
        read_options(GenerateConfig(thinking_budget=-1))
    with pytest.raises(InputError, match=r"thought_tokens=.*there is no thinking_budget"):
        read_options(GenerateConfig(thought_tokens=("<a>", "</a>")))


def test_a_server_gets_the_tokens_of_thoughts() -> None:
    config = ServeConfig(thought_tokens=("import", "os"), rows=1, capacity=64)
    assert engine_options(config)[0]["thought_tokens"] == ("import", "os")
    assert engine_options(ServeConfig(rows=1, capacity=64))[0]["thought_tokens"] is None
