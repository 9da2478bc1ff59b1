"""Documents from every kind of file, and conversations in the chat template.

Conversations come with the mask of what the assistant wrote.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from transformers import AutoTokenizer

from specjax.config import ConfigError
from specjax.errors import InputError
from specjax.templates import with_template
from specjax.training import chat, data, documents, records, unusable
from specjax.training.config import DataConfig
from specjax.training.unusable import RecordTally, UnusableRecordError
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
    forms = [{"messages": MESSAGES}, {"conversations": SHAREGPT}, {"conversations": MESSAGES}]
    write_jsonl(tmp_path / "chats.jsonl", forms)
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
        [{"messages": MESSAGES[:2], records.REGENERATED_FROM: origin} for origin in origins],
    )
    again = documents.read_documents(str(tmp_path / "again.jsonl"))
    assert [documents.find_origin(document) for document in again] == origins
    assert [document.name for document in again] == origins
    assert len(set(documents.identities(again))) == 3


def test_parquet_and_jsonl_hold_the_same(tmp_path) -> None:
    from datasets import Dataset

    stories = [{"text": f"story {i}\u2028 with a line of its own"} for i in range(5)]
    write_jsonl(tmp_path / "texts.jsonl", stories)
    Dataset.from_list(stories).to_parquet(str(tmp_path / "texts.parquet"))
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
            "data.jsonl:2: a message has no content: it is missing or null",
        ),
        (
            '{"messages": [{"role": "judge", "content": "a"}]}',
            "role 'judge': it must be user, assistant, system, developer or tool",
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

    def load(name, *config, split):
        requests.append((name, *config, split))
        if name == "some/chats":
            return [{"messages": MESSAGES}]
        raise ConnectionError

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert list(documents.read_documents("hf:some/chats:test")[0].messages) == MESSAGES
    with pytest.raises(
        ConfigError, match=r"data\.source='hf:no/chats': it cannot be loaded from the hub"
    ):
        documents.read_documents("hf:no/chats")
    of_config = documents.read_documents("hf:some/chats@short:test[:10]")
    assert list(of_config[0].messages) == MESSAGES
    assert of_config[0].name == "some/chats@short:0"
    expected = [("some/chats", "test"), ("no/chats", "train"), ("some/chats", "short", "test[:10]")]
    assert requests == expected


# --- what is data ---------------------------------------------------------------------------------


def test_hidden_files_and_readmes_of_a_folder_are_no_data(tmp_path, monkeypatch) -> None:
    folder = tmp_path / ".cache" / "data"  # the folder itself may be hidden
    (folder / ".git").mkdir(parents=True)
    for name in (
        "a.txt",
        "README.md",
        "readme",
        ".hidden.txt",
        ".git/config",
        "dataset_infos.json",
    ):
        (folder / name).write_text("A text.")
    lines = []
    monkeypatch.setattr(documents, "say", lines.append)
    for source in (str(folder), f"{folder}/*", f"{folder}/**"):
        assert [file.name for file in documents.find_files(source)] == ["a.txt"], source
    assert len(lines) == 3 and "README.md, dataset_infos.json, readme" in lines[0]
    assert len(documents.find_files(str(folder / "README.md"))) == 1


def test_a_json_file_is_an_array_or_lines(tmp_path) -> None:
    file = tmp_path / "chats.json"
    shared = [{"id": str(number), "conversations": SHAREGPT} for number in range(3)]
    for indent in (None, 2):
        file.write_text(json.dumps(shared, indent=indent))
        read = documents.read_documents(str(file))
        assert [list(document.messages) for document in read] == [MESSAGES] * 3
    begins = [n for n, line in enumerate(file.read_text().splitlines(), 1) if line == "  {"]
    places = [document.place.split("chats.json:")[1] for document in read]
    assert places == [f"{line} (record {index})" for index, line in enumerate(begins, 1)]
    write_jsonl(file, shared)
    assert len(documents.read_documents(str(file))) == 3
    file.write_text("[]")
    assert documents.read_documents(str(file)) == []
    for damaged in ('[{"text": "a"}, {"text": ', '[{"text": "a"} {"text": "b"}]', "[1, 2"):
        file.write_text(damaged)
        with pytest.raises(
            ConfigError, match=r"chats.json:1 \(record \d\): not JSON .* JSON lines"
        ):
            documents.read_documents(str(file))


def test_the_nulls_of_a_table_are_no_fields(tmp_path) -> None:
    from datasets import Dataset

    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    rows = [
        {"messages": [MESSAGES[0], {"role": "assistant", "tool_calls": [call]}], "text": None},
        {"messages": [MESSAGES[0] | {"weight": 1}, MESSAGES[1]], "text": None},
        {"messages": None, "text": "A text."},
    ]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "chats.parquet"))
    first, second, third = documents.read_documents(str(tmp_path / "chats.parquet"))
    assert first.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert list(second.messages) == MESSAGES[:2]
    assert third.text == "A text."


# --- records that cannot be used ------------------------------------------------------------------


def test_a_share_of_the_records_may_be_left_out_and_is_named(tmp_path, monkeypatch) -> None:
    lines = []
    monkeypatch.setattr(unusable, "say", lines.append)
    file = tmp_path / "data.jsonl"
    fine = [json.dumps({"text": f"Text {number}."}) for number in range(198)]
    file.write_text("\n".join([fine[0], "{", *fine[1:], '{"prompt": "a"}']) + "\n")
    assert len(documents.read_documents(str(file))) == 198  # 1% is left out
    (line,) = lines
    assert "2 of 200 records are left out" in line
    assert f"{tmp_path.name}/data.jsonl:2: not JSON" in line
    assert f"{tmp_path.name}/data.jsonl:200: it has prompt" in line
    for limit, words in (
        (0, r"data.jsonl:2: not JSON .*\. Correct it, or allow a share with data.max_unusable"),
        (0.009, r"2 of 200 records cannot be used, more than data.max_unusable=0.009 allows"),
    ):
        with pytest.raises(ConfigError, match=words):
            documents.read_documents(str(file), tally=RecordTally(str(file), limit=limit))
    lines.clear()
    file.write_text("\n".join(fine))
    documents.read_documents(str(file))
    assert not lines


def test_bytes_that_are_no_text_are_those_of_their_line(tmp_path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n{"text": "\xff"}\n{"text": "b"}')
    tally = RecordTally(str(file), limit=1)
    read = documents.read_documents(str(file), tally=tally)
    assert [document.text for document in read] == ["a", "b"]
    (error,) = tally.unusable
    assert error.where == f"{tmp_path.name}/data.jsonl:3" and "not UTF-8" in error.reason


def test_a_message_names_few_places_and_a_file_all(tmp_path) -> None:
    tally = RecordTally("chats", limit=1)
    tally.total = 40
    for number in range(40):
        tally.leave_out(UnusableRecordError(f"chats:{number}", f"reason {min(number // 2, 12)}"))
    tally.write(tmp_path / "unusable.txt")
    assert len((tmp_path / "unusable.txt").read_text().splitlines()) == 40
    text = tally._reasons()
    assert text.startswith(
        "chats:24, chats:25, chats:26, chats:27, chats:28 and 11 more: reason 12"
    )
    assert text.count("reason ") == 10 and text.endswith(" and 3 more reasons")
    RecordTally("chats").write(tmp_path / "unusable.txt")
    assert not (tmp_path / "unusable.txt").exists()


def test_conversations_that_the_template_refuses_count_too(tokenizer, tmp_path) -> None:
    refuses = (
        "{% if messages[0].role == 'assistant' %}{{ raise_exception('no question') }}{% endif %}"
    )
    (tmp_path / "template.jinja").write_text(refuses + TEMPLATE)
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    chats = [[*MESSAGES, {"role": "user", "content": str(number)}] for number in range(100)]
    chats[30], chats[60] = (
        MESSAGES[1:],
        [{"role": "assistant", "content": None, "tool_calls": [call]}],
    )
    write_jsonl(tmp_path / "chats.jsonl", [{"messages": messages} for messages in chats])
    config = DataConfig(
        str(tmp_path / "chats.jsonl"),
        str(ASSETS / "target"),
        chat_template=str(tmp_path / "template.jinja"),
        window=24,
        holdout=0.2,
        max_unusable=0.02,
    )
    tally = RecordTally(config.source, limit=config.max_unusable)
    data.prepare(config, tally=tally)
    assert sorted(str(error).split("chats.jsonl:")[1] for error in tally.unusable) == [
        "31: the chat template refuses it (messages: the model's chat template refuses them (no"
        " question); check the roles and their order)",
        "61: the chat template writes no tool calls",
    ]
    with pytest.raises(ConfigError, match="2 of 100 records cannot be used"):
        data.prepare(replace(config, max_unusable=0.01))


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
    numbered = [[*SHAREGPT, {"from": "human", "value": str(number)}] for number in range(40)]
    write_jsonl(tmp_path / "chats.jsonl", [{"conversations": chat} for chat in numbered])
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    settings = {
        "source": str(tmp_path / "chats.jsonl"),
        "tokenizer": str(ASSETS / "target"),
        "window": 24,
        "holdout": 0.2,
    }
    config = DataConfig(**settings, chat_template=str(tmp_path / "template.jinja"))
    tokenizer, packed, held_out, *_ = data.prepare(config)
    assert len(packed["tokens"]) > len(held_out["tokens"]) > 0
    labels = packed["tokens"][:, 1:][packed["loss_mask"]]
    answers = tokenizer.decode(labels.tolist()).split("<end>")
    assert set(answers[1:-1]) == {"Four.", "Seven, I think."}  # at the ends a window may cut one
    with pytest.raises(ConfigError, match=r"data\.tokenizer='': conversations need a tokenizer"):
        data.prepare(DataConfig(source=settings["source"], holdout=0.2))
    write_jsonl(tmp_path / "mixed.jsonl", [{"text": "a"}, {"messages": MESSAGES}] * 40)
    with pytest.raises(
        ConfigError,
        match=r"give one kind \(.*mixed.jsonl:1 is a text, .*mixed.jsonl:2 a conversation\)",
    ):
        data.prepare(DataConfig(source=str(tmp_path / "mixed.jsonl"), holdout=0.2))
