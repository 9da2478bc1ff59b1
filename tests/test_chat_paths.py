"""Check that a chat has the same token ids by every path from its messages to a model."""

import json

import numpy as np
import pytest

import specjax
from specjax import client, decoding, pipeline, text
from specjax.cli.main import main
from specjax.client import client as client_module
from specjax.errors import InputError
from specjax.serving.engine import Engine
from specjax.templates import with_template
from specjax.training import chat, data
from specjax.training.config import DataConfig
from tests.conftest import ASSETS
from tests.serving.http.made_up import MadeUpEngine
from tests.serving.http.test_app import ask

TEMPLATE = (
    "{{ mood }}|{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
MOOD = {"mood": "glad"}
CHAT = [{"role": "user", "content": "import os"}]
PROMPT = "glad|[user]import os[assistant]"
ANSWERED = [*CHAT, {"role": "assistant", "content": " and sys"}]


class SentError(Exception):
    """A prompt that has reached the model; its argument is the list of its token ids."""


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("template") / "mood.jinja"
    file.write_text(TEMPLATE)
    return str(file)


@pytest.fixture(scope="module")
def generator(template):
    return specjax.load("embedded", chat_template=template)


@pytest.fixture(scope="module")
def expected(generator) -> list[int]:
    """Return the ids of the text that the template should make, without rendering it."""
    return generator.tokenizer(PROMPT, add_special_tokens=False)["input_ids"]


class EncodesEngine(MadeUpEngine):
    """An engine that encodes prompts as the real one does, and repeats a text."""

    encode = Engine.encode
    capacity = 200

    def __init__(self, generator: specjax.pipeline.TextGenerator) -> None:
        super().__init__()
        self.target, self.tokenizer = generator.target, generator.tokenizer


def sent(call) -> list[int]:
    """Return the ids of the prompt that a call sends to the model."""
    with pytest.raises(SentError) as raised:
        call()
    return raised.value.args[0]


def test_python_takes_the_variables_for_all_chats_and_for_one(
    generator, template, expected, monkeypatch
) -> None:
    def start(self, prompts, *_, **__):
        raise SentError(list(prompts[0]))

    monkeypatch.setattr(pipeline.TextGenerator, "start", start)
    for_all = specjax.load(
        generator.target,
        tokenizer=generator.tokenizer,
        chat_template=template,
        chat_template_kwargs=MOOD,
    )
    assert sent(lambda: for_all(CHAT)) == expected
    assert sent(lambda: generator(CHAT, chat_template_kwargs=MOOD)) == expected
    assert sent(lambda: generator([CHAT], chat_template_kwargs=MOOD)) == expected
    assert sent(lambda: generator.stream(CHAT, chat_template_kwargs=MOOD)) == expected
    assert sent(lambda: generator(CHAT)) != expected
    for call in (generator, generator.stream, generator.encode):
        with pytest.raises(InputError, match=r"^chat_template_kwargs=.*applies to chats only"):
            call("import os", chat_template_kwargs=MOOD)


def test_an_engine_takes_them_for_one_chat(generator, expected) -> None:
    engine = EncodesEngine(generator)
    assert engine.encode(CHAT, MOOD) == expected
    with pytest.raises(InputError, match=r"^chat_template_kwargs=.*applies to chats only"):
        engine.encode([1, 2], MOOD)


def test_a_client_takes_them_for_all_chats_and_for_one(generator, expected, monkeypatch) -> None:
    def connect(**options):
        drafter = specjax.PromptLookup(draft=2)
        options |= {"tokenizer": generator.tokenizer, "capacity": 64}
        return client.connect("ws://127.0.0.1:9", drafter, generator.target, **options)

    def open_exchange(request):
        raise SentError(list(request.prompt))

    monkeypatch.setattr(client_module, "Exchange", open_exchange)
    options = {"max_new_tokens": 4}
    assert sent(lambda: connect(chat_template_kwargs=MOOD).stream(CHAT, **options)) == expected
    options["chat_template_kwargs"] = MOOD
    assert sent(lambda: connect().stream(CHAT, **options)) == expected
    assert sent(lambda: connect().generate(CHAT, **options)) == expected
    for prompt in ("import os", [1, 2]):
        with pytest.raises(InputError, match=r"^chat_template_kwargs=.*applies to chats only"):
            connect().stream(prompt, **options)


def test_requests_take_them_for_one_chat(generator, expected) -> None:
    engine = EncodesEngine(generator)
    content = json.dumps({"messages": CHAT, "chat_template_kwargs": MOOD})
    assert ask(engine, "/tokenize", content=content).json()["tokens"] == expected
    for path, body in {
        "/v1/chat/completions": {"messages": CHAT},
        "/v1/responses": {"input": CHAT},
        "/v1/messages": {"messages": CHAT, "max_tokens": 4},
    }.items():
        content = json.dumps({"model": "tiny", "chat_template_kwargs": MOOD, **body})
        answer = ask(engine, path, content=content)
        assert answer.status_code == 200, answer.text
        assert engine.submitted[-1].prompt == expected
    answer = ask(engine, "/v1/messages/count_tokens", content=content)
    assert answer.json() == {"input_tokens": len(expected)}


@pytest.mark.parametrize(
    "command",
    ["generate", "evaluate", pytest.param("regenerate", marks=pytest.mark.thorough)],
)
def test_commands_take_them(command, template, expected, tmp_path, monkeypatch) -> None:
    source = tmp_path / "source.jsonl"
    options = ["--target", "embedded", "--drafter", "prompt-lookup"]
    if command == "generate":
        options += ["--chat", "--prompt", CHAT[0]["content"]]
    elif command == "evaluate":
        source.write_text(json.dumps({"prompt": CHAT[0]["content"]}) + "\n")
        options += ["--questions", str(source)]
    else:
        source.write_text(json.dumps({"messages": ANSWERED}) + "\n")
        options += ["--source", str(source), "--output", str(tmp_path / "output.jsonl")]

    def generate(target, drafter, prompts, lengths, **_):
        raise SentError(prompts[0, : lengths[0]].tolist())

    monkeypatch.setattr(decoding, "generate", generate)
    monkeypatch.setattr(decoding, "stream", generate)

    def submit(self, prompt, *_, **__):
        raise SentError(list(prompt))

    monkeypatch.setattr(Engine, "submit", submit)
    options += ["--chat-template", template, "--chat-template-kwargs", json.dumps(MOOD)]
    assert sent(lambda: main([command, *options])) == expected


def test_a_training_reads_the_ids_that_a_conversation_has_in_generation(
    generator, template, expected, tmp_path
) -> None:
    source = tmp_path / "source.jsonl"
    after = [[], *([{"role": "user", "content": f"{number}"}] for number in range(40))]
    source.write_text(
        "".join(json.dumps({"messages": [*ANSWERED, *more]}) + "\n" for more in after)
    )
    settings = {"tokenizer": str(ASSETS / "target"), "chat_template": template}
    settings |= {"chat_template_kwargs": json.dumps(MOOD), "holdout": 0.3}
    whole = text.encode_chat(generator.tokenizer, ANSWERED, MOOD, end="messages")
    _, packed, *_ = data.prepare(
        DataConfig(source=str(source), window=len(whole) - 1, responses_only=False, **settings)
    )
    assert packed["tokens"][0].tolist() == whole
    tokenizer = with_template(generator.tokenizer, settings=MOOD)
    ((ids, is_label),) = chat.encode(tokenizer, [ANSWERED], responses_only=True)
    assert list(ids) == whole
    assert whole[: len(expected)] == expected  # the answer follows the prompt of generation
    assert tokenizer.decode(np.array(ids)[is_label]) == " and sys"
