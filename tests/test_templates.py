"""Chat templates: their sources, their settings, and which of these are refused."""

import json
from pathlib import Path

import pytest

import specjax
from specjax import client, pipeline, text
from specjax.cli.main import main
from specjax.client import writer
from specjax.errors import InputError
from specjax.ray import Generate
from specjax.serving.engine import Engine
from specjax.templates import names_read, read_settings, renderer, settings_of, with_template
from specjax.training import chat, data, fingerprint
from specjax.training.config import DataConfig
from tests import documents
from tests.conftest import ASSETS
from tests.documents import README, ROOT

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if mood is defined %}<{{"
    " mood }}>{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
REFUSES_MOODS = (
    "{% if mood == 'bad' and messages|length > 1 %}{{ raise_exception('no such mood') }}{% endif %}"
    + TEMPLATE
)
USER = {"role": "user", "content": "hello"}


class SeenError(Exception):
    pass


@pytest.fixture
def tokenizer():
    embedded = text.load_tokenizer(ASSETS / "target")
    embedded.chat_template = TEMPLATE
    return embedded


def read(tokenizer, messages=(USER,), **settings) -> str:
    return tokenizer.decode(text.encode_chat(tokenizer, messages, settings))


def test_a_chats_own_settings_go_over_those_of_all_chats_by_name(tokenizer) -> None:
    tokenizer.chat_template = TEMPLATE.replace("[assistant]", "{{ other }}")
    both = with_template(tokenizer, settings={"mood": "good", "other": 1})
    assert read(both) == "[user]hello<good>1"
    assert read(both, mood="bad") == "[user]hello<bad>1"
    assert read(both) == "[user]hello<good>1"  # the settings of a chat end with it
    assert read(tokenizer) == "[user]hello"
    assert settings_of(tokenizer) == {}


def test_settings_reach_messages_with_null_too(tokenizer) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content or 'nothing' }}{% endfor %}{{ mood }}"
    )
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": []}]
    assert read(tokenizer, messages, mood="!").endswith("!")
    assert (
        renderer(tokenizer, {"mood": "!"})([{"role": "assistant", "content": None}]) == "nothing!"
    )


def test_a_file_and_settings_in_json_make_another_tokenizer(tokenizer, tmp_path) -> None:
    file = tmp_path / "one.jinja"
    file.write_text("{{ messages[0].content }}{{ mood }}")
    other_tokenizer = with_template(tokenizer, str(file), '{"mood": "good"}')
    assert read(other_tokenizer) == "hellogood"
    assert tokenizer.chat_template == TEMPLATE
    assert with_template(tokenizer) is tokenizer


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("{", "chat_template_kwargs='{': must be a JSON object"),
        ("[1]", "must be a JSON object"),
        ("[" * 100_000, "must be a JSON object"),
        ('{"messages": []}', "'messages' is not a variable"),
        ('{"tools": [1]}', "'tools' is not a variable"),
        ('{"chat_template": "{{ 1 }}"}', "'chat_template' is not a variable"),
        ('{"continue_final_message": true}', "'continue_final_message' is not a variable"),
        ('{"tokenize": true}', "'tokenize' is not a variable"),
        ('{"add_generation_prompt": 1}', "'add_generation_prompt' is not a variable"),
        ('{"moood": 1}', "does not read 'moood', but mood; did you mean mood"),
    ],
)
def test_what_is_no_setting_is_refused_by_its_name(tokenizer, settings: str, message: str) -> None:
    with pytest.raises(InputError, match="chat_template_kwargs") as error:
        with_template(tokenizer, settings=settings)
    assert message in str(error.value)
    assert len(str(error.value)) < 300


def test_what_changes_nothing_is_taken() -> None:
    neutral = {
        "tools": [],
        "documents": None,
        "add_generation_prompt": True,
        "continue_final_message": False,
    }
    assert read_settings(neutral) == read_settings("") == read_settings({}) == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "is empty"), ("{% if %}", "not a valid Jinja template"), (b"\xff", "cannot be read")],
)
def test_a_file_that_is_no_template_is_refused(
    tokenizer, tmp_path, content: str | bytes, message: str
) -> None:
    file = tmp_path / "one.jinja"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InputError, match=rf"chat_template=.*{message}"):
        with_template(tokenizer, str(file))
    with pytest.raises(InputError, match="chat_template='nowhere'"):
        with_template(tokenizer, "nowhere")


def test_an_error_of_the_template_names_the_settings_where_they_are_its_cause(tokenizer) -> None:
    tokenizer.chat_template = REFUSES_MOODS
    for with_settings, settings in (
        (tokenizer, {"mood": "bad"}),
        (with_template(tokenizer, settings={"mood": "bad"}), {}),
    ):
        with pytest.raises(InputError, match=r"^chat_template_kwargs: .*'bad'.*no such mood"):
            read(with_settings, [USER, USER], **settings)
    tokenizer.chat_template = "{{ raise_exception('nothing will do') }}{{ mood }}"
    with pytest.raises(InputError, match=r"^messages: .*nothing will do"):
        read(tokenizer, mood="bad")


@pytest.mark.parametrize(
    "reach",
    ["''.__class__.__mro__", "messages.__class__", "mood.__class__", "cycler.__init__.__globals__"],
)
def test_a_template_stays_in_its_sandbox(tokenizer, reach: str) -> None:
    tokenizer.chat_template = f"{{{{ {reach}.__name__ }}}}{{{{ messages[0].content }}}}"
    with pytest.raises(InputError, match="unsafe"):
        read(tokenizer, mood="good")


def test_a_setting_is_text_and_no_template(tokenizer) -> None:
    assert read(tokenizer, mood="{{ 7 * 7 }}") == "[user]hello<{{ 7 * 7 }}>[assistant]"


def test_the_names_that_templates_of_the_project_read() -> None:
    embedded = text.load_tokenizer(ASSETS / "target")
    for file in sorted((ROOT / "configs" / "templates").glob("*.jinja")):
        names = names_read(with_template(embedded, str(file)))
        assert names is not None and "messages" in names, file


def test_a_training_reads_them_and_its_data_say_so(tokenizer, tmp_path) -> None:
    file, source = tmp_path / "one.jinja", tmp_path / "chats.jsonl"
    file.write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{%"
        " endgeneration %}{% else %}{{ mood or '' }}{{ m.content }}{% endif %}{% endfor %}"
    )
    answers = [{"role": "assistant", "content": f"good day {number}"} for number in range(20)]
    source.write_text(
        "".join(json.dumps({"messages": [USER, answer]}) + "\n" for answer in answers)
    )
    settings = {
        "source": str(source),
        "tokenizer": str(ASSETS / "target"),
        "window": 8,
        "holdout": 0.2,
    }
    learnt = []
    for template_settings in ("", '{"mood": "glad"}'):
        config = DataConfig(
            **settings, chat_template=str(file), chat_template_kwargs=template_settings
        )
        of_data, packed, *_ = data.prepare(config)
        learnt.append(of_data.decode(packed["tokens"][0].tolist()))
    assert ["glad" in words for words in learnt] == [False, True]
    plain = with_template(tokenizer, str(file))
    glad = with_template(tokenizer, str(file), {"mood": "glad"})
    assert fingerprint.of_tokenizer(plain) != fingerprint.of_tokenizer(glad)
    texts_of_plain = fingerprint.of_tokenizer(plain, chats=False)
    assert texts_of_plain == fingerprint.of_tokenizer(glad, chats=False)
    file.write_text("{{ mood.upper() }}{{ messages }}")
    stumbling = with_template(tokenizer, str(file))
    stumbling.chat_template_kwargs = {"mood": 1}
    with pytest.raises(
        InputError,
        match=r"conversation 1: the chat template, given data\.chat_template_kwargs={'mood': 1},",
    ):
        chat.encode(stumbling, [[USER]], responses_only=False)
    with pytest.raises(
        InputError, match=r"data\.chat_template_kwargs: the chat template does not read 'moods'"
    ):
        data.prepare(
            DataConfig(**settings, chat_template=str(file), chat_template_kwargs='{"moods": 1}')
        )


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--chat", "--prompt", "a"],
        ["evaluate", "--questions", "QUESTIONS"],
        ["serve", "--port", "0"],
        ["regenerate", "--source", "QUESTIONS", "--output", "OUTPUT"],
        ["client", "--chat", "--prompt", "a", "--drafter", "eagle3:one", "--target-parts", "parts"],
    ],
    ids=lambda command: command[0],
)
def test_every_command_that_renders_chats_has_the_two_options(
    command: list[str], tmp_path, monkeypatch
) -> None:
    def see(*_: object, **options: object) -> None:
        raise SeenError(options["chat_template"], options["chat_template_kwargs"])

    monkeypatch.setattr(pipeline, "load", see)
    monkeypatch.setattr(client, "connect", see)
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "a"}\n')
    named = {"QUESTIONS": str(questions), "OUTPUT": str(tmp_path / "out.jsonl")}
    words = [named.get(word, word) for word in command]
    if command[0] != "client":
        words += ["--target", "embedded", "--drafter", "none"]
    if command[0] == "regenerate":
        questions.write_text(
            json.dumps({"messages": [USER, {"role": "assistant", "content": "b"}]}) + "\n"
        )
    options = ["--chat-template", "one.jinja", "--chat-template-kwargs", '{"mood": 1}']
    with pytest.raises(SeenError) as raised:
        main([*words, *options])
    assert raised.value.args == ("one.jinja", '{"mood": 1}')


@pytest.mark.parametrize(
    "option",
    [["--chat-template", "one.jinja"], ["--chat-template-kwargs", "{}"]],
    ids=lambda option: option[0],
)
@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--target", "embedded", "--prompt", "a"],
        [
            *("evaluate", "--target", "embedded", "--questions", str(README)),
            *("--drafter", "embedded:eagle3", "--chat", "False"),
        ],
    ],
    ids=lambda command: command[0],
)
def test_where_nothing_is_a_chat_they_are_refused(
    command: list[str], option: list[str], capsys
) -> None:
    assert main([*command, *option]) == 2
    assert (
        f"{option[0][2:].replace('-', '_')}='{option[1]}': it applies to chats only"
        in capsys.readouterr().err
    )


def see_whether_it_is_a_chat(*_: object, is_chat: object = None, **__: object) -> None:
    raise SeenError(is_chat)


@pytest.mark.parametrize("chat", [False, True])
def test_generate_says_whether_an_answer_is_a_chats(chat: bool, tmp_path, monkeypatch) -> None:
    """Check the flag for models with channels: only the final channel of a chat is its text."""
    file = tmp_path / "one.jinja"
    file.write_text(TEMPLATE)
    monkeypatch.setattr(pipeline.TextGenerator, "start", see_whether_it_is_a_chat)
    words = ["generate", "--target", "embedded", "--drafter", "none", "--prompt", "a"]
    with pytest.raises(SeenError) as raised:
        main([*words, "--chat", "--chat-template", str(file)] if chat else words)
    assert raised.value.args == (chat,)


@pytest.mark.parametrize("chat", [False, True])
def test_a_client_says_whether_an_answer_is_a_chats(chat: bool, monkeypatch) -> None:
    generator = pipeline.load("embedded")
    generator.tokenizer.chat_template = TEMPLATE
    connected = client.connect(
        "ws://127.0.0.1:9",
        specjax.PromptLookup(draft=2),
        generator.target,
        tokenizer=generator.tokenizer,
        capacity=32,
    )
    monkeypatch.setattr(writer, "Display", see_whether_it_is_a_chat)
    with pytest.raises(SeenError) as raised:
        connected.stream([USER] if chat else "hello", max_new_tokens=4)
    assert raised.value.args == (chat,)


@pytest.mark.full
@pytest.mark.thorough_except("True")
@pytest.mark.parametrize("chat", [False, True])
def test_regenerate_says_whether_an_answer_is_a_chats(chat: bool, tmp_path, monkeypatch) -> None:
    file, source = tmp_path / "one.jinja", tmp_path / "source.jsonl"
    file.write_text(TEMPLATE)
    messages = [USER, {"role": "assistant", "content": "b"}]
    source.write_text(json.dumps({"messages": messages} if chat else {"text": "hello"}) + "\n")
    monkeypatch.setattr(Engine, "submit", see_whether_it_is_a_chat)
    words = ["--target", "embedded", "--source", str(source)]
    words += ["--output", str(tmp_path / "out.jsonl"), "--batch", "1"]
    with pytest.raises(SeenError) as raised:
        main(["regenerate", *words, "--chat-template", str(file)])
    assert raised.value.args == (chat,)
    with (
        Generate("embedded", column="column", chat_template=str(file), rows=1) as generate,
        pytest.raises(SeenError) as raised,
    ):
        generate({"column": [[USER] if chat else "hello"]})
    assert raised.value.args == (chat,)


def test_connecting_sets_them_for_all_chats() -> None:
    generator = pipeline.load("embedded")
    generator.tokenizer.chat_template = TEMPLATE
    options = {
        "tokenizer": generator.tokenizer,
        "capacity": 32,
        "chat_template_kwargs": {"mood": "good"},
    }
    connected = client.connect(
        "ws://127.0.0.1:9", specjax.PromptLookup(draft=2), generator.target, **options
    )
    assert generator.tokenizer.decode(connected.encode([USER])) == "[user]hello<good>[assistant]"
    with pytest.raises(InputError, match="chat_template: target_parts has no tokenizer"):
        client.connect(
            "ws://127.0.0.1:9",
            specjax.PromptLookup(draft=2),
            generator.target,
            chat_template_kwargs={"mood": 1},
        )


def test_loading_sets_them_for_all_chats(tmp_path) -> None:
    file = tmp_path / "one.jinja"
    file.write_text(TEMPLATE)
    generator = pipeline.load("embedded", chat_template=file, chat_template_kwargs={"mood": "good"})
    encoded = [generator.encode([USER]), generator.encode("hello", chat=True)]
    assert [generator.tokenizer.decode(ids) for ids in encoded] == [
        "[user]hello<good>[assistant]"
    ] * 2
    ids = generator.encode([USER], chat_template_kwargs={"mood": "bad"})
    assert generator.tokenizer.decode(ids) == "[user]hello<bad>[assistant]"


def test_the_readmes_recipe_has_one_template_throughout() -> None:
    commands = [
        words
        for words in documents.command_lines(README)
        if "Qwen/Qwen3-8B" in words and "--target" in words
    ]
    reading = {
        words[0]: words for words in commands if words[0] in ("regenerate", "evaluate", "serve")
    }
    assert len(reading) == 3
    named = {name: words[words.index("--chat-template") + 1] for name, words in reading.items()}
    config = (Path(ROOT) / "configs" / "eagle3_qwen3_8b.yaml").read_text()
    assert set(named.values()) == {"configs/templates/qwen3.jinja"}
    assert "chat_template: configs/templates/qwen3.jinja" in config
