"""Tests with lm-evaluation-harness, which asks a real server.

Its log-likelihoods and its greedy flags must be the target's own.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

import specjax
from specjax.assets import embedded
from specjax.text import load_tokenizer

ROOT = Path(__file__).parents[3]
CONTEXTS = (
    "import os\nimport ",
    (
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self,"
        " item):\n        self.items."
    ),
    "def main():\n    parser = argparse.ArgumentParser()\n    parser.",
    "try:\n    value = int(text)\nexcept ",
    "for name in sorted(names):\n    print(",
    "with open(path) as file:\n    return file.",
)
OTHERS = ("sys\n", "append(item)\n", "add_argument", "ValueError:\n", "name)", "read()\n")
TASK = """
task: code_endings
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
metadata: {version: 1.0}
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Yield the address of ``python -m specjax serve``."""
    command = [
        sys.executable,
        "-m",
        "specjax",
        "serve",
        "--port",
        "0",
        "--rows",
        "2",
        "--capacity",
        "256",
    ]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = next((line for line in process.stdout if "is ready" in line), "")
        match = re.search(r"http://\S+", line)
        assert match, f"the server has ended with {process.wait()}"
        yield match.group()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def greedy_ends(target: specjax.Target, tokenizer, new_tokens: int) -> list[str]:
    """Return what the target writes after each context."""
    ends = []
    for context in CONTEXTS:
        tokens = tokenizer.encode(context, add_special_tokens=False)
        result = specjax.generate(target, None, np.array([tokens]), max_new_tokens=new_tokens)
        ends.append(tokenizer.decode(result.tokens[0, len(tokens) :]))
    return ends


def own_answer(target: specjax.Target, tokenizer, context: str, end: str) -> tuple[float, bool]:
    """Return the log-likelihood of an end, and whether each of its tokens is the likeliest.

    As in lm_eval, spaces at the end of the context belong to the end.
    """
    first = len(tokenizer.encode(context.rstrip(), add_special_tokens=False))
    tokens = np.array(tokenizer.encode(context + end, add_special_tokens=False))
    logits = target.forward(tokens[None])[0].logits[0, first - 1 : -1]
    logprobs = jax.nn.log_softmax(logits, axis=-1)[np.arange(len(tokens) - first), tokens[first:]]
    return float(logprobs.sum()), bool((logits.argmax(axis=-1) == tokens[first:]).all())


@pytest.mark.thorough  # it starts a server and imports lm_eval
@pytest.mark.parametrize("concurrent", [1, 4])
def test_log_likelihoods_are_the_targets_own(address, concurrent, tmp_path, monkeypatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    target = specjax.Target.from_pretrained("embedded")
    tokenizer = load_tokenizer(Path(embedded("target")))
    ends = greedy_ends(target, tokenizer, new_tokens=5)
    rows = [
        {"context": context, "choices": [end, wrong, "zebra quux"], "answer": 0}
        for context, end, wrong in zip(CONTEXTS, ends, OTHERS, strict=True)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "code_endings.yaml").write_text(TASK.replace("FILE", str(tmp_path / "rows.jsonl")))
    evaluation = simple_evaluate(
        model="local-completions",
        model_args={
            "model": "embedded",
            "base_url": f"{address}/v1/completions",
            "tokenizer": str(embedded("target")),
            "tokenizer_backend": "huggingface",
            "num_concurrent": concurrent,
            "max_length": 256,
        },
        tasks=["code_endings"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    samples = evaluation["samples"]["code_endings"]
    assert len(samples) == len(rows)
    flags = []
    for sample in samples:
        for (context, end), (theirs,) in zip(sample["arguments"], sample["resps"], strict=True):
            likelihood, is_greedy = own_answer(target, tokenizer, context, end)
            assert float(theirs[0]) == pytest.approx(likelihood, abs=1e-4)
            assert str(theirs[1]) == str(is_greedy)
            flags.append(is_greedy)
    assert {True, False} == set(flags)
    best = []
    for row in rows:
        ends = [own_answer(target, tokenizer, row["context"], end) for end in row["choices"]]
        best.append(int(np.argmax([likelihood for likelihood, _ in ends])))
    expected = np.mean(np.array(best) == 0)
    assert evaluation["results"]["code_endings"]["acc,none"] == pytest.approx(expected)
