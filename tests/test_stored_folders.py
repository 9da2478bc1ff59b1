"""Folders in buckets: whole or not at all, whatever ends the upload, and whoever else writes."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specjax import stored_folders
from specjax.errors import InputError
from specjax.stored_folders import MANIFEST, Manifest, publish, read_manifest
from specjax.stores import ChangedError, ReplacedError, Store
from tests.buckets import GoogleStub, S3Server

OLD = {"config.yaml": b"a", "best/config.json": b"old", "best/weights": b"1" * 5000}
NEW = {"config.yaml": b"b", "best/config.json": b"new", "best/more": b"", "latest/weights": b"2"}


def write(directory: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    return directory


def first_folder(name: str) -> str:
    return name.rpartition("/")[0]


def put(store: Store, directory: Path, replaces: Manifest | None) -> Manifest:
    return publish(store, directory, replaces, first_folder)


def content(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def read(url: str) -> dict[str, bytes]:
    return content(stored_folders.fetch(url, "target").directory)


class Killed(BaseException):
    """Ends a process at one of its requests, as a kill does."""


def kill_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """End the process at its request of this number, counted from 0; a write may be half done."""
    requests = iter(range(1000))

    def killing(method: Callable[..., object]) -> Callable[..., object]:
        def act(*arguments: object) -> object:
            if next(requests) >= number:
                raise Killed
            return method(*arguments)

        return act

    for name in ("upload", "write_if", "delete"):
        monkeypatch.setattr(Store, name, killing(getattr(Store, name)))


def test_a_folder_is_read_as_it_was_written(s3: S3Server, tmp_path: Path) -> None:
    store = Store(s3.make_bucket("folder") + "/runs/1", "output")
    first = put(store, write(tmp_path / "old", OLD), None)
    assert read(store.url) == OLD
    assert read(f"{store.url}/best") == {"config.json": b"old", "weights": b"1" * 5000}
    put(store, write(tmp_path / "new", NEW), first)
    assert read(store.url) == NEW
    assert read(f"{store.url}/latest") == {"weights": b"2"}
    # The objects of the old folder are gone, and those of a subfolder can be copied by any program.
    names = s3.names("folder")
    assert len(names) == len(NEW) + 1
    assert [re.sub("v-[0-9a-f]{16}", "v", name) for name in names] == [
        "runs/1/best/v/config.json",
        "runs/1/best/v/more",
        "runs/1/latest/v/weights",
        f"runs/1/{MANIFEST}",
        "runs/1/v/config.yaml",
    ]


def test_a_folder_of_google_is_read_as_it_was_written(
    google: type[GoogleStub], tmp_path: Path
) -> None:
    store = Store("gs://bucket/runs/1", "output")
    first = put(store, write(tmp_path / "old", OLD), None)
    assert read(store.url) == OLD
    put(store, write(tmp_path / "new", NEW), first)
    assert read(store.url) == NEW
    assert read(f"{store.url}/latest") == {"weights": b"2"}
    with pytest.raises(ChangedError):
        put(store, tmp_path / "old", first)
    assert {name.partition("/v-")[0] for name in google.objects} == {
        *("/bucket/runs/1", "/bucket/runs/1/best", "/bucket/runs/1/latest"),
        f"/bucket/runs/1/{MANIFEST}",
    }
    assert google.conditions.count("none") == len(OLD) + len(NEW)


def test_what_has_not_changed_is_not_sent_again(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(s3.make_bucket("unchanged"), "output")
    first = put(store, write(tmp_path, OLD), None)
    uploads: list[str] = []
    upload = Store.upload
    monkeypatch.setattr(
        Store,
        "upload",
        lambda store, name, file: (uploads.append(name), upload(store, name, file)),
    )
    put(store, write(tmp_path, {"config.yaml": b"b"}), first)
    assert [re.sub("v-[0-9a-f]{16}", "v", name) for name in uploads] == ["v/config.yaml"]
    assert read(store.url) == {**OLD, "config.yaml": b"b"}


def test_an_upload_that_is_killed_anywhere_leaves_the_old_folder_or_the_new(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = write(tmp_path / "old", OLD), write(tmp_path / "new", NEW)
    monkeypatch.setattr(stored_folders, "_THREADS", 1)
    bucket, outcomes = s3.make_bucket("killed"), []
    for number in range(len(NEW) + 3):
        store = Store(f"{bucket}/{number}", "output")
        first = put(store, old, None)
        with monkeypatch.context() as patch:
            kill_at(patch, number)
            try:
                put(store, new, first)
                outcomes.append("whole")
            except Killed:
                outcomes.append("killed")
        is_published = number > len(NEW)
        assert read(store.url) == (NEW if is_published else OLD)
        # The next process removes what the killed one left, and puts its own folder there.
        manifest = read_manifest(store)
        assert manifest is not None
        second = put(store, new, manifest)
        stored_folders.delete_remains(store, second)
        assert read(store.url) == NEW
        assert len(store.objects()) == len(NEW) + 1
    assert outcomes == ["killed"] * (len(NEW) + 2) + ["whole"]


def test_the_first_upload_of_a_folder_that_is_killed_leaves_no_folder(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(s3.make_bucket("first") + "/run", "output")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, len(OLD))
        put(store, write(tmp_path, OLD), None)
    assert read_manifest(store) is None
    assert all(stored_folders.is_remains(stored, set()) for stored in store.objects())
    assert len(store.objects()) == len(OLD)


def test_a_folder_that_is_not_in_the_manifest_is_incomplete(s3: S3Server, tmp_path: Path) -> None:
    """The objects are there, as after a kill, and the manifest above does not name them."""
    store = Store(s3.make_bucket("incomplete") + "/run", "output")
    put(store, write(tmp_path, {"config.yaml": b"a"}), None)
    s3.put("incomplete", "run/best/v-0123456789abcdef/config.json", b"{}")
    with pytest.raises(InputError, match="has no folder 'best', or its upload has not ended"):
        read(f"{store.url}/best")


def test_of_two_writers_the_one_that_comes_second_is_refused(s3: S3Server, tmp_path: Path) -> None:
    store = Store(s3.make_bucket("writers"), "output")
    old, new = write(tmp_path / "old", OLD), write(tmp_path / "new", NEW)
    first = put(store, old, None)
    with pytest.raises(ChangedError):
        put(store, new, None)
    put(store, new, first)
    # The same content, by another writer: nothing tells the two apart but the manifest's version.
    with pytest.raises(ChangedError):
        put(store, new, first)
    assert read(store.url) == NEW


def test_a_manifest_whose_answer_was_lost_is_the_writers_own(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(s3.make_bucket("lost") + "/folder", "output")
    tried: set[str] = set()
    write_if = Store.write_if

    def write_and_lose(self: Store, *arguments: Any) -> Any:
        write_if(self, *arguments)
        raise self.error("the answer was lost")

    (tmp_path / "file").write_text("first")
    with monkeypatch.context() as patched:
        patched.setattr(Store, "write_if", write_and_lose)
        with pytest.raises(InputError, match="the answer was lost"):
            stored_folders.publish(store, tmp_path, None, lambda name: "", tried)
    (tmp_path / "file").write_text("second")
    stored_folders.publish(store, tmp_path, None, lambda name: "", tried)
    with pytest.raises(ChangedError):  # of another process
        stored_folders.publish(store, tmp_path, None, lambda name: "")


def test_a_deletion_that_fails_leaves_a_whole_folder(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(s3.make_bucket("undeleted") + "/folder", "output")
    (tmp_path / "file").write_text("first")
    manifest = stored_folders.publish(store, tmp_path, None, lambda name: "")

    def refuse(self: Store, names: Any) -> None:
        raise self.error("deletion is not allowed")

    (tmp_path / "file").write_text("second")
    with monkeypatch.context() as patched:
        patched.setattr(Store, "delete", refuse)
        with pytest.warns(UserWarning, match="deletion is not allowed; replaced objects stay"):
            manifest = stored_folders.publish(store, tmp_path, manifest, lambda name: "")
    (tmp_path / "file").write_text("third")
    stored_folders.publish(store, tmp_path, manifest, lambda name: "")


def test_a_reader_meanwhile_reads_the_old_folder_or_the_new(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run publishes when a reader has the old manifest, and deletes what that one names."""
    store = Store(s3.make_bucket("reader"), "output")
    first = put(store, write(tmp_path / "old", OLD), None)
    new = write(tmp_path / "new", NEW)
    download, published = Store.download, []

    def after_a_publication(store: Store, *arguments: object) -> None:
        if not published:
            published.append(put(store, new, first))
        download(store, *arguments)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(stored_folders, "_THREADS", 1)
    monkeypatch.setattr(Store, "download", after_a_publication)
    assert read(store.url) == NEW
    monkeypatch.setattr(Store, "download", _always_replaced)
    with pytest.raises(ReplacedError):
        read(f"{store.url}/latest")


def _always_replaced(store: Store, *arguments: object) -> None:
    raise ReplacedError("replaced")


def test_an_object_with_another_content_is_refused(s3: S3Server, tmp_path: Path) -> None:
    store = Store(s3.make_bucket("damaged"), "output")
    manifest = put(store, write(tmp_path, OLD), None)
    s3.put("damaged", manifest.files["best/weights"].object, b"3" * 5000)
    with pytest.raises(InputError, match=f"is not the object that {MANIFEST} states; restore it"):
        read(store.url)
    with pytest.raises(InputError):  # nothing of it is in the cache
        read(store.url)


@pytest.mark.parametrize(
    "text", ["no JSON", "{}", '{"format": "specjax folder 2"}', '{"format": 1, "files": []}']
)
def test_a_damaged_manifest_is_refused(s3: S3Server, text: str) -> None:
    bucket = f"manifest-{len(text)}"
    url = s3.make_bucket(bucket)
    s3.put(bucket, MANIFEST, text.encode())
    with pytest.raises(InputError, match="cannot be read"):
        read(url)


def test_names_that_lead_out_of_the_folder_are_refused(s3: S3Server, tmp_path: Path) -> None:
    url = s3.make_bucket("outside")
    s3.put("outside", "a/../../x", b"outside")
    with pytest.raises(InputError):
        read(url)
    s3.put(
        "outside",
        "run/" + MANIFEST,
        (
            b'{"format": "specjax folder 1", "writer": "w", "files": {"../x":'
            b' {"object": "a", "size": 1, "sha256": ""}}}'
        ),
    )
    with pytest.raises(InputError, match=r"name '\.\./x'"):
        read(f"{url}/run")


def test_a_folder_of_other_programs_is_read_as_it_is(s3: S3Server) -> None:
    url = s3.make_bucket("plain")
    for name in ("models/tiny/config.json", "models/tiny/sub/weights", "models/other/config.json"):
        s3.put("plain", name, name.encode())
    s3.put("plain", "models/tiny/", b"")  # consoles make such objects
    expected = {"config.json", "sub/weights"}
    assert set(read(f"{url}/models/tiny")) == set(read(f"{url}/models/tiny/")) == expected
    # A changed object is another content, and another directory of the cache.
    earlier = stored_folders.fetch(f"{url}/models/tiny", "target").directory
    s3.put("plain", "models/tiny/config.json", b"changed")
    assert read(f"{url}/models/tiny")["config.json"] == b"changed"
    assert (earlier / "config.json").read_bytes() == b"models/tiny/config.json"
    assert earlier.name == "tiny"


def test_what_is_in_the_cache_is_not_read_again(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(s3.make_bucket("cached") + "/run", "output")
    put(store, write(tmp_path, OLD), None)
    downloads: list[str] = []
    download = Store.download
    monkeypatch.setattr(
        Store,
        "download",
        lambda store, stored, file: (downloads.append(file.name), download(store, stored, file)),
    )
    small = stored_folders.fetch(f"{store.url}/best", "target", ["**/*.json"])
    assert downloads == ["config.json"] == [file.name for file in small.files]
    whole = stored_folders.fetch(f"{store.url}/best", "target")
    assert downloads == ["config.json", "weights"] and whole.directory == small.directory
    stored_folders.fetch(f"{store.url}/best", "target")
    assert len(downloads) == 2


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("data/*.jsonl", ["a.jsonl", "b.jsonl"]),
        ("data/**/*.jsonl", ["a.jsonl", "b.jsonl", "deep/er/c.jsonl"]),
        ("data/?.jsonl", ["a.jsonl", "b.jsonl"]),
        ("data/[!a].*", ["b.jsonl"]),
        ("data/[ab].jsonl", ["a.jsonl", "b.jsonl"]),
        ("data/a.jsonl", ["a.jsonl"]),
        ("data", ["README.md", "a.jsonl", "b.jsonl", "deep/er/c.jsonl"]),
    ],
)
def test_patterns_are_those_of_a_shell(s3: S3Server, pattern: str, expected: list[str]) -> None:
    bucket = f"patterns-{pattern.encode().hex()}"
    url = s3.make_bucket(bucket)
    for name in ("a.jsonl", "b.jsonl", "deep/er/c.jsonl", "README.md"):
        s3.put(bucket, f"data/{name}", b"{}")
    fetched = stored_folders.fetch(f"{url}/{pattern}", "data.source")
    names = sorted(str(file.relative_to(fetched.directory)) for file in fetched.files)
    assert names == expected
    assert fetched.is_object == (pattern == "data/a.jsonl")
    assert fetched.directory.name == "data"


@pytest.mark.parametrize("name", ["nothing", "data/*.json", "data/b.jsonl"])
def test_a_missing_object_is_named(s3: S3Server, name: str) -> None:
    bucket = f"missing-{len(name)}"
    url = s3.make_bucket(bucket)
    s3.put(bucket, "data/a.jsonl", b"{}")
    with pytest.raises(InputError, match="there is no such object or folder; check the spelling"):
        stored_folders.fetch(f"{url}/{name}", "data.source")
