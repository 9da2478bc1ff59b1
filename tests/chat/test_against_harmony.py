"""The parser of gpt-oss's answers beside openai-harmony, token by token.

openai-harmony reads its vocabulary from a file of OpenAI's servers. The same file is made here from
the model's tokenizer.json; the package checks its hash.
"""

import base64
import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from specjax.chat import AnswerParser, AnswerText, ChatAnswer, family_form
from tests.grammars.published_tokenizers import or_skip

_REQUIREMENT = "openai-harmony==0.0.8"
_FIRST_SPECIAL = 199_998


def _bytes_of_characters() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(unprintable)
    }


def _write_vocabulary(tokenizer: Any, file: Path) -> None:
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"]
    characters = _bytes_of_characters()
    with file.open("w") as lines:
        for token, index in sorted(vocabulary.items(), key=lambda item: item[1]):
            if index < _FIRST_SPECIAL:
                encoded = base64.b64encode(bytes(characters[character] for character in token))
                lines.write(f"{encoded.decode()} {index}\n")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return or_skip("gptoss")


@pytest.fixture(scope="module")
def harmony(tokenizer) -> Any:
    """Return the package openai_harmony and its encoding of gpt-oss."""
    cached = Path.home() / ".cache" / "specjax-tests" / "harmony"
    package = cached / "package"
    if not (package / "openai_harmony").is_dir():
        cached.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", _REQUIREMENT]
        try:
            subprocess.run([*command, "-d", "."], cwd=cached, check=True, timeout=300)
            (wheel,) = cached.glob("*.whl")
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            pytest.skip(f"NOT TESTED against {_REQUIREMENT}: {error}")
        zipfile.ZipFile(wheel).extractall(package)
    if not (cached / "o200k_base.tiktoken").is_file():
        _write_vocabulary(tokenizer, cached / "o200k_base.tiktoken")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(cached))
        patch.syspath_prepend(str(package))
        module = pytest.importorskip("openai_harmony", reason=f"NOT TESTED against {_REQUIREMENT}")
        return module, module.load_harmony_encoding(module.HarmonyEncodingName.HARMONY_GPT_OSS)


_TEXTS = ("It rains.", "  - a\n  - b 日本語🎉", '{"name": "f"}', "é", "a <b> [x] | <|")
_ARGUMENTS = ({}, {"city": "Zürich 🎉"}, {"code": 'if x:\n    print("{}")', "n": [1, {"a": None}]})


def _messages(module: Any, rng: random.Random) -> list[Any]:
    """Return what an assistant may write in one turn."""
    messages = []
    for _ in range(rng.randint(1, 4)):
        channel = rng.choice(["analysis", "commentary", "final", "call"])
        role, text = module.Role.ASSISTANT, rng.choice(_TEXTS)
        if channel == "call":
            text = json.dumps(rng.choice(_ARGUMENTS), ensure_ascii=rng.random() < 0.5)
            message = module.Message.from_role_and_content(role, text).with_channel("commentary")
            message = message.with_recipient(
                f"functions.{rng.choice(['get_weather', 'run-code.v2'])}"
            )
            messages.append(message.with_content_type("<|constrain|>json"))
        else:
            messages.append(module.Message.from_role_and_content(role, text).with_channel(channel))
    return messages


def _expected(messages: list[Any]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return the content, the reasoning and the calls of messages."""
    content, reasoning, calls = "", [], []
    for message in messages:
        text = "".join(part.text for part in message.content)
        if message.recipient is not None and message.recipient.startswith("functions."):
            calls.append((message.recipient.removeprefix("functions."), json.loads(text)))
        elif message.channel == "analysis":
            reasoning.append(text.strip())
        else:
            content += text
    return content, "\n".join(reasoning), calls


def _parsed(
    tokenizer: Any, tokens: list[int], rng: random.Random
) -> tuple[ChatAnswer, list[tuple[str, Any]]]:
    form = family_form("gpt_oss")
    prompt = tokenizer.encode("<|start|>user<|message|>Hi<|end|><|start|>assistant")
    text, parser = AnswerText(tokenizer, form, prompt), AnswerParser(form)
    events, position = [], 0
    while position < len(tokens):
        count = rng.randint(1, 6)
        events += parser.feed(text.push(tokens[position : position + count]))
        position += count
    events += parser.feed(text.push([], last=True))
    answer = ChatAnswer.from_events(events + parser.finish())
    return answer, [(call.name, call.values()) for call in answer.tool_calls]


@pytest.mark.full
@pytest.mark.thorough_except("0")
@pytest.mark.parametrize("seed", range(2))
def test_messages_are_read_as_openai_harmony_reads_them(seed, harmony, tokenizer) -> None:
    module, encoding = harmony
    rng, call_count = random.Random(seed), 0
    for _ in range(60):
        messages = _messages(module, rng)
        tokens = []
        for message in messages:
            tokens += encoding.render(message)
        tokens = tokens[1 + len(encoding.encode("assistant")) :]  # the prompt ends behind them
        if rng.random() < 0.3:
            tokens = tokens[:-1]  # the end token, which the engine does not return
        read = encoding.parse_messages_from_completion_tokens(tokens, module.Role.ASSISTANT)
        content, reasoning, calls = _expected(read)
        answer, our_calls = _parsed(tokenizer, tokens, rng)
        assert our_calls == calls
        assert answer.content.split() == content.split()
        assert answer.reasoning == reasoning
        call_count += len(calls)
    assert call_count > 20
