"""Check the line that ``specjax client`` prints when the server does not accept a client."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from specjax.cli.main import main


@pytest.mark.full
@pytest.mark.parametrize(
    ("status", "why"), [(401, "a key is missing or wrong"), (404, "it takes no drafts of clients")]
)
def test_a_server_that_refuses_a_client_is_told_of_in_a_line(
    status, why, tiny_pair, capsys
) -> None:
    class Refusing(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"ws://127.0.0.1:{server.server_port}"
        options = ["--drafter", "prompt-lookup", "--target-parts", tiny_pair[0]]
        options += ["--prompt", "a b", "--capacity", "64", "--max-new-tokens", "4"]
        assert main(["client", "--server", address, *options]) == 2
        server.shutdown()
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("specjax: error: server='ws://127.0.0.1")
    assert f"answers {status}; {why}" in error
