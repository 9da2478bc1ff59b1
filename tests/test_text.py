import io
import json
import random
import shutil
import subprocess
import sys
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, processors
from transformers import PreTrainedTokenizerFast

from specjax import text
from specjax.cli import evaluate
from specjax.errors import InputError
from specjax.training.tokenizer import encode_texts, read_tokenizer
from tests.conftest import ASSETS, SHARED


@pytest.fixture(scope="module")
def tokenizer():
    return text.load_tokenizer(ASSETS / "target")


def test_pieces_joined_are_the_text(tokenizer) -> None:
    whole = "def naïve():\n    return '日本語 🎉'  # done\n"
    ids = text.encode(tokenizer, whole)
    stream = text.TextStream(tokenizer, ids[:3])
    pieces = [stream.push([token]) for token in ids[3:]]
    start = tokenizer.decode(ids[:3], skip_special_tokens=True)
    assert start + "".join(pieces) + stream.push([], last=True) == whole
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


class Shouting(PreTrainedTokenizerFast):
    """A tokenizer that decodes in its own way."""

    def _decode(self, token_ids, **kwargs) -> str:
        return super()._decode(token_ids, **kwargs).upper()


@pytest.mark.parametrize("has_own_way", [False, True])
def test_a_tokenizer_that_decodes_in_its_own_way_is_asked_itself(tokenizer, has_own_way) -> None:
    if has_own_way:
        tokenizer = Shouting(tokenizer_object=tokenizer.backend_tokenizer)
    stream = text.TextStream(tokenizer, text.encode(tokenizer, "import"))
    piece = stream.push(text.encode(tokenizer, " os"), last=True)
    assert piece == (" OS" if has_own_way else " os")


def test_an_unfinished_character_is_let_go_at_the_end(tokenizer) -> None:
    ids = text.encode(tokenizer, "x🎉")
    stream = text.TextStream(tokenizer, ids[:1])
    assert stream.push(ids[1:-1]) in ("", "x")
    assert "\N{REPLACEMENT CHARACTER}" in stream.push([], last=True)


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def of_bytes_and_spaces(kind: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer like that of Llama 2 ("llama") or T5, whose words begin with spaces.

    The space that begins a text is dropped.
    """
    words = ["\u2581", "\u2581a", "a", "b", "\u2581the", "the", "é"]
    words += ["\u2581日本", "\u2581.", "\u2581\u2581"]
    if kind == "llama":
        vocab = {token: number for number, token in enumerate(["<unk>", *BYTES, *words])}
        backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
        steps = [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
        backend.decoder = decoders.Sequence(steps)
    else:
        backend = tokenizers.Tokenizer(
            models.Unigram([(token, -1.0) for token in ["<unk>", *words]], 0, byte_fallback=False)
        )
        backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<tool>"],
    )


def any_tokenizer(kind: str):
    if kind in ("llama", "unigram"):
        return of_bytes_and_spaces(kind)
    return text.load_tokenizer(SHARED / "stories260k" if kind == "stories" else ASSETS / "target")


KINDS = ["byte-level", "llama", "unigram", *["stories"] * (SHARED / "stories260k").is_dir()]


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_joined_are_the_text_however_it_is_cut(kind) -> None:
    """Cut texts of any tokens, and compare the joined pieces with the whole text.

    There are special tokens alone in a piece or inside a character, bytes that are no text, and
    prompts that end in such.
    """
    tokenizer = any_tokenizer(kind)
    rng = random.Random(0)
    vocabulary = tokenizer.get_vocab()
    pools = [
        [i for token, i in vocabulary.items() if token in BYTES],
        tokenizer.all_special_ids,
        list(vocabulary.values()),
    ]
    pools += [tokenizer("日本 é 🎉 the\n\n a")["input_ids"]]

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    for _ in range(1500):
        pool_of_each = rng.choices(
            [pool for pool in pools if pool],
            k=rng.choice([rng.randrange(1, 16), rng.randrange(16, 60)]),
        )
        ids = [rng.choice(pool) for pool in pool_of_each]
        if rng.random() < 0.3:  # whole characters, with something in between
            ids += pools[3]
            ids.insert(rng.randrange(len(ids)), rng.choice(tokenizer.all_special_ids))
        start = rng.randrange(len(ids))
        stream, pieces, at = text.TextStream(tokenizer, ids[:start]), [], start
        while at < len(ids):
            count = rng.choice([1, 1, 2, 5])
            pieces.append(stream.push(ids[at : at + count]))
            at += count
        pieces.append(stream.push([], last=True))
        whole = decode(ids)
        before = decode(ids[:start])
        while not whole.startswith(before):  # the prompt does not end with this after all
            before = before[:-1]
        assert before + "".join(pieces) == whole, (ids, start)


def test_a_character_that_a_prompt_begins_is_whole_in_what_follows(tokenizer) -> None:
    ids = text.encode(tokenizer, "x🎉y")
    end = next(
        n
        for n in range(len(ids))
        if tokenizer.decode(ids[:n]).endswith("\N{REPLACEMENT CHARACTER}")
    )
    stream = text.TextStream(tokenizer, ids[:end])
    assert "".join(stream.push([token]) for token in ids[end:]) == "🎉y"


def test_a_text_is_not_decoded_again_with_every_piece(tokenizer) -> None:
    """Check that the cost of a piece does not grow with the text, also after special tokens."""
    stream = text.TextStream(tokenizer, text.encode(tokenizer, "import os"))
    for _ in range(50):
        stream.push([*text.encode(tokenizer, "x = 1\n"), tokenizer.eos_token_id])
        stream.push([tokenizer.eos_token_id])
    decoded = []
    stream._decode = lambda tokens: decoded.append(len(tokens)) or tokenizer.decode(tokens)
    stream.push(text.encode(tokenizer, "y"))
    assert max(decoded) < 24


def run_of(tokenizer: Any, kind: str) -> list[int]:
    """Return one or more tokens that are no text, however often they are repeated."""
    if kind == "special":
        return [tokenizer.eos_token_id]
    if kind == "unknown":
        return [len(tokenizer) + 7]
    if "<0xE3>" in tokenizer.get_vocab():
        return tokenizer.convert_tokens_to_ids(["<0xE3>"])
    letter = "\N{HIRAGANA LETTER A}"
    return tokenizer.backend_tokenizer.encode(letter, add_special_tokens=False).ids[:1]


# The second string is completed by the token that ends the run.
@pytest.mark.parametrize("stop", ["ab", "b"])
@pytest.mark.parametrize("at_once", [1, 5])
@pytest.mark.parametrize("what", ["special", "unknown", "unfinished"])
@pytest.mark.parametrize("kind", ["byte-level", "llama"])
def test_a_long_run_of_tokens_that_are_no_text_takes_linear_time(kind, what, at_once, stop) -> None:
    tokenizer, decoded = copy(any_tokenizer(kind)), []
    prompt = tokenizer.convert_tokens_to_ids(["a", "b"])
    after = tokenizer.convert_tokens_to_ids([*stop, "b"])
    run = 1000 * run_of(tokenizer, what)
    decode = tokenizer.decode
    tokenizer.decode = lambda tokens, **named: (
        decoded.append(len(tokens)) or decode(tokens, **named)
    )
    growing, whole = text.GrowingText(tokenizer, prompt, [stop]), [*run, *after]
    decoded.clear()
    for start in range(0, len(whole), at_once):
        growing.push(whole[start : start + at_once])
    assert growing.stopped
    assert growing.tokens == whole[:-1]
    assert "".join(growing.pieces) == decode(run, skip_special_tokens=True)
    assert sum(decoded) < 60 * len(run)  # quadratic: 500 and more


def test_a_token_of_the_vocabulary_that_is_named_for_padding_is_still_text(tokenizer) -> None:
    tokenizer = copy(tokenizer)
    prompt, rest = tokenizer.encode("import"), tokenizer.encode(" os, import sys")
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(rest[0])
    stream = text.TextStream(tokenizer, prompt)
    assert "".join(stream.push([token]) for token in rest) == " os, import sys"


def length_at_a_stop_string(
    tokenizer: Any, prompt: list[int], ids: list[int], stop: list[str]
) -> int:
    """Return how many tokens it takes for the text to hold a stop string.

    This is the slow way, which decodes all tokens again for each length.
    """
    for count in range(1, len(ids) + 1):
        piece = text.TextStream(tokenizer, prompt).push(ids[:count], last=True)
        if any(string in piece for string in stop):
            return count
    return len(ids)


@pytest.mark.parametrize("kind", ["byte-level", "llama"])
def test_the_token_that_completes_a_stop_string_is_the_last(kind) -> None:
    tokenizer, rng, stopped = any_tokenizer(kind), random.Random(1), 0
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    silent = [run_of(tokenizer, what)[0] for what in ("special", "unknown", "unfinished")]
    # Whole characters of one byte and of three, so that a stop string can end in the middle of a
    # run.
    names = [f"<0x{byte:02X}>" for byte in "baあ".encode()]
    characters = (
        tokenizer.convert_tokens_to_ids(names)
        if kind == "llama"
        else tokenizer.encode("baあ", add_special_tokens=False)
    )
    stop = ["bab", "bba", "あb"]
    for _ in range(300):
        parts = [[a], [b], *([token] for token in silent[:2]), rng.choice([silent[2:], characters])]
        ids = [token for part in rng.choices(parts, k=rng.randrange(2, 60)) for token in part]
        growing, at = text.GrowingText(tokenizer, [a], stop), 0
        while at < len(ids):
            count = rng.choice([1, 1, 2, 5, 40])
            growing.push(ids[at : at + count])
            at += count
        growing.finish()
        expected = length_at_a_stop_string(tokenizer, [a], ids, stop)
        assert growing.tokens == ids[:expected], ids
        stopped += expected < len(ids)
    assert stopped > 30


def test_prompts_begin_with_the_bos_token(tokenizer) -> None:
    assert text.encode(tokenizer, "import")[0] == tokenizer.bos_token_id


def test_padding() -> None:
    tokens, lengths = text.pad([[1, 2, 3], [4]])
    assert tokens.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert lengths.tolist() == [3, 1]


def test_what_begins_a_text_is_not_put_before_a_prompt_that_has_it(tokenizer) -> None:
    begin, rest = tokenizer.bos_token, tokenizer("import os", add_special_tokens=False)["input_ids"]
    for times, expected in ((0, 1), (1, 1), (2, 2)):
        assert (
            text.encode(tokenizer, begin * times + "import os")
            == [tokenizer.bos_token_id] * expected + rest
        )


def saved(directory: Path, adds: str, **stated: Any) -> Path:
    """Write a tokenizer and its configuration, and return the directory.

    Its tokenizer.json adds the tokens that are around the x in ``adds``.
    """
    vocab = {token: number for number, token in enumerate(["<s>", "</s>", "<m>", "a", "b"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, []))
    tokenizer.add_special_tokens(["<s>", "</s>", "<m>"])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    if adds != "x":
        special = [(token, vocab[token]) for token in ("<s>", "</s>", "<m>") if token in adds]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=adds.replace("x", "$A"), special_tokens=special
        )
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        **stated,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    "of_class", ["PreTrainedTokenizerFast", "LlamaTokenizerFast", "LlamaTokenizer"]
)
@pytest.mark.parametrize(
    ("adds", "stated", "expected"),
    [
        ("x", {"add_bos_token": True, "add_eos_token": False}, "<s>ab"),  # as DeepSeek-V3
        ("x", {"add_bos_token": True}, "<s>ab"),
        ("x", {"add_bos_token": False, "add_eos_token": True}, "ab</s>"),
        ("x", {"add_bos_token": True, "add_eos_token": True}, "<s>ab</s>"),
        ("<s> x", {"add_bos_token": False}, "ab"),
        ("<s> x", {"add_eos_token": True}, "<s>ab</s>"),  # a setting that is not stated stays
        ("<s> x", {}, "<s>ab"),
        ("<s> x", {"add_bos_token": None}, "<s>ab"),
        ("<s> x </s>", {"add_eos_token": False}, "<s>ab"),
        ("<m> x", {"add_bos_token": False}, "<m>ab"),
        ("x", {"add_bos_token": True, "bos_token": None}, "ab"),
        ("x", {"add_bos_token": True, "eos_token": "<s>"}, "<s>ab"),
    ],
)
def test_texts_begin_and_end_as_the_configuration_says(
    tmp_path, of_class: str, adds: str, stated: dict, expected: str
) -> None:
    tokenizer = text.load_tokenizer(saved(tmp_path, adds, tokenizer_class=of_class, **stated))
    assert tokenizer.decode(text.encode(tokenizer, "ab")) == expected
    assert tokenizer.decode(text.encode_continuation(tokenizer, "ab")) == "ab"
    assert tokenizer.decode(text.encode(tokenizer, "<s>ab")).count("<s>") == 1
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert (
        tokenizer.decode(text.encode_chat(tokenizer, [{"role": "user", "content": "ab"}])) == "ab"
    )
    # A training run reads texts with this tokenizer, and saves it beside the checkpoint.
    trained = read_tokenizer(tmp_path)
    assert tokenizer.decode(encode_texts(trained.backend_tokenizer, ["ab"])[0]) == expected
    trained.save_pretrained(tmp_path / "saved")
    again = text.load_tokenizer(tmp_path / "saved")
    assert again.decode(text.encode(again, "ab")) == expected


def test_tokens_that_cannot_be_as_the_configuration_says_are_refused(tmp_path) -> None:
    with pytest.raises(
        InputError,
        match=r"tokenizer_config\.json: add_bos_token=true, but tokenizer\.json adds other tokens",
    ):
        text.load_tokenizer(saved(tmp_path, "<m> x", add_bos_token=True))


def test_chat_template_is_applied_or_refused(tokenizer) -> None:
    with pytest.raises(InputError, match="no chat template"):
        text.encode(tokenizer, "hello", chat=True)
    chatty = text.load_tokenizer(ASSETS / "target")
    chatty.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if"
        " add_generation_prompt %}[assistant]{% endif %}"
    )
    ids = text.encode(chatty, "hello", chat=True)
    assert chatty.decode(ids) == "[user]hello[assistant]"


# What templates of published models do with roles, calls of tools and thoughts, in short.
FIRST_SYSTEM_ALONE = """
{%- for m in messages %}
{%- if m.role == 'system' and loop.first or m.role == 'user' %}[{{ m.role }}]{{ m.content }}
{%- elif m.role == 'assistant' %}[assistant]
{%- if m.reasoning_content and loop.index0 > messages|length - 3 %}<{{ m.reasoning_content }}>
{%- endif %}
{{- m.content.split('</think>')[-1] | trim if m.content }}
{%- for call in m.tool_calls or [] %}
{%- set f = call.function %}({{ f.name }} {{ f.arguments | tojson }})
{%- endfor %}
{%- elif m.role == 'tool' %}[tool]{{ m.content }}
{%- endif %}{% endfor %}[assistant]"""
CALLS_WITHOUT_CONTENT = """
{%- for m in messages %}
{%- if m['role'] in ('system', 'user', 'tool') %}[{{ m['role'] }}]{{ m['content'] }}{% endif %}
{%- if m['role'] == 'assistant' and m['content'] is none %}
{%- for call in m['tool_calls'] %}
{{- '(' + call['function']['name'] + ' ' + call['function']['arguments'] + ')' }}{% endfor %}
{%- elif m['role'] == 'assistant' %}{{ '[assistant]' + m['content'] }}
{%- endif %}{% endfor %}[assistant]"""
ANY_ROLE = """
{%- for m in messages %}[{{ m.role }}]{{ m.content | trim }}
{%- if 'tool_calls' in m %}({{ m.tool_calls[0].function.name }}
{{- ' ' }}{{ m.tool_calls[0].function.arguments | tojson }})
{%- endif %}
{%- endfor %}[assistant]"""
WITH_DEVELOPER = """
{%- for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}
{%- if m.tool_calls and m.content and m.thinking %}
{{- raise_exception('content and thinking') }}{% endif %}
{%- if 'tool_calls' in m %}<{{ m.content or m.thinking }}>({{ m.tool_calls[0].function.name }})
{%- else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}[assistant]"""
NO_TOOLS = (
    "{% for m in messages if m.role in ('user', 'assistant') %}[{{ m.role }}]{{ m.content }}{%"
    " endfor %}"
)

CALL = {"id": "1", "type": "function", "function": {"name": "read", "arguments": '{"path":"a"}'}}
USER = {"role": "user", "content": "hello"}
WITH_TOOL = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "7"},
]


@pytest.fixture(scope="module")
def chat_text():
    """Return a function that renders a chat with a template, as it is encoded."""
    tokenizer = text.load_tokenizer(ASSETS / "target")

    def render(template: str, messages: Any) -> str:
        tokenizer.chat_template = template.removeprefix("\n")
        return tokenizer.decode(text.encode_chat(tokenizer, messages))

    return render


def message(role: str, content: Any = "hello", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        # A developer is the system, except for templates that know developers.
        (
            FIRST_SYSTEM_ALONE,
            [message("developer", "brief"), USER],
            "[system]brief[user]hello[assistant]",
        ),
        (
            CALLS_WITHOUT_CONTENT,
            [message("developer", "brief"), USER],
            "[system]brief[user]hello[assistant]",
        ),
        (ANY_ROLE, [message("developer", "brief"), USER], "[developer]brief[user]hello[assistant]"),
        (
            WITH_DEVELOPER,
            [message("developer", "brief"), USER],
            "[developer]brief[user]hello[assistant]",
        ),
        # A call of a tool, and its result.
        (
            FIRST_SYSTEM_ALONE,
            WITH_TOOL,
            '[user]hello[assistant](read {"path": "a"})[tool]7[assistant]',
        ),
        (CALLS_WITHOUT_CONTENT, WITH_TOOL, '[user]hello(read {"path":"a"})[tool]7[assistant]'),
        (ANY_ROLE, WITH_TOOL, '[user]hello[assistant](read {"path": "a"})[tool]7[assistant]'),
        # No call at all, and one without arguments.
        (ANY_ROLE, [message("assistant", "hi", tool_calls=[])], "[assistant]hi[assistant]"),
        (
            ANY_ROLE,
            [message("assistant", tool_calls=[{"function": {"name": "f"}}])],
            "[assistant]hello(f {})[assistant]",
        ),
        (
            ANY_ROLE,
            [message("assistant", "", tool_calls=[{"function": {"name": "f", "arguments": ""}}])],
            "[assistant](f {})[assistant]",
        ),
        (
            ANY_ROLE,
            [message("assistant", "", tool_calls=[{"function": {"name": "f", "arguments": "[1"}}])],
            '[assistant](f "[1")[assistant]',
        ),
        # Thoughts, under any name, if the template reads them.
        *(
            (
                FIRST_SYSTEM_ALONE,
                [USER, message("assistant", "hi", **{name: "hm"})],
                "[user]hello[assistant]<hm>hi[assistant]",
            )
            for name in ("reasoning_content", "reasoning", "thinking")
        ),
        (
            WITH_DEVELOPER,
            [message("assistant", "", reasoning="hm", tool_calls=[CALL])],
            "<hm>(read)[assistant]",
        ),
        (
            WITH_DEVELOPER,
            [message("assistant", "hi", reasoning="hm", tool_calls=[CALL])],
            "<hi>(read)[assistant]",
        ),
        # A template may drop parts of a message: space, and earlier thoughts.
        (
            FIRST_SYSTEM_ALONE,
            [message("assistant", "<think>no</think>  yes "), USER],
            "[assistant]yes[user]hello[assistant]",
        ),
        (
            FIRST_SYSTEM_ALONE,
            [message("assistant", "", reasoning="hm"), USER, USER, USER],
            "[assistant]" + "[user]hello" * 3 + "[assistant]",
        ),
        # A call is ignored if the template reads it in no form.
        (NO_TOOLS, WITH_TOOL[:2], "[user]hello[assistant]"),
        (
            NO_TOOLS,
            [USER, message("assistant", None, function_call={"name": "f", "arguments": "{}"})],
            "[user]hello[assistant]",
        ),
        # A message without text loses nothing.
        (NO_TOOLS, [message("system", " "), USER], "[user]hello"),
    ],
)
def test_a_chat_is_rendered_whole(chat_text, template: str, messages: Any, expected: str) -> None:
    assert chat_text(template, messages) == expected


def test_a_chat_may_end_after_or_within_its_last_message() -> None:
    tokenizer = text.load_tokenizer(ASSETS / "target")
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    chat = [USER, message("assistant", "begun")]
    whole = "[user]hello[end][assistant]begun"
    expected = {
        "answer": f"{whole}[end][assistant]",
        "messages": f"{whole}[end]",
        "last message": whole,
    }
    for end, rendered in expected.items():
        assert tokenizer.decode(text.encode_chat(tokenizer, chat, end=end)) == rendered
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "m.content", "m.content | replace('gun', '')"
    )
    with pytest.raises(InputError, match=r"^continue_final_message=true: .* changes the last"):
        text.encode_chat(tokenizer, chat, end="last message")


@pytest.mark.parametrize(
    ("template", "messages", "number"),
    [
        (NO_TOOLS, [USER, message("system")], 1),
        (NO_TOOLS, [message("developer"), USER], 0),
        (NO_TOOLS, WITH_TOOL, 2),  # the result of the tool
        (FIRST_SYSTEM_ALONE, [USER, USER, message("system")], 2),
        (FIRST_SYSTEM_ALONE, [USER, message("function", name="f")], 1),
        (CALLS_WITHOUT_CONTENT, [USER, message("critic")], 1),
    ],
)
def test_a_message_that_the_template_leaves_out_is_an_error(
    chat_text, template: str, messages: Any, number: int
) -> None:
    role = messages[number]["role"]
    with pytest.raises(
        InputError, match=rf"messages\[{number}\]: .* leaves out this message, with role '{role}'"
    ):
        chat_text(template, messages)


def test_a_chat_is_not_refused_where_a_template_reads_into_contents(chat_text) -> None:
    picky = (
        "{% for m in messages %}{% if 'hello' not in m.content %}{{ raise_exception('what?') }}{%"
        " endif %}{% endfor %}hello"
    )
    assert chat_text(picky, [USER]) == "hello"
    # A message that is left out only beside the content of the probe is not left out.
    first = (
        "{% for m in messages %}{% if loop.first or messages[0].content == 'hello' %}[{{ m.content"
        " }}]{% endif %}{% endfor %}"
    )
    assert chat_text(first, [USER, USER]) == "[hello][hello]"


def test_empty_prompts_and_missing_tokenizers_are_refused(tokenizer, tmp_path) -> None:
    with pytest.raises(InputError, match="prompt=''"):
        text.encode(tokenizer, "")
    with pytest.raises(InputError, match="no tokenizer"):
        text.load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "content", [b'{"version": "1.0", "added_', b"", b"[]", b"\xff\x00 garbage", b"[" * 100_000]
)
def test_a_damaged_tokenizer_is_one_line_that_names_the_file(tmp_path, content) -> None:
    shutil.copy(ASSETS / "target" / "tokenizer_config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(
        InputError, match=r"tokenizer\.json: cannot be read as a tokenizer .*download"
    ) as caught:
        text.load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json"])
def test_a_checkpoint_cannot_offer_to_run_its_code(
    tmp_path, monkeypatch, capfd, where, is_known
) -> None:
    """Check that code is not run even if somebody answers "y" on stdin.

    The plain tokenizer is read if its name is known, and otherwise the checkpoint is refused.
    """
    ran = tmp_path / "ran"
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / "tokenization_evil.py").write_text(
        "from transformers import PretrainedConfig, PreTrainedTokenizerFast\n"
        f"open({str(ran)!r}, 'w').close()\n"
        "class EvilConfig(PretrainedConfig): model_type = 'evil'\n"
        "class EvilTokenizer(PreTrainedTokenizerFast): pass\n"
    )
    code = {
        "AutoConfig": "tokenization_evil.EvilConfig",
        "AutoTokenizer": [None, "tokenization_evil.EvilTokenizer"],
    }
    contents = {
        "config.json": {"model_type": "llama" if is_known else "evil"},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast" if is_known else "EvilTokenizer"
        },
    }
    contents[where]["auto_map"] = code
    for name, content in contents.items():
        (directory / name).write_text(json.dumps(content))
    shutil.copy(ASSETS / "target" / "tokenizer.json", directory)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setattr("sys.path", [str(tmp_path / "modules"), *sys.path])
    try:
        tokenizer = text.load_tokenizer(directory)
        assert tokenizer.decode(text.encode(tokenizer, "x = 1")).endswith("x = 1")
    except InputError as error:
        assert not is_known
        assert "its tokenizer is code, which is never run: give" in str(error)
        assert "\n" not in str(error)
    assert not ran.exists()
    assert "[y/N]" not in capfd.readouterr().out


class Tokenizer:
    """A vocabulary and its special tokens."""

    def __init__(self, *tokens: str, bos: str | None = None, eos: str | None = None) -> None:
        self.vocabulary = {token: i for i, token in enumerate(tokens) if token}
        self.bos_token, self.eos_token = bos, eos

    def get_vocab(self) -> dict[str, int]:
        return dict(self.vocabulary)


def test_tokenizers_that_agree_but_for_padding(tokenizer) -> None:
    text.check_same_tokenizer(tokenizer, text.load_tokenizer(ASSETS / "draft"))
    text.check_same_tokenizer(
        Tokenizer("a", "b", eos="b"), Tokenizer("a", "b", "<pad>", "<pad2>", eos="b")
    )
    text.check_same_tokenizer(Tokenizer("a", "b", "c"), Tokenizer("a", "b", eos="b"))
    text.check_same_tokenizer(Tokenizer("a", "", "c"), Tokenizer("a", "b", "c"))


@pytest.mark.parametrize(
    ("target", "drafter", "message"),
    [
        (
            Tokenizer("a", "b", "c"),
            Tokenizer("a", "c", "b"),
            "id 1 is 'b' for the target and 'c' for the drafter",
        ),
        (
            Tokenizer("a", "b"),
            Tokenizer("a", "", "b"),
            "id 1 is 'b' for the target and no token for the drafter",
        ),
        (
            Tokenizer("a", "b", eos="a"),
            Tokenizer("a", "b", eos="b"),
            r"eos_token is 'a' \(id 0\) for .* and 'b' \(id 1\)",
        ),
        (Tokenizer("a", "b", bos="a"), Tokenizer("a", "b", bos="b"), "bos_token is 'a'"),
    ],
)
def test_tokenizers_that_disagree_are_refused(target, drafter, message) -> None:
    with pytest.raises(InputError, match=message):
        text.check_same_tokenizer(target, drafter)


def test_only_line_ends_separate_prompts(tmp_path) -> None:
    strange = "one\u2028two\x85three\x0cfour"
    plain = tmp_path / "prompts.txt"
    plain.write_bytes(f"\ufeff{strange}\r\n\n second \r\nlast".encode())
    assert text.read_prompts("prompts", str(plain)) == [strange, " second ", "last"]
    lines = tmp_path / "prompts.jsonl"
    lines.write_text(
        json.dumps({"prompt": strange.replace("\x0c", "")}, ensure_ascii=False) + "\r\n",
        encoding="utf-8",
    )
    assert text.read_prompts("prompts", str(lines)) == [strange.replace("\x0c", "")]


@pytest.mark.parametrize(
    "line", ["[]", "3", '{"prompt": 3}', '{"prompt": ""}', '{"text": null}', "{", "[" * 100_000]
)
def test_lines_that_hold_no_prompt_are_named(tmp_path, line) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "x"}\n' + line)
    with pytest.raises(InputError, match=r":2: not (a )?JSON"):
        text.read_prompts("prompts", str(file))


@pytest.mark.parametrize(
    ("whole", "stop", "expected"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["three", "two"], "one "),
        ("xabcx", ["abc", "b"], "xa"),  # "b" is complete first
        ("xabx", ["b", "ab"], "x"),  # they end together: the longer one
        ("aab", ["ab"], "a"),
        ("ababac", ["abac"], "ab"),
        ("no stop at al", ["all"], "no stop at al"),
        ("anything", [], "anything"),
    ],
)
def test_stop_strings_however_the_text_is_cut(whole, stop, expected) -> None:
    for size in range(1, len(whole) + 1):
        stopping = text.StopStrings(stop)
        before = ""
        for start in range(0, len(whole), size):
            before += stopping.push(whole[start : start + size])
            assert expected.startswith(before)
        before += stopping.push("", last=True)
        assert before == expected, size
        assert stopping.found == (expected != whole)


def test_what_is_held_back_is_the_longest_beginning_of_a_stop_string() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        stop = ["".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(rng.randint(1, 4))]
        whole = "".join(rng.choices("abc", weights=(4, 4, 1), k=rng.randint(0, 8)))
        if any(string in whole for string in stop):
            continue
        lengths = [
            n
            for n in range(len(whole) + 1)
            if any(string[:n] == whole[len(whole) - n :] for string in stop)
        ]
        shown = whole[: len(whole) - max(lengths, default=0)]
        assert text.StopStrings(stop).push(whole) == shown


@pytest.mark.full
def test_transformers_says_nothing_of_pytorch_and_is_heard_otherwise() -> None:
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from specjax import text; import logging, pathlib\n"
        f"text.load_tokenizer(pathlib.Path({str(ASSETS / 'target')!r}))\n"
        "logging.getLogger('transformers').warning('something else')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "PyTorch" not in done.stderr
    assert "something else" in done.stderr


@pytest.mark.parametrize("at_once", [1, 2, 9])
@pytest.mark.parametrize(
    ("tokens", "expected", "count"),
    [
        ("a <tool> b", "a", 2),
        ("a <0xE8> <0xAA> <0x9E> <tool> b", "a語", 5),  # until then the bytes are held back
        ("a <0x0A> b <tool>", "a", 2),  # the other string comes first
        ("a b b", "abb", 3),
        ("<tool> a <tool> b", "", 1),
    ],
)
def test_a_stop_string_that_is_a_special_token_ends_the_text(
    tokens, expected, count, at_once
) -> None:
    """Check the end of a turn, which is a token that no text shows."""
    tokenizer = of_bytes_and_spaces("llama")
    prompt, output = (
        tokenizer.convert_tokens_to_ids(words.split()) for words in ("\u2581the", tokens)
    )
    growing = text.GrowingText(
        tokenizer, prompt, ["<tool>", "\n", "\ud800", "never there", "<unk> "]
    )
    for start in range(0, len(output), at_once):
        growing.push(output[start : start + at_once])
    growing.finish()
    assert "".join(growing.pieces) == expected
    assert growing.tokens == output[:count]
    assert growing.stopped == (expected != "abb")


def test_a_special_token_within_the_first_tokens_does_not_end_the_text() -> None:
    tokenizer = of_bytes_and_spaces("llama")
    output = tokenizer.convert_tokens_to_ids(["<tool>", "a", "b", "<tool>", "a"])
    growing = text.GrowingText(tokenizer, [], ["<tool>"], stop_after=2)
    assert growing.push(output) == "ab"
    assert growing.tokens == output[:4]


# --- channels -------------------------------------------------------------------------------------

MARKS = (
    *("<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>"),
    "<|constrain|>",
)
ASKED = (
    "<|start|>system<|message|>Be brief: analysis,"
    " final.<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant"
)
THOUGHT = "<|channel|>analysis<|message|>He says hi. 日本<|end|><|start|>assistant"
ANSWERS = [
    (THOUGHT + "<|channel|>final<|message|>Hello, é 🎉!<|return|>", "Hello, é 🎉!"),
    ("<|channel|>final<|message|>Hello<|return|>", "Hello"),
    (THOUGHT + THOUGHT + "<|channel|>final<|message|>a<|end|>", "a"),
    # Calls of tools, and the text before them, are in another channel.
    ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>", ""),
    (
        THOUGHT + "<|channel|>commentary<|message|>I"
        " look.<|end|><|start|>assistant<|channel|>final<|message|>x<|return|>",
        "x",
    ),
    (THOUGHT + "<|channel|>final <|constrain|>json<|message|>{}<|return|>", "{}"),
    (THOUGHT + "<|channel|>final<|constrain|>json<|message|>{}<|return|>", "{}"),
    # An output that ends before the answer has none.
    ("", ""),
    ("<|channel|>ana", ""),
    ("<|channel|>analysis<|message|>The final answer", ""),
    (THOUGHT, ""),
    (THOUGHT + "<|channel|>final", ""),
    (THOUGHT + "<|channel|>final<|message|>", ""),
    # A message with another name, a message without a channel, and text between messages are no
    # answer.
    ("<|channel|>finally<|message|>a<|end|>", ""),
    ("final<|message|>a<|end|>", ""),
    ("<|channel|>final<|message|>a<|end|>b<|start|>assistant<|channel|>analysis<|message|>c", "a"),
    ("<|channel|>final<|message|>a<|channel|>analysis<|message|>b", "a"),
]


def with_marks():
    """Return a tokenizer with the tokens of gpt-oss around messages and channels."""
    tokenizer = text.load_tokenizer(ASSETS / "target")
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    return tokenizer


@pytest.fixture(scope="module")
def harmony():
    return with_marks()


def ids_of(tokenizer, words: str) -> list[int]:
    return list(tokenizer(words, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(("output", "answer"), ANSWERS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_of_an_answer_in_channels_the_final_one_is_the_text(
    harmony, output: str, answer: str, size: int
) -> None:
    prompt, tokens = ids_of(harmony, ASKED), ids_of(harmony, output)
    for stop in ((), ("not in it",)):
        growing = text.GrowingText(harmony, prompt, stop, is_chat=True)
        pieces = [growing.push(tokens[at : at + size]) for at in range(0, len(tokens), size)]
        pieces.append(growing.finish())
        assert "".join(pieces) == "".join(growing.pieces) == answer
        assert growing.tokens == tokens  # all count
    for cut in range(len(tokens)):  # a client starts to show provisional tokens anywhere
        before = text.text_stream(harmony, prompt, is_chat=True).push(tokens[:cut], last=True)
        after = text.text_stream(harmony, prompt + tokens[:cut], is_chat=True).push(
            tokens[cut:], last=True
        )
        assert "\N{REPLACEMENT CHARACTER}" in before or before + after == answer
    raw = text.GrowingText(harmony, prompt)
    assert raw.push(tokens) + raw.finish() == harmony.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize(("output", "answer"), ANSWERS)
def test_the_next_turn_of_an_evaluation_has_the_answer_alone(
    harmony, output: str, answer: str
) -> None:
    prompt, tokens = ids_of(harmony, ASKED), ids_of(harmony, output)
    assert evaluate._text_of(harmony, prompt, tokens, is_chat=True) == answer
    assert evaluate._text_of(harmony, prompt, tokens, is_chat=False) == harmony.decode(
        tokens, skip_special_tokens=True
    )


def test_an_answer_whose_message_is_begun_in_the_prompt(harmony) -> None:
    for channel, answer in (("analysis", ""), ("final", "ab")):
        growing = text.GrowingText(
            harmony, ids_of(harmony, f"{ASKED}<|channel|>{channel}<|message|>"), is_chat=True
        )
        assert growing.push(ids_of(harmony, "ab")) + growing.finish() == answer


def test_stop_strings_are_looked_for_in_the_answer_and_tokens_everywhere(harmony) -> None:
    output = THOUGHT + "<|channel|>final<|message|>one hi. two<|return|>"
    tokens = ids_of(harmony, output)
    for stop, answer, last in (
        ("hi.", "one ", "."),
        ("<|return|>", "one hi. two", "<|return|>"),
        ("<|end|>", "", "<|end|>"),
    ):
        growing = text.GrowingText(harmony, ids_of(harmony, ASKED), [stop], is_chat=True)
        shown = "".join([growing.push([token]) for token in tokens]) + growing.finish()
        assert (shown, growing.stopped) == (answer, True)
        assert harmony.decode(growing.tokens[-1:]) == last
        assert growing.tokens == tokens[: len(growing.tokens)]


def test_bytes_that_are_held_back_end_with_the_answer() -> None:
    """Check the end of an answer with a vocabulary of single bytes.

    The bytes of the thoughts are not part of the answer, and a stop string is found within a run of
    bytes.
    """
    tokenizer = of_bytes_and_spaces("llama")
    tokenizer.add_special_tokens({"additional_special_tokens": [*MARKS, "<tool>"]})
    tokenizer.add_tokens(["final", "analysis"])

    def ids(words: str) -> list[int]:
        return tokenizer.convert_tokens_to_ids(words.split())

    thought = "<|channel|> analysis <|message|> <0x0A> <0x0A> <|end|> <|start|> the"
    begin = ids(f"{thought} <|channel|> final <|message|> a <0x0A> <0x0A>")
    for rest in ("b <|return|>", "<0x0A> <0x0A> <|end|> <|start|>"):
        tokens = begin + ids(rest)
        growing = text.GrowingText(tokenizer, ids("<|start|> the"), ["\n\n"], is_chat=True)
        shown = "".join([growing.push([token]) for token in tokens]) + growing.finish()
        assert (shown, growing.tokens) == ("a", begin)


def test_where_there_are_no_channels_a_chat_is_as_it_was(harmony, tokenizer) -> None:
    words = "<|channel|>analysis<|message|>a"
    for without_channels, prompt in ((tokenizer, ASKED), (harmony, "user: hi\nassistant:")):
        assert not text.FinalChannel.reads(without_channels, ids_of(without_channels, prompt))
        growing = text.GrowingText(without_channels, ids_of(without_channels, prompt), is_chat=True)
        tokens = ids_of(without_channels, words)
        assert growing.push(tokens) + growing.finish() == without_channels.decode(
            tokens, skip_special_tokens=True
        )
