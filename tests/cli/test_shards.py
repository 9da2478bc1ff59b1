"""Check ``specjax regenerate --shard``: independent parts of a data set, and killed processes."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specjax import pipeline
from specjax.cli.main import main
from specjax.cli.shards import Shard, find_shard, is_whole
from specjax.errors import InputError
from specjax.files import mount_point
from tests.cli.test_evaluate import of_texts, records, write_source

TEXTS = [f"def function_{i}(self): pass" for i in range(9)] + ["twice = 1", "twice = 1"]


@pytest.fixture
def source(tmp_path) -> Path:
    write_source(tmp_path / "texts.jsonl", TEXTS)
    return tmp_path / "texts.jsonl"


def by_label(*files: Path) -> dict[tuple[str, int], str]:
    all_records = [record for file in files for record in records(file)]
    assert len({(record["document"], record["copy"]) for record in all_records}) == len(all_records)
    return {(record["document"], record["copy"]): record["text"] for record in all_records}


@pytest.mark.full
def test_shards_of_any_number_write_what_one_process_writes(
    tiny_pair, source, tmp_path, capsys
) -> None:
    command = of_texts(tiny_pair[0], source, "--copies", "2")
    assert main([*command, "--output", str(tmp_path / "whole.jsonl")]) == 0
    whole = by_label(tmp_path / "whole.jsonl")
    assert len(whole) == 2 * len(TEXTS)
    for count in (1, 3):
        folder = tmp_path / f"of {count}"
        for number in range(count):
            assert main([*command, "--output", str(folder), "--shard", f"{number}/{count}"]) == 0
        files = sorted(folder.glob("*.jsonl"))
        assert [file.name for file in files] == [
            f"{number:05d}-of-{count:05d}.jsonl" for number in range(count)
        ]
        assert by_label(*files) == whole
        assert not list(folder.glob("*.part"))
    assert all(0 < len(records(file)) < len(whole) for file in files)
    capsys.readouterr()
    assert main(["regenerate", "--output", str(folder), "--missing", "3"]) == 0
    assert "all 3 shards are in" in capsys.readouterr().out


def test_a_whole_shard_is_not_written_again(
    tiny_pair, source, tmp_path, monkeypatch, capsys
) -> None:
    command = of_texts(tiny_pair[0], source, "--output", str(tmp_path / "out"), "--shard", "0/2")
    assert main(command) == 0
    monkeypatch.setattr(pipeline, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    capsys.readouterr()
    assert main(command) == 0
    assert "00000-of-00002.jsonl, which is complete" in capsys.readouterr().out
    assert main([*command, "--seed", "3"]) == 2
    assert "was started with other options (seed" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("state", ["begun", "cut"])
def test_a_shard_that_broke_off_is_the_same_in_the_end(
    tiny_pair, source, tmp_path, capsys, state
) -> None:
    """Complete a part that a kill leaves, and a file that was cut.

    A file may be cut when a disk is full, or while it is copied.
    """
    folder = tmp_path / "out"
    command = of_texts(tiny_pair[0], source, "--output", str(folder), "--shard", "1/2")
    assert main(command) == 0
    file = folder / "00001-of-00002.jsonl"
    expected = file.read_bytes()
    assert expected.count(b"\n") > 2
    file.write_bytes(expected[: expected.index(b"\n") + 20])
    if state == "begun":
        file.rename(folder / f"{file.name}.part")
    capsys.readouterr()
    assert main(["regenerate", "--output", str(folder), "--missing", "2"]) == 1
    assert capsys.readouterr().out.split() == ["0/2", "1/2"]
    assert main(command) == 0
    assert file.read_bytes() == expected and is_whole(file)
    assert main(["regenerate", "--output", str(folder), "--missing", "2"]) == 1
    assert capsys.readouterr().out.split()[-1] == "0/2"


def test_a_disk_that_is_full_is_one_line_and_the_rerun_writes_the_same_bytes(
    tiny_pair, source, tmp_path, monkeypatch, capsys
) -> None:
    command = of_texts(tiny_pair[0], source, "--shard", "0/1")
    assert main([*command, "--output", str(tmp_path / "calm")]) == 0
    name, full = "00000-of-00001.jsonl", tmp_path / "full"
    expected = (tmp_path / "calm" / name).read_bytes()
    part, sizes = full / f"{name}.part", []

    def fsync(_: int) -> None:
        sizes.append(part.stat().st_size)
        if len(sizes) == 1:
            os.truncate(part, sizes[0] - 7)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    capsys.readouterr()
    assert main([*command, "--output", str(full)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"specjax: error: {part}: no space left on {mount_point(tmp_path)}, needs about 1 MB, has "
    )
    assert line.endswith(" MB: make room, and run the same command again")
    assert part.read_bytes() == expected[: sizes[0] - 7]
    assert main(["regenerate", "--output", str(full), "--missing", "1"]) == 1
    assert main([*command, "--output", str(full)]) == 0
    assert (full / name).read_bytes() == expected


def test_a_shard_of_no_document_is_whole_and_empty(tiny_pair, source, tmp_path) -> None:
    write_source(source, TEXTS[:1])
    for number in (0, 1, 0, 1):
        options = ("--output", str(tmp_path / "out"), "--shard", f"{number}/2")
        assert main(of_texts(tiny_pair[0], source, *options)) == 0
    sizes = sorted(len(records(file)) for file in (tmp_path / "out").glob("*.jsonl"))
    assert sizes == [0, 1]
    assert main(["regenerate", "--output", str(tmp_path / "out"), "--missing", "2"]) == 0


def test_what_cannot_be_is_refused(tiny_pair, source, tmp_path, capsys) -> None:
    def refused(*options: str) -> str:
        assert main(of_texts(tiny_pair[0], source, *options)) == 2
        return capsys.readouterr().err

    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "00002-of-00004.jsonl.part").touch()
    assert "it has 1 of 4 shards, but shard=0/2" in refused(
        "--output", str(folder), "--shard", "0/2"
    )
    assert "give a data set, and a folder for the shards" in refused(
        "--output", "out.jsonl", "--shard", "0/2"
    )
    assert "give a data set, and a file that ends in .jsonl" in refused("--output", str(folder))
    assert "records are appended to a file; give a local path" in refused(
        "--output", "s3://bucket/out.jsonl"
    )
    assert "missing=2: give the number of all shards, their folder" in refused(
        "--missing", "2", "--shard", "0/2"
    )
    assert "is a file: with shard=0/2 give a folder" in refused(
        "--output", str(source.rename(tmp_path / "file")), "--shard", "0/2"
    )


SLURM = {"SLURM_ARRAY_TASK_ID": "4", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_COUNT": "8"}


@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        ("0/1", {}, Shard(0, 1)),
        ("7/8", SLURM, Shard(7, 8)),
        ("auto", SLURM, Shard(3, 8)),
        ("auto/16", SLURM, Shard(3, 16)),
        ("auto/16", {"JOB_COMPLETION_INDEX": "0"}, Shard(0, 16)),
        ("auto", {"JOB_COMPLETION_INDEX": "0"}, "not the number of shards: give auto/N"),
        ("auto/4", {}, "neither SLURM_ARRAY_TASK_ID nor JOB_COMPLETION_INDEX is set"),
        ("auto/2", SLURM, "shard 3/2 does not exist; the last of N shards"),
        ("8/8", {}, "shard 8/8 does not exist"),
        ("0/0", {}, "shard 0/0 does not exist"),
        ("3", {}, "give I/N"),
        ("-1/3", {}, "give I/N"),
        (
            "auto",
            SLURM | {"SLURM_ARRAY_TASK_ID": "0"},
            "SLURM_ARRAY_TASK_ID='0' must be a number, at least 1",
        ),
    ],
)
def test_which_shard_a_process_writes(text, environment, expected) -> None:
    if isinstance(expected, Shard):
        assert find_shard(text, environment) == expected
        return
    with pytest.raises(InputError, match=expected):
        find_shard(text, environment)


LIMITED = """
import resource, sys
from specjax.cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("cut_in", ["the note", "the first records", "the last record"])
def test_no_file_that_is_cut_by_a_limit_is_taken_for_whole(
    tiny_pair, source, tmp_path, cut_in
) -> None:
    command = of_texts(tiny_pair[0], source, "--shard", "0/1")
    name, full = "00000-of-00001.jsonl", tmp_path / "full"
    assert main([*command, "--output", str(tmp_path / "calm")]) == 0
    expected = (tmp_path / "calm" / name).read_bytes()
    note = (tmp_path / "calm" / "00000-of-00001.yaml").stat().st_size
    room = {
        "the note": note // 2,
        "the first records": note + 50,
        "the last record": len(expected) - 1,
    }[cut_in]
    assert room < len(expected)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    options = [*command, "--output", str(full)]
    limited = [sys.executable, "-c", LIMITED, str(room), *options]
    run = subprocess.run(limited, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 2 and "Traceback" not in run.stderr
    assert (
        f"specjax: error: output='{full / name}.part': cannot be written (File too large): make"
        " room" in run.stderr
    )
    assert not (full / name).exists()
    assert (full / f"{name}.part").exists() == (cut_in != "the note")
    assert main(options) == 0
    assert (full / name).read_bytes() == expected


@pytest.mark.thorough
def test_processes_that_are_killed_at_any_moment_leave_the_same_bytes(
    tiny_pair, source, tmp_path
) -> None:
    write_source(source, [f"{text} # {number}" for number in range(20) for text in TEXTS])
    command = of_texts(tiny_pair[0], source, "--shard", "0/2")
    assert main([*command, "--output", str(tmp_path / "calm")]) == 0
    name, killed = "00000-of-00002.jsonl", 0
    part = tmp_path / "killed" / f"{name}.part"
    for lines in (1, 9, 33, 60):
        process = subprocess.Popen(
            [sys.executable, "-m", "specjax", *command, "--output", str(part.parent)],
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        while process.poll() is None:
            if part.exists() and part.read_bytes().count(b"\n") >= lines:
                process.send_signal(signal.SIGKILL)
                process.wait()
            time.sleep(0.002)
        killed += process.returncode == -signal.SIGKILL
    assert killed >= 3
    assert main([*command, "--output", str(part.parent)]) == 0
    assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "calm" / name).read_bytes()
    assert "tokens" in json.loads((tmp_path / "calm" / name).read_text().splitlines()[0])
