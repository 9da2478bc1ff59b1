"""Runs in buckets: one process owns a run, and a kill at any moment leaves one that continues."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from specjax import stored_folders
from specjax.cli.main import main
from specjax.config import ConfigError, dump_yaml
from specjax.errors import InputError
from specjax.models.transformer import Target
from specjax.stores import Store
from specjax.training import loop
from specjax.training.config import DataConfig, TrainConfig
from specjax.training.documents import find_files
from specjax.training.run_store import open_output
from tests.buckets import S3Server
from tests.training.test_loop import assert_same_runs, config, stopping_at, write_texts


def published(url: str) -> dict[str, bytes]:
    """Return the files of a run in a bucket, as another machine reads them."""
    directory = stored_folders.fetch(url, "output").directory
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_a_run_on_a_disk_stays_where_it_is(tmp_path: Path) -> None:
    with open_output(str(tmp_path)) as output:
        output.claim()
        output.publish()
    assert output.directory == tmp_path
    assert output.best == tmp_path / "best"


def test_what_was_published_is_what_the_next_process_begins_with(
    s3: S3Server, tmp_path: Path
) -> None:
    url = s3.make_bucket("begins") + "/runs/1"
    with open_output(url) as output:
        directory = output.directory
        (directory / "checkpoints" / "1").mkdir(parents=True)
        (directory / "checkpoints" / "1" / "state").write_text("state")
        (directory / "config.yaml").write_text("config")
        output.claim()
        (directory / "metrics.jsonl").write_text("1\n")
    assert not directory.exists()
    expected = {"checkpoints/1/state": b"state", "config.yaml": b"config", "metrics.jsonl": b"1\n"}
    assert published(url) == expected
    # A process was killed: what it had not published is dropped, and its directory is used again.
    (directory / "checkpoints" / "2").mkdir(parents=True)
    (directory / "checkpoints" / "2" / "state").write_text("later")
    (directory / "metrics.jsonl").write_text("1\n2\n")
    (directory.parent / ".upload-killed").mkdir()
    with open_output(f"{url}/") as output:
        files = [path for path in directory.rglob("*") if path.is_file()]
        assert {str(path.relative_to(directory)): path.read_bytes() for path in files} == expected
        assert not (directory / "checkpoints" / "2").exists()
        assert not (directory.parent / ".upload-killed").exists()
    assert output.best == f"{url}/best"


def test_what_is_uploaded_is_of_the_moment_of_the_call(s3: S3Server) -> None:
    """The upload waits until the run has gone on, and has replaced and appended to its files."""
    url = s3.make_bucket("moment") + "/run"
    go_on, uploads = threading.Event(), []

    def wait(method: str, path: str) -> None:
        if method == "PUT" and "/v-" in path:
            uploads.append(path)
            go_on.wait()

    with open_output(url) as output:
        output.claim()
        (output.directory / "best").mkdir()
        (output.directory / "best" / "weights").write_text("first")
        (output.directory / "metrics.jsonl").write_text("1\n")
        s3.before = wait
        output.publish()
        (output.directory / "new").write_text("second")
        (output.directory / "new").replace(output.directory / "best" / "weights")
        with (output.directory / "metrics.jsonl").open("a") as log:
            log.write("2\n")
        go_on.set()
        manifest = _wait_for_files(url, 2)
        assert manifest == {"best/weights": b"first", "metrics.jsonl": b"1\n"}
    assert published(url) == {"best/weights": b"second", "metrics.jsonl": b"1\n2\n"}
    assert uploads


def _wait_for_files(url: str, count: int) -> dict[str, bytes]:
    pause = threading.Event()
    while True:  # the limit of every test ends it
        with suppress(InputError):  # the manifest has no files yet
            if len(files := published(url)) == count:
                return files
        pause.wait(0.1)


def test_of_two_runs_that_claim_an_output_one_is_refused(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both find the output free. They are on two machines, which share no lock."""
    url = s3.make_bucket("claims") + "/run"
    with open_output(url) as first:
        (first.directory / "config.yaml").write_text("first")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
        with (
            pytest.raises(ConfigError, match="another process has begun or continued this run"),
            open_output(url) as second,
        ):
            (second.directory / "config.yaml").write_text("second")
            first.claim()
            second.claim()
    assert published(url) == {"config.yaml": b"first"}


def test_a_process_whose_run_was_continued_elsewhere_ends(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine was thought dead, and the run continued on another; it must replace nothing."""
    url = s3.make_bucket("continued") + "/run"
    with (
        pytest.raises(ConfigError, match=r"it is that one's now; nothing of it was replaced"),
        open_output(url) as dead,
    ):
        (dead.directory / "config.yaml").write_text("config")
        dead.claim()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "machine"))
        with open_output(url) as alive:
            alive.claim()
            (alive.directory / "metrics.jsonl").write_text("of the living")
        (dead.directory / "metrics.jsonl").write_text("of the dead")
    assert published(url)["metrics.jsonl"] == b"of the living"


def test_a_machine_runs_an_output_once(s3: S3Server) -> None:
    url = s3.make_bucket("once") + "/run"
    with (
        open_output(url),
        pytest.raises(ConfigError, match="another process on this machine runs it"),
        open_output(url),
    ):
        pass


def test_objects_of_others_are_not_taken_for_a_run(s3: S3Server) -> None:
    url = s3.make_bucket("foreign")
    s3.put("foreign", "run/notes.txt", b"mine")
    with pytest.raises(ConfigError, match="is not empty and has no run"), open_output(f"{url}/run"):
        pass
    assert s3.names("foreign") == ["run/notes.txt"]


def test_remains_of_a_killed_upload_are_removed_and_nothing_else(s3: S3Server) -> None:
    url = s3.make_bucket("remains")
    s3.put("remains", "run/best/v-0123456789abcdef/config.json", b"killed")
    with open_output(f"{url}/run") as output:
        (output.directory / "config.yaml").write_text("config")
        output.claim()
        s3.put("remains", "run/notes.txt", b"mine")
        s3.put("remains", "run/best/v-0123456789abcdef/config.json", b"killed again")
    with open_output(f"{url}/run") as output:
        output.claim()
    names = s3.names("remains")
    assert "run/notes.txt" in names
    assert len(names) == 3


def test_a_store_that_does_not_answer_for_a_while_ends_no_run(
    s3: S3Server, recwarn: pytest.WarningsRecorder
) -> None:
    url = s3.make_bucket("absent") + "/run"
    with open_output(url) as output:
        output.claim()
        (output.directory / "metrics.jsonl").write_text("1\n")
        s3.before = lambda method, path: 403
        output.publish()
        output.publish()  # it waits for the first, which has failed
        s3.before = lambda method, path: None
    assert published(url) == {"metrics.jsonl": b"1\n"}
    assert len(s3.names("absent")) == 2  # nothing of the failed uploads
    assert any("the next upload will have everything" in str(warning) for warning in recwarn)


def test_the_end_of_a_run_must_reach_the_store(s3: S3Server) -> None:
    url = s3.make_bucket("end") + "/run"
    with (
        pytest.raises(InputError, match="the store refuses the credentials"),
        open_output(url) as output,
    ):
        output.claim()
        s3.before = lambda method, path: 403
    s3.before = lambda method, path: None


def test_an_error_of_the_run_is_what_is_reported(s3: S3Server) -> None:
    url = s3.make_bucket("error") + "/run"
    with pytest.raises(ZeroDivisionError), open_output(url) as output:
        output.claim()
        (output.directory / "metrics.jsonl").write_text("until the error")
        _ = 1 / 0
    assert published(url) == {"metrics.jsonl": b"until the error"}
    with (
        pytest.warns(UserWarning, match="the end of the run was not uploaded"),
        pytest.raises(ZeroDivisionError),
        open_output(url) as output,
    ):
        output.claim()
        s3.before = lambda method, path: 403
        _ = 1 / 0


def test_several_processes_are_refused(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with (
        pytest.raises(ConfigError, match="needs a directory that all of them share"),
        open_output("s3://bucket/run"),
    ):
        pass


def test_a_cache_of_windows_in_a_bucket_is_refused() -> None:
    run = TrainConfig(data=DataConfig(cache="s3://bucket/windows"))
    with pytest.raises(ConfigError, match=r"data\.cache='s3://bucket/windows': the windows are"):
        run.check()


def test_files_of_a_source_in_a_bucket_are_those_of_a_directory(
    s3: S3Server, tmp_path: Path
) -> None:
    url = s3.make_bucket("source")
    names = ("b.txt", "sub/a.txt", "README.md", ".hidden/c.txt", "sub/.d.txt")
    for name in names:
        s3.put("source", f"texts/{name}", name.encode())
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text(name)

    def shown(source: str) -> list[tuple[str, ...]]:
        return [file.parts[-2:] for file in find_files(source)]

    for pattern in ("", "/*", "/**/*.txt", "/README.md"):
        assert shown(f"{url}/texts{pattern}") == shown(f"{tmp_path}/texts{pattern}"), pattern


# --- whole runs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_texts(tmp_path_factory.mktemp("text"), lines=60)


@pytest.fixture(scope="module")
def unbroken(source: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run on a disk that nothing interrupts."""
    output = tmp_path_factory.mktemp("local") / "run"
    loop.train(config(source, output, checkpoint_every=10))
    return output


def copy_of(url: str) -> Path:
    return stored_folders.fetch(url, "output").directory


@pytest.mark.full
def test_a_run_in_a_bucket_is_that_on_a_disk(
    s3: S3Server, source: str, unbroken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The data are in the bucket, too. The student is loaded from there, and so is its drafter."""
    url = s3.make_bucket("whole")
    for file in Path(source).iterdir():
        s3.put("whole", f"{Path(source).name}/{file.name}", file.read_bytes())
    run = config(f"{url}/{Path(source).name}", f"{url}/run", checkpoint_every=10)
    best = loop.train(run)
    assert best == f"{url}/run/best"
    assert_same_runs(copy_of(f"{url}/run"), unbroken)
    assert Target.from_pretrained(best).config == Target.from_pretrained(unbroken / "best").config
    texts = []
    capsys.readouterr()
    for target, drafter in (
        (str(unbroken / "best"), "none"),
        (best, best),
        (best, f"draft-model:{best}"),
    ):
        command = ["generate", "--target", target, "--drafter", drafter, "--prompt", "line 1"]
        assert main([*command, "--max-new-tokens", "8"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] and texts[0] == texts[1] == texts[2]
    # It does not train again, and another configuration is refused.
    before = (copy_of(f"{url}/run") / "metrics.jsonl").read_bytes()
    loop.train(run)
    assert (copy_of(f"{url}/run") / "metrics.jsonl").read_bytes() == before
    with pytest.raises(ConfigError, match=r"another configuration \(seed: 0 -> 1\)"):
        loop.train(replace(run, seed=1))


@pytest.mark.full
def test_a_run_in_a_bucket_that_is_interrupted_continues(
    s3: S3Server, source: str, unbroken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config(source, s3.make_bucket("interrupted") + "/run", checkpoint_every=10)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "train_step", stopping_at(15))
        loop.train(run)
    loop.train(run)
    assert_same_runs(copy_of(run.output), unbroken)


def at_request(s3: S3Server, matches: Callable[[str, str], bool]) -> threading.Event:
    """Return an event of the first request that matches; it and all that follow get no answer."""
    reached, forever = threading.Event(), threading.Event()

    def before(method: str, path: str) -> int | None:
        if reached.is_set() or matches(method, path):
            reached.set()
            forever.wait(30)  # a killed process does not hear the answer
            return 503
        return None

    s3.before = before
    return reached


KILLS: dict[str, Callable[[str, str], bool]] = {
    "the claim": lambda method, path: method == "PUT" and path.endswith(".json"),
    "a checkpoint": lambda method, path: method == "PUT" and "/checkpoints/20/" in path,
    "the best student": lambda method, path: method == "PUT" and "/best/v-" in path,
    "the deletion": lambda method, path: method in ("DELETE", "POST"),
}
"""Requests in the middle of which a process is killed."""


@pytest.mark.full
@pytest.mark.parametrize(
    "moment",
    [
        "a checkpoint",
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("the claim", "the best student", "the deletion")
        ),
    ],
)
def test_a_run_that_is_killed_in_an_upload_continues_bit_for_bit(
    s3: S3Server, source: str, unbroken: Path, tmp_path: Path, moment: str
) -> None:
    """A process is killed while an object is on its way, and another machine runs the command."""
    bucket = f"killed-{moment.replace(' ', '-')}"
    run = config(source, s3.make_bucket(bucket) + "/run", checkpoint_every=10)
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(run))
    reached = at_request(s3, KILLS[moment])
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "machine")}
    process = subprocess.Popen(
        [sys.executable, "-m", "specjax", "train", "--config", str(file)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not reached.wait(0.1):  # the limit of every test ends it
            assert process.poll() is None, "the run did not come to this request"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        s3.before = lambda method, path: None
        loop.train(run)
        assert_same_runs(copy_of(run.output), unbroken)
        objects = [name for name in s3.names(bucket) if "/v-" in name]
        assert len(objects) == len(published(run.output))  # nothing of the killed process is left
    finally:
        process.kill()
        process.wait()


@pytest.mark.full
def test_a_server_serves_a_student_from_a_bucket(
    s3: S3Server, unbroken: Path, tmp_path: Path
) -> None:
    import httpx2

    from tests.processes import free_port

    url = s3.make_bucket("served") + "/run"
    store = Store(url, "output")
    stored_folders.publish(store, unbroken, None, lambda name: name.rpartition("/")[0])
    port = free_port()
    command = [sys.executable, "-m", "specjax", "serve", "--port", str(port), "--rows", "1"]
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--target", f"{url}/best", "--drafter", f"{url}/latest"],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        body = {"model": f"{url}/best", "prompt": "line 1", "max_tokens": 8}
        answer: Any = None
        while True:  # the limit of every test ends it
            assert process.poll() is None, log.read_text()
            with suppress(httpx2.TransportError):  # it does not listen yet
                answer = httpx2.post(
                    f"http://localhost:{port}/v1/completions", json=body, timeout=120
                )
            if answer is not None and answer.status_code != 503:  # the models are loaded
                break
            threading.Event().wait(0.1)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 8
    finally:
        process.kill()
        process.wait()
