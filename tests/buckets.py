"""Servers for tests of runs and data in buckets: moto's with the API of S3, and a stub of Google's.

Tests that need them are skipped where moto or obstore is not installed.
"""

import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

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


class GoogleStub(BaseHTTPRequestHandler):
    """The part of the XML API of Google's storage that folders need.

    Attributes:
        objects: the content and the generation of the objects, by their paths.
        conditions: the conditions of the writes so far.
    """

    objects: dict[str, tuple[bytes, int]]
    conditions: list[str]

    def _answer(
        self,
        status: int,
        body: bytes = b"",
        generation: int = 0,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        if generation:
            self.send_header("ETag", f'"{generation:x}"')
            self.send_header("x-goog-generation", str(generation))
            self.send_header("Last-Modified", "Sat, 28 Nov 2026 12:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_PUT(self) -> None:
        self.path = unquote(self.path)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        condition = self.headers.get("x-goog-if-generation-match")
        self.conditions.append(condition or "none")
        generation = self.objects.get(self.path, (b"", 0))[1]
        if condition is not None and int(condition) != generation:
            self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        generation += 1000
        self.objects[self.path] = body, generation
        self._answer(200, generation=generation)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        self.path = unquote(url.path)
        if "list-type=2" in url.query:
            self._answer(200, self._list(parse_qs(url.query).get("prefix", [""])[0]))
            return
        if self.path not in self.objects:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        body, generation = self.objects[self.path]
        if match := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            begin, end = int(match[1]), int(match[2]) + 1
            stated = f"bytes {begin}-{end - 1}/{len(body)}"
            self._answer(206, body[begin:end], generation, {"Content-Range": stated})
            return
        self._answer(200, body, generation)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_DELETE(self) -> None:
        deleted = self.objects.pop(unquote(self.path), None)
        self._answer(404 if deleted is None else 204)

    def _list(self, prefix: str) -> bytes:
        bucket = f"{self.path.rstrip('/')}/"
        entries = "".join(
            f"<Contents><Key>{name.removeprefix(bucket)}</Key><Size>{len(body)}</Size>"
            f'<ETag>"{generation:x}"</ETag><LastModified>2026-11-28T12:00:00.000Z</LastModified>'
            "</Contents>"
            for name, (body, generation) in sorted(self.objects.items())
            if name.removeprefix(bucket).startswith(prefix)
        )
        return f"<ListBucketResult>{entries}</ListBucketResult>".encode()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[GoogleStub]]:
    """Return the stub, which the library finds by the environment. The cache is empty."""
    pytest.importorskip("obstore")
    handler = type("Google", (GoogleStub,), {"objects": {}, "conditions": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    key = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key_id": ""}
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps({**key, "private_key": ""}))
    monkeypatch.setenv("GOOGLE_BASE_URL", url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield handler
    server.shutdown()
    server.server_close()
    thread.join()
