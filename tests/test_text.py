import pytest

from specjax import text
from specjax.errors import InputError
from tests.conftest import ASSETS


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


def test_an_unfinished_character_is_let_go_at_the_end(tokenizer) -> None:
    ids = text.encode(tokenizer, "x🎉")
    stream = text.TextStream(tokenizer, ids[:1])
    assert stream.push(ids[1:-1]) in ("", "x")
    assert "\N{REPLACEMENT CHARACTER}" in stream.push([], last=True)


def test_prompts_begin_with_the_bos_token(tokenizer) -> None:
    assert text.encode(tokenizer, "import")[0] == tokenizer.bos_token_id


def test_padding() -> None:
    tokens, lengths = text.pad([[1, 2, 3], [4]])
    assert tokens.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert lengths.tolist() == [3, 1]


def test_chat_template_is_applied_or_refused(tokenizer) -> None:
    with pytest.raises(InputError, match="no chat template"):
        text.encode(tokenizer, "hello", chat=True)
    chatty = text.load_tokenizer(ASSETS / "target")
    chatty.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    ids = text.encode(chatty, "hello", chat=True)
    assert chatty.decode(ids) == "[user]hello[assistant]"


def test_empty_prompts_and_missing_tokenizers_are_refused(tokenizer, tmp_path) -> None:
    with pytest.raises(InputError, match="prompt=''"):
        text.encode(tokenizer, "")
    with pytest.raises(InputError, match="no tokenizer"):
        text.load_tokenizer(tmp_path)
