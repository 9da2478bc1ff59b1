"""A headless Chromium that is controlled with the DevTools protocol over its own pipe.

Messages are JSON objects that end in a zero byte.
"""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TIMEOUT = 60  # seconds for actions that take one on an idle machine

_OPTIONS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",  # /dev/shm is small in containers
    "--disable-gpu",
    "--disable-sync",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


def found() -> str | None:
    """Return the browser's command, or None. The variable CHROMIUM names another one."""
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if name and (path := shutil.which(name))), None)


class Browser:
    """A connection to the browser, which collects its events in ``events``."""

    def __init__(self, process: int, commands: int, replies: int) -> None:
        self.events: list[dict[str, Any]] = []
        self._process, self._commands, self._replies = process, commands, replies
        self._sent, self._read = 0, b""

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command, and return its result."""
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": params}
        message |= {"sessionId": session} if session else {}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT
        while True:
            reply = self._next(deadline)
            if reply is None:
                raise TimeoutError(f"Chromium did not answer {method} in {TIMEOUT} s")
            if reply.get("id") == self._sent:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                return reply["result"]

    def listen(self, seconds: float) -> None:
        """Collect events for some seconds."""
        deadline = time.monotonic() + seconds
        while self._next(deadline) is not None:
            pass

    def _next(self, deadline: float) -> dict[str, Any] | None:
        while b"\0" not in self._read:
            if not select.select([self._replies], [], [], max(0, deadline - time.monotonic()))[0]:
                return None
            if not (part := os.read(self._replies, 1 << 20)):
                raise RuntimeError("Chromium ended")
            self._read += part
        message, _, self._read = self._read.partition(b"\0")
        decoded = json.loads(message)
        if "method" in decoded:
            self.events.append(decoded)
        return decoded


class Page:
    """A tab."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.send("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.send(method, self.session, **params)

    def look(self, width: int, height: int, theme: str = "light") -> None:
        """Set the size of the window, and the colours that its user prefers."""
        phone = width < 600
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        self.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": theme}],
        )

    def open(self, address: str) -> None:
        self.send("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression."""
        reply = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in reply:
            raise RuntimeError(f"{script}: {reply['exceptionDetails']}")
        return reply["result"].get("value")

    def wait_for(self, condition: str, seconds: float = TIMEOUT) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({condition})"):
            if time.monotonic() > deadline:
                shown = self.evaluate("document.body.innerText")
                raise TimeoutError(
                    f"not true after {seconds} s: {condition}\ntroubles: {self.troubles()}\nthe"
                    f" page:\n{shown}"
                )
            self.browser.listen(0.05)

    def type(self, selector: str, text: str) -> None:
        """Replace the text of a field."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).select()")
        self.send("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """Click in the middle of an element."""
        place = self.evaluate(
            f"(() => {{ const it = document.querySelector({json.dumps(selector)});"
            " it.scrollIntoView({block: 'nearest'}); const box = it.getBoundingClientRect();"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send(
                "Input.dispatchMouseEvent",
                type=kind,
                x=place[0],
                y=place[1],
                button="left",
                clickCount=1,
            )

    def press(self, key: str, code: int, control: bool = False) -> None:
        """Press a key; ``code`` is its virtual key code."""
        params = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": code,
            "modifiers": 2 if control else 0,
        }
        for kind in ("rawKeyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, **params)

    def screenshot(self, file: Path) -> None:
        picture = self.send("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(picture["data"]))

    def troubles(self) -> list[str]:
        """Return errors and warnings in the console, exceptions, and requests that failed."""
        messages = []
        for event in self.browser.events:
            params = event["params"]
            match event["method"]:
                case "Runtime.exceptionThrown":
                    messages.append(json.dumps(params["exceptionDetails"]))
                case "Runtime.consoleAPICalled" if params["type"] in {"error", "warning", "assert"}:
                    messages.append(json.dumps(params["args"]))
                case "Log.entryAdded" if params["entry"]["level"] in {"error", "warning"}:
                    messages.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
                case "Network.loadingFailed":
                    messages.append(f"a request failed: {params['errorText']}")
                case "Network.responseReceived" if params["response"]["status"] >= 400:
                    messages.append(f"{params['response']['url']}: {params['response']['status']}")
        return messages

    def requested(self) -> list[str]:
        """Return the addresses of all requests of the page."""
        sent = (
            event["params"]
            for event in self.browser.events
            if event["method"] == "Network.requestWillBeSent"
        )
        return sorted({params["request"]["url"] for params in sent})


@contextmanager
def chromium(directory: Path) -> Iterator[Browser]:
    """Start a browser that forgets everything when the block ends.

    ``directory`` gets its profile and its output.
    """
    command = found()
    if command is None:
        raise RuntimeError(
            "there is no Chromium: install one (Debian: apt-get install chromium), or name it in"
            " CHROMIUM"
        )
    theirs, commands = os.pipe()
    replies, answers = os.pipe()
    # The browser reads from descriptor 3 and writes to 4, which may be in use in this process.
    low = theirs, answers
    theirs, answers = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low)
    options = [
        *_OPTIONS,
        f"--user-data-dir={directory / 'profile'}",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
    ]
    writes = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    process = os.posix_spawn(
        command,
        [command, *options, "about:blank"],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 1, str(directory / "chromium.log"), writes, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            (os.POSIX_SPAWN_DUP2, theirs, 3),
            (os.POSIX_SPAWN_DUP2, answers, 4),
        ],
        setpgroup=0,
    )
    for end in (*low, theirs, answers):
        os.close(end)
    try:
        yield Browser(process, commands, replies)
    finally:
        os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(commands)
        os.close(replies)
