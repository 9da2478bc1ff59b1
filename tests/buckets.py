"""A server with the API of S3, moto's, for tests of runs and data in buckets.

Tests that need it are skipped where moto or obstore is not installed.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
}


@dataclass
class S3Server:
    """The server.

    Attributes:
        url: its address.
        before: is called before each request, with its method and path. It may wait; if it returns
            a number, the request is answered with that status and nothing happens.
        client: boto3's client, an independent view of the buckets.
    """

    url: str
    before: Callable[[str, str], int | None] = lambda method, path: None
    client: Any = field(default=None, repr=False)

    def make_bucket(self, name: str) -> str:
        """Make a bucket and return its URL."""
        self.client.create_bucket(Bucket=name)
        return f"s3://{name}"

    def names(self, bucket: str) -> list[str]:
        """Return the names of the objects of a bucket."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return [entry["Key"] for page in pages for entry in page.get("Contents", [])]

    def put(self, bucket: str, name: str, content: bytes) -> None:
        """Write an object."""
        self.client.put_object(Bucket=bucket, Key=name, Body=content)

    @property
    def environment(self) -> dict[str, str]:
        """The variables of the environment with which the commands find the server."""
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": self.url}


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Start the server."""
    pytest.importorskip("obstore")
    pytest.importorskip("moto.server")
    import boto3
    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    backend = DomainDispatcherApplication(create_backend_app)
    started = S3Server("")

    def application(environment: dict[str, Any], start_response: Any) -> Any:
        status = started.before(environment["REQUEST_METHOD"], environment["PATH_INFO"])
        if status is not None:
            start_response(f"{status} Refused", [("Content-Length", "0")])
            return [b""]
        return backend(environment, start_response)

    server = make_server(
        "127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    started.url = f"http://127.0.0.1:{server.server_port}"
    started.client = boto3.client(
        "s3",
        endpoint_url=started.url,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    )
    try:
        yield started
    finally:
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def _server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3Server]:
    """Return the server, which the library finds by the environment. The cache is empty."""
    for name, value in _server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield _server
    _server.before = lambda method, path: None
