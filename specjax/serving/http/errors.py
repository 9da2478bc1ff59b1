"""Errors of requests, as OpenAI's object ``{"error": {"message", "type", "param", "code"}}``."""

from collections.abc import Mapping
from typing import Any

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    426: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
"""The ``type`` of the error object, by the HTTP status."""


class RequestError(Exception):
    """The error that a request is answered with.

    Attributes:
        status: the HTTP status.
        message: the message for users: what is wrong, and the remedy.
        param: the parameter that is wrong; None: the error concerns no single one.
        code: the error code for programs.
        headers: the additional headers of the response.

    Examples:
        >>> from specjax.serving.http.errors import RequestError
        >>> RequestError(400, "n=0: must be from 1 to 16", param="n").object["error"]["param"]
        'n'
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        # Half a character, which a request may have escaped, cannot be sent back.
        message = message.encode(errors="replace").decode()
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def object(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return error_object(self.status, self.message, param=self.param, code=self.code)


def invalid(param: str, message: str, code: str | None = None) -> RequestError:
    """Return the error for an invalid parameter of a request.

    Examples:
        >>> from specjax.serving.http.errors import invalid
        >>> invalid("n", "n=0: must be from 1 to 16").status
        400
    """
    return RequestError(400, message, param=param, code=code)


def error_object(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return OpenAI's error object.

    Examples:
        >>> from specjax.serving.http.errors import error_object
        >>> error_object(404, "no such path")["error"]["type"]
        'not_found_error'
    """
    return {
        "error": {
            "message": message,
            "type": KINDS.get(status, "server_error"),
            "param": param,
            "code": code,
        }
    }


ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""The ``type`` of Anthropic's error, by the HTTP status; for all others: the request is invalid."""

ANTHROPIC_PATH = "/v1/messages"
"""The path of Anthropic's interface, and the beginning of its other paths."""


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """Return Anthropic's error object.

    Examples:
        >>> from specjax.serving.http.errors import anthropic_error
        >>> anthropic_error(503, "the server is starting")["error"]["type"]
        'overloaded_error'
    """
    kind = ANTHROPIC_KINDS.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_body(error: RequestError, path: str) -> dict[str, Any]:
    """Return the object of an error in the form of the interface that a path belongs to.

    Examples:
        >>> from specjax.serving.http.errors import error_body, invalid
        >>> error = invalid("max_tokens", "max_tokens=0: must be at least 1")
        >>> sorted(error_body(error, "/v1/messages")), sorted(error_body(error, "/v1/responses"))
        (['error', 'type'], ['error'])
    """
    if path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/"):
        return anthropic_error(error.status, error.message)
    return error.object
