"""Windows in files: the same as in memory, made once, in little memory."""

import json
import shutil
import time
from dataclasses import asdict, replace

import numpy as np
import pytest

from specjax.config import ConfigError
from specjax.training import data, fingerprint, tokenizing, unusable
from specjax.training.config import DataConfig
from specjax.training.unusable import RecordTally
from tests.conftest import ASSETS
from tests.processes import TIMEOUT, processes, wait
from tests.training import one_builder

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<end>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<end>{% endif %}{% endfor %}"
)


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
    run = data.prepare(config, tally=tally)
    assert run.digest == fingerprint.of_windows(run.windows, run.held_out)
    labels = run.windows["tokens"][:, 1:][run.windows["loss_mask"]]
    np.testing.assert_array_equal(run.count_labels(4000), np.bincount(labels, minlength=4000))
    return run.digest, list(map(str, tally.unusable))


def test_a_second_run_reads_what_the_first_has_written(settings, tmp_path, monkeypatch) -> None:
    expected = prepared(replace(settings, cache=""))
    assert len(expected[1]) == 2
    monkeypatch.setattr(tokenizing, "_CHUNK_RECORDS", 7)
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
        {"packing": "documents"},
        {"chat_template_kwargs": ""},
    ):
        assert prepared(replace(settings, **changed)) == prepared(
            replace(settings, cache="", **changed)
        )
    assert len(list((tmp_path / "cache").iterdir())) == 5
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


@pytest.mark.full
def test_several_processes_give_the_same_windows(settings, monkeypatch) -> None:
    monkeypatch.setattr(tokenizing, "_CHUNK_RECORDS", 7)
    expected = prepared(replace(settings, cache=""))
    assert prepared(replace(settings, workers=2)) == expected
    with pytest.raises(ConfigError, match=r"data\.workers=2: a tokenizer that is trained"):
        data.prepare(replace(settings, cache="", tokenizer="", workers=2))


@pytest.mark.full
def test_one_process_builds_the_others_wait_and_a_killed_one_is_replaced(
    settings, tmp_path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(asdict(settings)))
    expected, _ = prepared(replace(settings, cache=""))

    def wait_for_builders(count: int) -> list[str]:
        deadline = time.monotonic() + TIMEOUT
        while len(builders := sorted(path.stem for path in tmp_path.glob("*.begun"))) < count:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return builders

    with processes(one_builder.__name__, tmp_path, 3) as running:
        (first,) = wait_for_builders(1)
        running[int(first)].kill()
        running[int(first)].wait()
        assert len(list((tmp_path / "cache").glob(".*"))) == 1  # the half of its files
        assert len(wait_for_builders(2)) == 2
        (tmp_path / "go").touch()
        survivors = [number for number in range(3) if number != int(first)]
        wait([running[number] for number in survivors], tmp_path)
        for number in survivors:
            assert (tmp_path / f"{number}.txt").read_text() == expected
    assert len(list(tmp_path.glob("*.begun"))) == 2
    (folder,) = (tmp_path / "cache").iterdir()
    assert folder.is_dir() and not folder.name.startswith(".")


def test_files_that_are_not_those_of_the_manifest_are_written_again(settings, tmp_path) -> None:
    expected = prepared(settings)
    (folder,) = (tmp_path / "cache").iterdir()
    file, sizes = folder / "train.tokens", {path: path.stat().st_size for path in folder.iterdir()}
    content = file.read_bytes()
    changed = bytes([content[0] ^ 1]) + content[1:]
    for damage in (changed, content[:-1], b"", None):
        if damage is None:
            file.unlink()
        else:
            file.write_bytes(damage)
        assert prepared(settings) == expected
        assert {path: path.stat().st_size for path in folder.iterdir()} == sizes
        assert file.read_bytes() == content
    (folder / "manifest.json").write_text("{")
    assert prepared(settings) == expected


def test_a_copy_of_a_cache_is_a_cache(settings, tmp_path, monkeypatch) -> None:
    expected = prepared(settings)
    shutil.copytree(tmp_path / "cache", tmp_path / "copy", copy_function=shutil.copyfile)
    monkeypatch.setattr(data, "_store", lambda *_: pytest.fail("the data are tokenized again"))
    assert prepared(replace(settings, cache=str(tmp_path / "copy"))) == expected


def test_a_later_start_reads_no_window(settings, monkeypatch) -> None:
    expected = data.prepare(settings)
    monkeypatch.setattr(fingerprint, "of_windows", lambda *_: pytest.fail("it hashes the windows"))
    again = data.prepare(settings)
    assert again.digest == expected.digest
    np.testing.assert_array_equal(again.label_counts, expected.label_counts)


def test_too_many_unusable_records_are_reported_before_the_last(monkeypatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(unusable, "say", lines.append)
    monkeypatch.setattr(unusable, "_ENOUGH", 10)
    tally = RecordTally("chats.jsonl", limit=0.1)
    for bad in (0, 1, 1, 1):
        places = [(f"chats.jsonl:{tally.total}", "it has no messages")] * bad
        tally.merge({"total": 5, "unusable": places, "ignored": {}})
        assert len(lines) == (tally.total >= 15)
    assert lines[0].startswith(
        "data.source='chats.jsonl': 2 of 15 records so far cannot be used, more than"
        " data.max_unusable=0.1 allows."
    )
