"""Windows in files: the same as in memory, made once, in little memory."""

import json
from dataclasses import replace

import numpy as np
import pytest

from specjax.config import ConfigError
from specjax.training import data, fingerprint, stored_windows
from specjax.training.config import DataConfig
from specjax.training.stored_windows import WindowsWriter, read_windows
from specjax.training.unusable import RecordTally
from tests.conftest import ASSETS

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<end>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<end>{% endif %}{% endfor %}"
)


def in_files(folder, sequences, masks, window, begin):
    writer = WindowsWriter(folder, "side", window, begin)
    for ids, mask in zip(sequences, masks, strict=True):
        writer.add(ids, mask)
    return read_windows(folder, "side", writer.close(), window)


@pytest.mark.parametrize("piece", [1, 7, 1000])
@pytest.mark.parametrize("begin", [None, 3])
@pytest.mark.parametrize("window", [2, 5, 16])
def test_windows_in_files_are_those_in_memory(piece, begin, window, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(stored_windows, "_PIECE", piece)
    random = np.random.default_rng(7)
    sequences = [random.integers(0, 5, size=n) for n in (0, 3, 40, 1, 0, 2, 17, 1, 30)]
    masks = [random.random(len(ids)) < 0.2 for ids in sequences]
    expected = data.pack(sequences, window, masks, begin)
    windows = in_files(tmp_path, sequences, masks, window, begin)
    for name, array in expected.items():
        assert windows[name].dtype == array.dtype
        np.testing.assert_array_equal(windows[name], array, err_msg=name)
    assert fingerprint.of_windows(windows) == fingerprint.of_windows(expected)
    np.testing.assert_array_equal(
        data.count_labels(windows, 9),
        np.bincount(expected["tokens"][:, 1:][expected["loss_mask"]], minlength=9),
    )


def test_too_little_text_is_refused_as_in_memory(tmp_path) -> None:
    for sequences, masks, words in (
        ([[1, 2]], [np.ones(2, bool)], r"data\.window=4: the text has only 2 tokens"),
        ([], [], r"data\.window=4: the text has only 0 tokens"),
        ([[1] * 9], [np.zeros(9, bool)], "none of the 2 windows has a label"),
    ):
        with pytest.raises(ConfigError, match=words):
            in_files(tmp_path, sequences, masks, 4, None)


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    lines = [
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": f"Question {number}?"},
                    {"role": "assistant", "content": f"Answer {number}."},
                ]
            }
        )
        for number in range(60)
    ]
    lines[3] = "{"
    lines[5] = json.dumps({"messages": [{"role": "judge", "content": "No."}]})
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    return DataConfig(
        source=str(tmp_path / "chats.jsonl"),
        tokenizer=str(ASSETS / "target"),
        chat_template=str(tmp_path / "template.jinja"),
        window=16,
        holdout=0.2,
        max_unusable=0.05,
        cache=str(tmp_path / "cache"),
    )


def prepared(config: DataConfig) -> tuple[str, list[str]]:
    """Return the hash of the windows of a run, and the records that are left out."""
    tally = RecordTally(config.source, limit=config.max_unusable)
    _, windows, held_out, _ = data.prepare(config, tally=tally)
    return fingerprint.of_windows(windows, held_out), list(map(str, tally.unusable))


def test_a_second_run_reads_what_the_first_has_written(settings, tmp_path, monkeypatch) -> None:
    expected = prepared(replace(settings, cache=""))
    assert len(expected[1]) == 2
    monkeypatch.setattr(data, "_CHUNK_DOCUMENTS", 7)
    assert prepared(settings) == expected
    (folder,) = (tmp_path / "cache").iterdir()
    with monkeypatch.context() as again:
        again.setattr(data, "_store", lambda *_: pytest.fail("the data are tokenized again"))
        assert prepared(settings) == expected
        with pytest.raises(ConfigError, match="2 of 60 records cannot be used"):
            data.prepare(replace(settings, max_unusable=0.01))
    assert isinstance(data.prepare(settings).windows["tokens"], np.memmap)
    for changed in (
        {"window": 24},
        {"holdout": 0.3},
        {"responses_only": False},
        {"chat_template_kwargs": ""},
    ):
        assert prepared(replace(settings, **changed)) == prepared(
            replace(settings, cache="", **changed)
        )
    assert len(list((tmp_path / "cache").iterdir())) == 4
    source = tmp_path / "chats.jsonl"
    source.write_text(source.read_text().replace("Question 7?", "Question 8?"))
    (tmp_path / "template.jinja").write_text(TEMPLATE.replace("<end>", "<stop>"))
    assert prepared(settings) == prepared(replace(settings, cache="")) != expected
    assert folder.exists()


def test_what_cannot_be_stored_is_refused_and_leaves_nothing(settings, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"data\.cache=.*: a tokenizer that is trained"):
        data.prepare(replace(settings, tokenizer=""))
    with pytest.raises(ConfigError, match="2 of 60 records cannot be used"):
        data.prepare(replace(settings, max_unusable=0.01))
    with (tmp_path / "chats.jsonl").open("a") as file:
        file.write('\n{"text": "A text."}')
    with pytest.raises(ConfigError, match=r"chats.jsonl:61 is a text, .*chats.jsonl:1 a conv"):
        data.prepare(settings)
    assert not (tmp_path / "cache").exists()
