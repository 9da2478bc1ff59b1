"""Check what the command and Ray share when they rewrite a data set."""

import json
from typing import Any

import jax
import numpy as np
import pytest

import specjax
from specjax import pipeline, text
from specjax.chat import response_form
from specjax.cli.main import main
from specjax.ray import Generate
from specjax.regeneration import AnswerWriter
from specjax.sampling import make_key, named_key
from tests.training.test_templates import make_tokenizer


@pytest.fixture(scope="module")
def writer():
    params = specjax.SamplingParams(max_new_tokens=4, temperature=1.0, seed=9)
    with AnswerWriter(specjax.load("embedded"), params, rows=2, capacity=64) as answer_writer:
        yield answer_writer


@pytest.mark.full  # needs an engine
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


@pytest.mark.full  # needs an engine
def test_a_prompt_without_room_or_a_template_says_why(writer) -> None:
    assert writer.encode("import os", most=2)[0] == writer.encode("import os")[0][:2]
    assert writer.encode(list(range(61)))[1] == "there is no room for max_new_tokens=4 in 64 tokens"
    assert "it cannot be encoded" in writer.encode([3072])[1]


@pytest.mark.full  # needs an engine
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


# --- answers as messages --------------------------------------------------------------------------


class WriterOf(AnswerWriter):
    """A writer without an engine, for its messages alone."""

    def __init__(self, tokenizer) -> None:
        self._generator = pipeline.TextGenerator(NO_TARGET, tokenizer)
        self._form = response_form(tokenizer)


NO_TARGET: Any = None
NO_STATISTICS: Any = None
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("name", "model_text", "tools", "expected"),
    [
        (
            "gpt_oss",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
            "<|return|>",
            (),
            {"content": "Yes.", "thinking": "Hm."},
        ),
        ("gpt_oss", "<|channel|>analysis<|message|>Hm", (), {"content": "", "thinking": "Hm"}),
        (
            "gpt_oss",
            "<|channel|>commentary to=functions.add<|message|>" + '{"a": 1}' + "<|call|>",
            (ADD,),
            {"content": "", "tool_calls": [CALL]},
        ),
        (
            "smollm3",
            "<think>\nHm.\n</think>\n\nYes.<|im_end|>",
            (),
            {"content": "Yes.", "thinking": "Hm."},
        ),
        ("smollm3", "Yes.\n <|im_end|>", (), {"content": "Yes.\n "}),
        ("llama3", "<think>Hm.</think>Yes.<|eot_id|>", (), {"content": "<think>Hm.</think>Yes."}),
    ],
)
def test_an_answer_keeps_its_reasoning_and_its_calls(name, model_text, tools, expected) -> None:
    tokenizer = make_tokenizer(name)
    if name == "gpt_oss":
        tokenizer.add_tokens(["<|call|>"], special_tokens=True)
    if name == "smollm3":  # the tags are special tokens, which a text would leave out
        tokenizer.add_tokens(["<think>", "</think>"], special_tokens=True)
        tokenizer.chat_template += "{# <think> </think> <tool_call> #}"
    prompt = text.encode_chat(tokenizer, [{"role": "user", "content": "Is it?"}])
    tokens = tuple(tokenizer.encode(model_text, add_special_tokens=False))
    plain = tokenizer.decode(tokens, skip_special_tokens=True)
    answer = pipeline.Generation(plain, tokens, NO_STATISTICS)
    message = WriterOf(tokenizer).message(prompt, answer, (), tools)
    assert message == {"role": "assistant", **expected}


def test_a_stop_string_ends_the_content_of_a_message() -> None:
    tokenizer = make_tokenizer("gpt_oss")
    prompt = text.encode_chat(tokenizer, [{"role": "user", "content": "Is it?"}])
    model_text = (
        "<|channel|>analysis<|message|>Y#<|end|><|start|>assistant<|channel|>final<|message|>Y#Y"
    )
    tokens = tuple(tokenizer.encode(model_text, add_special_tokens=False))
    answer = pipeline.Generation("", tokens, NO_STATISTICS)
    message = WriterOf(tokenizer).message(prompt, answer, ("#",))
    assert message == {"role": "assistant", "content": "Y", "thinking": "Y#"}
