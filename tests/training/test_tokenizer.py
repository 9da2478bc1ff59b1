import pytest

from specjax.config import ConfigError
from specjax.training import documents
from specjax.training.tokenizer import END_OF_TEXT, read_tokenizer, train_tokenizer


@pytest.mark.full
def test_the_tokenizer_gives_any_text_back() -> None:
    texts = [document.text for document in documents.read_documents("stdlib")[:40]]
    tokenizer = train_tokenizer(texts, 500)
    assert tokenizer.token_to_id(END_OF_TEXT) == 0
    for text in (texts[3], "tabs\tand\r\nnewlines", "ünï 日本 🎉", "\x00"):
        encoding = tokenizer.encode(text)
        assert encoding.ids[0] == 0
        assert tokenizer.decode(encoding.ids) == text


def test_a_directory_without_a_tokenizer_is_refused_by_name(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"data\.tokenizer="):
        read_tokenizer(tmp_path)
