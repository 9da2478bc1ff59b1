"""Check that `specjax.ray.Generate` writes the same texts in any batches and actors.

It is tested without Ray, and in the thorough tests with Ray.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import specjax
from specjax.cli.main import main
from specjax.errors import InputError
from specjax.ray import Generate
from specjax.training import data
from specjax.training.config import DataConfig
from specjax.training.documents import read_documents
from tests import ray_over_http
from tests.cli.test_evaluate import TEMPLATE, records
from tests.serving.http.process import serving

PROMPTS = ["def one(", "import os", "class Stack:", "x = 1", "import os", "return"]
SETTINGS = {"rows": 2, "max_new_tokens": 10, "capacity": 64}


def column(values) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = values
    return array


@pytest.fixture(scope="module")
def target(tiny_pair) -> str:
    return tiny_pair[0]


@pytest.fixture(scope="module")
def generate(target):
    with Generate(target, **SETTINGS) as generator:
        yield generator


@pytest.mark.full
def test_the_module_imports_no_ray() -> None:
    code = "import sys, specjax.ray; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.full
def test_a_row_has_the_same_text_in_any_batch(generate) -> None:
    whole = generate({"prompt": column(PROMPTS), "number": np.arange(6)})
    assert whole["number"].tolist() == list(range(6))
    # Two rows are equal, and have one text.
    assert len(set(whole["text"])) == 5 and whole["text"][1] == whole["text"][4]
    for order in ([3], [5, 0], [4, 2, 1]):
        part = generate({"prompt": column([PROMPTS[i] for i in order])})
        for name in ("text", "answer", "tokens", "loss_spans", "regenerated_from"):
            assert part[name].tolist() == [whole[name][i] for i in order]


@pytest.mark.full
def test_numbered_rows_of_equal_content_have_texts_of_their_own(target, generate) -> None:
    with Generate(target, **SETTINGS, copy="number") as numbered:
        batch = numbered({"prompt": column(3 * ["import os"]), "number": np.array([0, 1, 2])})
        assert len(set(batch["text"])) == 3
        assert batch["text"][0] == generate({"prompt": column(["import os"])})["text"][0]
        alone = numbered({"prompt": column(["import os"]), "number": np.array([2])})
        assert alone["text"][0] == batch["text"][2]


@pytest.mark.parametrize("form", ["ids", "array"])
@pytest.mark.represents("Ray")
def test_token_ids_are_continued_as_the_library_does(target, form) -> None:
    ids = [[5, 6, 7], [8, 9, 10]]
    settings = SETTINGS | {"column": "ids"}
    with (
        Generate(target, **settings) as generate,
        Generate(target, **settings, temperature=0.0) as greedy,
    ):
        batch = {"ids": column(ids) if form == "ids" else np.array(ids)}
        sampled, greedy_batch = generate(batch), greedy(batch)
        result = specjax.generate(generate._writer._generator.target, None, ids, max_new_tokens=10)
        assert greedy_batch["tokens"].tolist() == [
            result.tokens[i, :n].tolist() for i, n in enumerate(result.lengths.tolist())
        ]
        assert sampled["tokens"].tolist() != greedy_batch["tokens"].tolist()
        assert [tokens[:3] for tokens in sampled["tokens"]] == ids
        assert sampled["loss_spans"].tolist() == [
            [[3, len(tokens)]] for tokens in sampled["tokens"]
        ]
        tokenizer = generate._writer._generator.tokenizer
        assert sampled["text"].tolist() == [
            tokenizer.decode(tokens) for tokens in sampled["tokens"]
        ]


def test_what_cannot_be_written_after_is_said_and_holds_nothing_up(generate) -> None:
    batch = generate({"prompt": column(["", "import os", "x = 1 " * 60])})
    assert batch["left_out"].tolist() == [
        "it cannot be encoded (prompt='': empty; give at least one character)",
        "",
        "there is no room for max_new_tokens=10 in 64 tokens",
    ]
    assert [bool(tokens) for tokens in batch["tokens"]] == [False, True, False]
    assert list(generate({"prompt": column([])})) == ["prompt"]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"text": ["a"]}, "column='prompt': the batch has text: name one of these"),
        ({"prompt": [3]}, "prompt of row 0: is 3: give a text, messages or token ids"),
        ({"prompt": ["a", [0.5]]}, "prompt of row 1: must be a text, messages or token ids"),
        (
            {"prompt": [[{"role": "judge", "content": "a"}]]},
            "prompt of row 0: role 'judge'",
        ),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(generate, batch, words) -> None:
    with pytest.raises(InputError, match=words.replace("(", r"\(")):
        generate({name: column(values) for name, values in batch.items()})


@pytest.mark.full
def test_texts_and_chats_are_those_of_the_command_and_are_trained_on(target, tmp_path) -> None:
    """Compare the texts with those of `regenerate`, for prompts that it leaves as they are.

    These are texts of few tokens, and first questions.
    """
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    chats = [[{"role": "user", "content": f"{number}?"}] for number in range(12)]
    texts = [f"x{number} =" for number in range(12)]
    for name, values in (("text", texts), ("messages", chats)):
        source, output, by_class = (
            tmp_path / f"{name}{end}.jsonl" for end in ("", "_by_command", "_by_class")
        )
        source.write_text("".join(json.dumps({name: value}) + "\n" for value in values))
        options = [
            *("--source", str(source), "--output", str(output), "--chat-template", str(template)),
            *("--batch", "2"),
        ]
        assert main(["regenerate", "--target", target, *options, "--max-new-tokens", "10"]) == 0
        with Generate(target, **SETTINGS, column=name, chat_template=str(template)) as generate:
            batch = generate({name: column(values)})
        rows = [{key: batch[key][row] for key in batch} for row in range(len(values))]
        for row, record in zip(rows, records(output), strict=True):
            assert row | record == row | {"document": record["document"], "copy": 0}
        by_class.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = {
            "tokenizer": target,
            "chat_template": str(template),
            "window": 4,
            "holdout": 0.3,
        }
        windows, expected = (
            data.prepare(DataConfig(str(file), **settings))[1] for file in (by_class, output)
        )
        jax.tree.map(np.testing.assert_array_equal, windows, expected)


def test_another_seed_writes_another_text_and_a_chat_goes_on(target, tmp_path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    question = [{"role": "user", "content": "one?"}]
    settings = SETTINGS | {"column": "chat", "chat_template": str(template)}
    with (
        Generate(target, **settings) as generate,
        Generate(target, **settings, seed=1) as other_seed,
    ):
        first = generate({"chat": column([question])})
        assert other_seed({"chat": column([question])})["answer"][0] != first["answer"][0]
        later = generate({"chat": column([first["messages"][0] + question])})
        assert [message["role"] for message in later["messages"][0]] == ["user", "assistant"] * 2
        assert later["messages"][0][:2] == first["messages"][0]


# --- with Ray -------------------------------------------------------------------------------------

needs_ray = pytest.mark.skipif(
    find_spec("ray") is None,
    reason=(
        "RAY IS NOT INSTALLED, so specjax.ray is not tested with it: pip install -e '.[test,ray]'"
    ),
)


def on_two_actors(target: str, mode: str, directory: Path) -> dict[str, Any]:
    """Return what `tests/two_actors.py` prints."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "RAY_USAGE_STATS_ENABLED": "0",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    command = [sys.executable, "-m", "tests.two_actors", target, mode, str(directory)]
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=500
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


@needs_ray
@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["calm", "killed"])
def test_two_actors_write_what_one_process_writes(target, mode, tmp_path) -> None:
    """Check that the texts do not change when an actor is killed.

    The batches of the killed actor are written again, by the other actor or a new one.
    """
    results = on_two_actors(target, mode, tmp_path)
    assert results["of actors"] == results["of one process"]
    assert len(results["of actors"]) == 64
    assert len(results["workers"]) >= 2
    if mode == "killed":
        return
    for kind in ("jsonl", "parquet"):
        for file in (tmp_path / kind).iterdir():  # Ray writes JSON lines into files called .json
            file.rename(file.with_suffix(f".{kind}"))
        documents = read_documents(str(tmp_path / kind))
        tokens = [document.written.tokens.tolist() for document in documents]
        assert sorted(tokens) == sorted(results["of actors"].values())
        data.prepare(DataConfig(str(tmp_path / kind), target, window=8, holdout=0.3))


@needs_ray
@pytest.mark.thorough
def test_rays_requests_are_answered_as_others_are(target, tmp_path) -> None:
    """Run a processor of `ray.data.llm`, without vLLM, on ``specjax serve``."""
    options = ("--target", target, "--served-model-name", "tiny")
    options += ("--rows", "4", "--capacity", "128")
    with serving(tmp_path / "log", *options) as server:
        environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
        command = [sys.executable, "-m", "tests.ray_over_http", server.address]
        run = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=400
        )
        assert run.returncode == 0, run.stderr[-4000:]
        directly = [
            server.post("/v1/completions", ray_over_http.payload(prompt))
            for prompt in ray_over_http.PROMPTS
        ]
    answers = json.loads(run.stdout.splitlines()[-1])
    assert answers == [answer["choices"][0]["text"] for answer in directly]
    assert len(set(answers)) > 20
