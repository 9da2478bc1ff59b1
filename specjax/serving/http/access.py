"""Access control: host, origin and API key, and the limits of size and time of a body."""

import asyncio
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Mapping, Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from specjax.errors import InputError
from specjax.serving.http.errors import RequestError
from specjax.serving.http.responses import CLOSE, draining_error, error_response
from specjax.serving.http.service import AppOptions, Service

_OPEN_PATHS = ("/", "/health", "/ping")


class Guard:
    """The middleware that refuses unauthorised requests before their bodies are read."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with a refusal, or pass the request on."""
        if scope["type"] in ("http", "websocket") and (error := self._refusal(scope)) is not None:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> RequestError | None:
        """Return the error of an unauthorised request. For others, store the owner in the scope."""
        options, headers = self._service.options, dict(scope["headers"])
        is_socket, method = scope["type"] == "websocket", scope.get("method")
        host = headers.get(b"host", b"").decode("latin-1")
        if options.only_loopback and not _is_loopback(host):
            message = (
                "Host: this server answers only this machine, under the names localhost and"
                " 127.0.0.1"
            )
            return RequestError(403, message, code="host_not_allowed")
        origins = [value.decode("latin-1") for name, value in scope["headers"] if name == b"origin"]
        if is_socket and not all(
            _is_of(origin, host) or _is_among(origin, options.cors_origins) for origin in origins
        ):
            return RequestError(
                403,
                "Origin: pages of other sites may not open WebSockets here",
                code="origin_not_allowed",
            )
        if scope["path"] not in _OPEN_PATHS:
            key = _key(headers, options.api_keys)
            if options.api_keys and key is None:
                message = (
                    "Authorization: the API key is missing or wrong; send the header"
                    " 'Authorization: Bearer KEY', or 'x-api-key: KEY'"
                )
                return RequestError(
                    401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
                )
            scope["specjax.owner"] = "" if key is None else hashlib.sha256(key.encode()).hexdigest()
            if (is_socket or method == "POST") and self._service.is_draining:
                return draining_error()
        has_body = method == "POST" and scope["path"] not in _OPEN_PATHS
        if has_body and not _is_json(headers.get(b"content-type", b"")):
            return RequestError(415, "Content-Type: must be application/json", code="not_json")
        return None


def _is_of(origin: str, host: str) -> bool:
    """Return whether an Origin header names the same site as a Host header.

    Browsers let pages of any site open a WebSocket, so the server must check the site.
    """
    scheme, _, site = origin.lower().partition("://")
    port = {"http": ":80", "https": ":443"}.get(scheme, "")
    return bool(port and site) and site.removesuffix(port) == host.lower().removesuffix(port)


def _is_among(origin: str, origins: Sequence[str]) -> bool:
    return origin in origins or "*" in origins


def check_origins(origins: Sequence[str]) -> None:
    """Check the origins of web pages.

    Raises:
        InputError: An origin does not have the form that browsers send.

    Examples:
        >>> from specjax.serving.http.access import check_origins
        >>> check_origins(["http://localhost:3000", "https://chat.example"])
    """
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise InputError(
                f"cors_origin={origin!r}: give an origin as browsers send it, such as"
                " http://localhost:3000 or https://chat.example, in lower case and without a path;"
                " or * for all pages"
            )


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?|null")


def _key(headers: Mapping[bytes, bytes], keys: Sequence[str]) -> str | None:
    """Return the valid API key of a request's headers, or None.

    OpenAI's clients send it in ``Authorization``, and Anthropic's in ``x-api-key``.
    """
    scheme, _, value = headers.get(b"authorization", b"").partition(b" ")
    stated = [value.strip()] if scheme.lower() == b"bearer" else []
    stated += [headers.get(b"x-api-key", b"").strip()]
    # All keys are compared, in constant time, so that the time reveals nothing about them.
    same = [key for key in keys for text in stated if hmac.compare_digest(text, key.encode())]
    return same[0] if same else None


def _is_json(content_type: bytes) -> bool:
    return content_type.partition(b";")[0].strip().lower() == b"application/json"


def _is_loopback(host: str) -> bool:
    """Return whether a Host header names this machine: localhost, or a loopback address."""
    name = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
    if name.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


async def read_body(request: Request, options: AppOptions) -> bytes:
    """Return the body of a request.

    Raises:
        RequestError: The body is too long, or takes too long.
    """
    too_long = RequestError(
        413, f"the body is longer than {options.max_body} bytes; send less", code="body_too_long"
    )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 12 or int(length) > options.max_body):
        raise too_long
    body = bytearray()
    try:
        async with asyncio.timeout(options.body_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > options.max_body:
                    raise too_long
    except TimeoutError:
        message = f"the body did not arrive within {options.body_seconds:g} seconds"
        raise RequestError(408, message, code="timeout", headers=CLOSE) from None
    return bytes(body)
