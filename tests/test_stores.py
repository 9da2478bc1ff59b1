"""Objects in buckets: conditional writes, whole reads, and errors with a remedy.

S3 is moto's server. Google's storage is a stub of its XML API, which obstore speaks; no real bucket
was used.
"""

import importlib.util
import re
import threading
from pathlib import Path

import pytest

from specjax import stores
from specjax.errors import InputError
from specjax.stores import ChangedError, ReplacedError, Store, is_url
from tests.buckets import GoogleStub, S3Server


def check_conditional_writes(store: Store) -> None:
    """Check that of two writers of one version the second is refused."""
    first = store.write_if("manifest", b"first", None)
    with pytest.raises(ChangedError):
        store.write_if("manifest", b"second", None)
    second = store.write_if("manifest", b"second", first)
    with pytest.raises(ChangedError):
        store.write_if("manifest", b"third", first)
    assert store.read("manifest") == (b"second", second)
    # The answer to a write may be lost. The repeated write finds its own content.
    assert store.write_if("manifest", b"second", first) == second
    assert store.read("absent") is None


def test_conditional_writes_of_s3(s3: S3Server) -> None:
    check_conditional_writes(Store(s3.make_bucket("conditional") + "/runs/1", "output"))
    assert s3.names("conditional") == ["runs/1/manifest"]


def test_conditional_writes_of_google(google: type[GoogleStub]) -> None:
    check_conditional_writes(Store("gs://bucket/runs/1", "output"))
    # 0 is the generation of an object that does not exist.
    assert google.conditions == ["0", "0", "1000", "1000", "1000"]


def test_of_many_writers_of_one_version_one_succeeds(s3: S3Server) -> None:
    url = s3.make_bucket("race")
    results: list[str] = []

    def write(number: int) -> None:
        try:
            Store(url, "output").write_if("claim", f"{number}".encode(), None)
            results.append("written")
        except ChangedError:
            results.append("refused")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["refused"] * 7 + ["written"]


def test_an_object_is_read_whole_in_pieces_or_not_at_all(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "_PIECE", 1000)
    store = Store(s3.make_bucket("pieces"), "data.source")
    content = bytes(range(256)) * 21
    (tmp_path / "local").write_bytes(content)
    store.upload("a/b", tmp_path / "local")
    (tmp_path / "empty").touch()
    store.upload("empty", tmp_path / "empty")
    assert [(stored.name, stored.size) for stored in store.objects()] == [
        ("a/b", len(content)),
        ("empty", 0),
    ]
    listed = store.find("a/b")
    assert listed is not None
    store.download(listed, tmp_path / "copy" / "b")
    assert (tmp_path / "copy" / "b").read_bytes() == content
    store.download(store.objects()[1], tmp_path / "copy" / "empty")
    assert (tmp_path / "copy" / "empty").read_bytes() == b""
    (tmp_path / "local").write_bytes(content[::-1])
    store.upload("a/b", tmp_path / "local")
    with pytest.raises(ReplacedError, match="a/b was replaced or deleted while it was read"):
        store.download(listed, tmp_path / "copy" / "c")
    store.delete(["a/b", "absent"])
    with pytest.raises(ReplacedError):
        store.download(listed, tmp_path / "copy" / "c")
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["b", "empty"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gcs://b/x", "='gcs://b/x': gcs:// is not supported; write gs://; give a local path"),
        ("az://b/x", "az:// is not supported; give a local path, s3://BUCKET/PATH or gs://"),
        ("s3://", "output='s3://': it has no bucket; write s3://BUCKET/PATH"),
        ("s3://b/a//c", "a part of the path is empty, '.' or '..'; write s3://BUCKET/PATH"),
        ("s3://b/../c", "a part of the path is empty, '.' or '..'"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        Store(url, "output")


def test_paths_are_not_urls() -> None:
    locations = ["runs/model", "/data/s3:/x", "eagle3:runs", "hf:owner/name", Path("s3://b/x")]
    assert not any(map(is_url, locations))
    assert is_url("s3://b/x") and is_url("GS://b") and is_url("hdfs://b/x")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'specjax\[stores\]'"):
        Store("s3://bucket/x", "output")


def test_a_missing_bucket_is_named(s3: S3Server, tmp_path: Path) -> None:
    store = Store("s3://nowhere/runs", "output")
    (tmp_path / "file").touch()
    message = "the bucket 'nowhere' does not exist; create it, or check the spelling"
    for act in (
        store.objects,
        lambda: store.read("a"),
        lambda: store.write_if("a", b"", None),
        lambda: store.upload("a", tmp_path / "file"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            act()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("status", [401, 403])
def test_refused_credentials_are_named(s3: S3Server, status: int) -> None:
    store = Store(s3.make_bucket(f"refused-{status}"), "output")
    s3.before = lambda method, path: status
    with pytest.raises(InputError, match=r"the store refuses the credentials.*AWS_ACCESS_KEY_ID"):
        store.objects()


def test_missing_credentials_are_named(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without credentials obstore asks the machine's own service for them; here none answers."""
    from obstore.exceptions import BaseError

    store = Store("s3://bucket", "output")
    error = BaseError("PUT http://169.254.169.254/latest/api/token\n\nDebug source: ...")
    with (
        pytest.raises(InputError, match=r"no credentials for s3://.*pip install boto3"),
        store._explaining(),
    ):
        raise error
    # Other errors pass as they are.
    with pytest.raises(ZeroDivisionError), store._explaining():
        _ = 1 / 0


def test_a_profile_of_boto3_is_used(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    profile = tmp_path / "credentials"
    profile.write_text("[lab]\naws_access_key_id = of-profile\naws_secret_access_key = secret\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profile))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    store = Store(s3.make_bucket("profile"), "output")
    store.write_if("a", b"content", None)
    assert store.read("a") is not None
