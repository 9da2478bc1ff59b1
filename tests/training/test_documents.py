"""Documents from every kind of file, and conversations in the chat template.

Conversations come with the mask of what the assistant wrote.
"""

import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from specjax.config import ConfigError
from specjax.errors import InputError
from specjax.templates import with_template
from specjax.training import chat, data, documents
from specjax.training.config import DataConfig
from tests.conftest import ASSETS

MESSAGES = [
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": "Seven, I think."},
]
SHAREGPT = [
    {"from": {"user": "human", "assistant": "gpt"}[message["role"]], "value": message["content"]}
    for message in MESSAGES
]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<end>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<end>{% endif %}{% endfor %}"
)


def write_jsonl(path, records) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_all_forms_of_a_conversation_are_one(tmp_path) -> None:
    records = [{"messages": MESSAGES}, {"conversations": SHAREGPT}, {"conversations": MESSAGES}]
    write_jsonl(tmp_path / "chats.jsonl", records)
    read = documents.read_documents(str(tmp_path / "chats.jsonl"))
    assert [list(document.messages) for document in read] == [MESSAGES] * 3
    assert len({document.name for document in read}) == 3


def test_what_was_thought_before_an_answer_is_kept(tmp_path) -> None:
    thought = [MESSAGES[0] | {"thinking": None}, MESSAGES[1] | {"thinking": "Add."}]
    write_jsonl(tmp_path / "chats.jsonl", [{"messages": thought}])
    (read,) = documents.read_documents(str(tmp_path / "chats.jsonl"))
    assert list(read.messages) == [MESSAGES[0], thought[1]]


def test_equal_documents_have_one_origin_and_what_is_written_after_them_keeps_it(tmp_path) -> None:
    write_jsonl(
        tmp_path / "chats.jsonl",
        [{"messages": MESSAGES}, {"conversations": SHAREGPT}, {"messages": MESSAGES[:1]}],
    )
    read = documents.read_documents(str(tmp_path / "chats.jsonl"))
    origins = [documents.find_origin(document) for document in read]
    assert origins[0] == origins[1] != origins[2]
    assert len(set(documents.identities(read))) == 3
    write_jsonl(
        tmp_path / "again.jsonl",
        [{"messages": MESSAGES[:2], documents.REGENERATED_FROM: origin} for origin in origins],
    )
    again = documents.read_documents(str(tmp_path / "again.jsonl"))
    assert [documents.find_origin(document) for document in again] == origins
    assert [document.name for document in again] == origins
    assert len(set(documents.identities(again))) == 3


def test_parquet_and_jsonl_hold_the_same(tmp_path) -> None:
    from datasets import Dataset

    records = [{"text": f"story {i}\u2028 with a line of its own"} for i in range(5)]
    write_jsonl(tmp_path / "texts.jsonl", records)
    Dataset.from_list(records).to_parquet(str(tmp_path / "texts.parquet"))
    jsonl, parquet = (
        documents.read_documents(str(tmp_path / f"texts.{kind}")) for kind in ("jsonl", "parquet")
    )
    assert [document.text for document in jsonl] == [document.text for document in parquet]
    Dataset.from_list([{"messages": MESSAGES}]).to_parquet(str(tmp_path / "chats.parquet"))
    (read,) = documents.read_documents(str(tmp_path / "chats.parquet"))
    assert list(read.messages) == MESSAGES


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "data.jsonl:2: not JSON"),
        ('{"prompt": "a"}', "data.jsonl:2: it has prompt; a record needs text, or messages"),
        (
            '{"messages": [{"role": "user"}]}',
            "data.jsonl:2: messages: a message needs role and content",
        ),
        (
            '{"messages": [{"role": "judge", "content": "a"}]}',
            "role 'judge': it must be one of human, user, gpt",
        ),
        ("[1]", "data.jsonl:2: it has list"),
    ],
)
def test_a_record_that_is_neither_is_refused_by_its_line(line, words, tmp_path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(InputError, match=words):
        documents.read_documents(str(tmp_path / "data.jsonl"))


def test_the_hub_is_named_where_it_fails(monkeypatch) -> None:
    import datasets

    requests = []

    def load(name, split):
        requests.append((name, split))
        if name == "some/chats":
            return [{"messages": MESSAGES}]
        raise ConnectionError

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert list(documents.read_documents("hf:some/chats:test")[0].messages) == MESSAGES
    with pytest.raises(
        ConfigError, match=r"data\.source='hf:no/chats': it cannot be loaded from the hub"
    ):
        documents.read_documents("hf:no/chats")
    assert requests == [("some/chats", "test"), ("no/chats", "train")]


@pytest.fixture
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "target", trust_remote_code=False)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_the_assistants_words_are_what_counts(tokenizer) -> None:
    ((ids, mask),) = chat.encode(tokenizer, [MESSAGES], responses_only=True)
    assert tokenizer.decode(np.array(ids)[mask]) == "Four.<end>Seven, I think.<end>"
    ((_, everything),) = chat.encode(tokenizer, [MESSAGES], responses_only=False)
    assert everything.all()


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_the_projects_templates_mark_what_the_assistant_says(tokenizer, name) -> None:
    tokenizer = with_template(
        tokenizer, str(ASSETS.parents[1] / "configs" / "templates" / f"{name}.jinja")
    )
    ((ids, mask),) = chat.encode(tokenizer, [MESSAGES], responses_only=True)
    learnt, whole = tokenizer.decode(np.array(ids)[mask]), tokenizer.decode(ids)
    end = {"llama3": "<|eot_id|>", "qwen3": "<|im_end|>"}[name]
    assert learnt.count(end) == 2
    assert "Four." + end in learnt and "Seven, I think." + end in learnt
    assert "two and two" in whole and "two and two" not in learnt
    prompt = tokenizer.apply_chat_template(MESSAGES[:1], add_generation_prompt=True, tokenize=False)
    answered = tokenizer.apply_chat_template(MESSAGES[:2], tokenize=False)
    assert answered.startswith(prompt)  # generation continues where the answer was learnt


def test_a_template_without_marks_is_refused_with_its_first_line(tokenizer, tmp_path) -> None:
    plain = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    tokenizer.chat_template = plain
    with pytest.raises(
        ConfigError,
        match=r"marks no token as the assistant's, .* begins with .\{% for m in messages %\}",
    ):
        chat.encode(tokenizer, [MESSAGES], responses_only=True)
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    mended = with_template(tokenizer, str(tmp_path / "template.jinja"))
    assert chat.encode(mended, [MESSAGES], responses_only=True)[0][1].any()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="has no chat template"):
        chat.encode(tokenizer, [MESSAGES], responses_only=True)
    with pytest.raises(InputError, match=r"data\.chat_template='nowhere'"):
        with_template(tokenizer, "nowhere", section="data.")


def test_conversations_are_packed_with_their_mask(tmp_path) -> None:
    write_jsonl(tmp_path / "chats.jsonl", [{"conversations": SHAREGPT}] * 40)
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    settings = {
        "source": str(tmp_path / "chats.jsonl"),
        "tokenizer": str(ASSETS / "target"),
        "window": 24,
        "holdout": 0.2,
    }
    config = DataConfig(**settings, chat_template=str(tmp_path / "template.jinja"))
    tokenizer, packed, held_out, _ = data.prepare(config)
    assert len(packed["tokens"]) > len(held_out["tokens"]) > 0
    labels = packed["tokens"][:, 1:][packed["loss_mask"]]
    answers = tokenizer.decode(labels.tolist()).split("<end>")
    assert set(answers[1:-1]) == {"Four.", "Seven, I think."}  # at the ends a window may cut one
    with pytest.raises(ConfigError, match=r"data\.tokenizer='': conversations need a tokenizer"):
        data.prepare(DataConfig(source=settings["source"], holdout=0.2))
    write_jsonl(tmp_path / "mixed.jsonl", [{"text": "a"}, {"messages": MESSAGES}] * 40)
    with pytest.raises(ConfigError, match="it has both texts and conversations; give one kind"):
        data.prepare(DataConfig(source=str(tmp_path / "mixed.jsonl"), holdout=0.2))
