"""Check what the command and Ray share when they rewrite a data set."""

import json

import jax
import numpy as np
import pytest

import specjax
from specjax.cli.main import main
from specjax.ray import Generate
from specjax.regeneration import AnswerWriter
from specjax.sampling import make_key, named_key

pytestmark = pytest.mark.full  # each needs an engine


@pytest.fixture(scope="module")
def writer():
    params = specjax.SamplingParams(max_new_tokens=4, temperature=1.0, seed=9)
    with AnswerWriter(specjax.load("embedded"), params, rows=2, capacity=64) as answer_writer:
        yield answer_writer


def test_a_key_follows_from_seed_document_copy_and_turn_and_lies_on_the_host(writer) -> None:
    host, accelerator = jax.local_devices(backend="cpu")[0], jax.devices()[-1]
    assert host != accelerator
    # A key on an accelerator would wait for the running call. Another CPU device stands for one.
    with jax.default_device(accelerator):
        keys = [
            writer.key("00000000000000ff", 2),
            writer.key("00000000000000ff", 2, turn=0),
            writer.key("00000000000000ff", 2, turn=1),
        ]
    assert {device for key in keys for device in key.devices()} == {host}
    of_copy = jax.random.fold_in(named_key(make_key(9), "00000000000000ff"), 2)
    expected = [of_copy, jax.random.fold_in(of_copy, 0), jax.random.fold_in(of_copy, 1)]
    assert [jax.random.key_data(key).tolist() for key in keys] == [
        jax.random.key_data(key).tolist() for key in expected
    ]


def test_a_prompt_without_room_or_a_template_says_why(writer) -> None:
    assert writer.encode("import os", most=2)[0] == writer.encode("import os")[0][:2]
    assert writer.encode(list(range(61)))[1] == "there is no room for max_new_tokens=4 in 64 tokens"
    assert "it cannot be encoded" in writer.encode([3072])[1]


def test_the_command_and_ray_write_the_same(tmp_path) -> None:
    texts = [
        "import os\nimport sys\n",
        "class Stack:\n    def push(self):\n",
        "def main():\n    print(1)\n",
    ]
    source, output = tmp_path / "source.jsonl", tmp_path / "output.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = {"max_new_tokens": 8, "temperature": 0.8, "seed": 5}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    arguments = [
        "--target=embedded",
        "--drafter=none",
        f"--source={source}",
        f"--output={output}",
        "--prompt-tokens=64",
        "--batch=2",
    ]
    assert main(["regenerate", *arguments, *options]) == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    with Generate("embedded", drafter="none", rows=2, capacity=128, **settings) as generate:
        columns = generate({"prompt": np.array(texts)})
    # The batches of a run have one schema, even if rows are left out.
    assert list(columns)[-1] == "text"
    for name in ("text", "tokens", "loss_spans", "tokenizer_fingerprint", "regenerated_from"):
        assert [record[name] for record in records] == list(columns[name]), name
