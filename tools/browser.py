"""Drives a headless Chromium over a pipe; it needs only the standard library.

The protocol is Chromium's own (https://chromedevtools.github.io/devtools-protocol/): JSON messages that end
with a zero byte, on file descriptors 3 and 4 of a browser started with ``--remote-debugging-pipe``.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
SECONDS = 60


def find_browser() -> str | None:
    """Returns the path of an installed Chromium or Chrome, or None."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


class Browser:
    """A page in a headless browser; a context manager.

    Args:
        size: Width and height of the page in pixels.

    Attributes:
        requests: URLs that pages asked for, in order.
        errors: What pages reported: exceptions, and entries of the console's levels warning and error.
    """

    def __init__(self, size: tuple[int, int] = (1400, 900)):
        program = find_browser()
        if program is None:
            raise FileNotFoundError(f"none of {', '.join(_NAMES)} is installed")
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._count = 0
        self._buffer = b""
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        flags = (*_FLAGS, f"--user-data-dir={self._profile.name}", f"--window-size={size[0]},{size[1]}")
        self._process, self._read, self._write = _start([program, *flags])
        self._session = self._attach(size)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._send("Browser.close")
        self._process.wait(SECONDS)
        os.close(self._read)
        os.close(self._write)
        self._profile.cleanup()

    def open(self, path: Path) -> None:
        """Opens a file and waits until its scripts have run."""
        self._call("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.readyState === 'complete'")

    def evaluate(self, code: str) -> Any:
        """Returns the value of a JavaScript expression, as plain values."""
        reply = self._call("Runtime.evaluate", expression=code, returnByValue=True)
        if "exceptionDetails" in reply:
            raise AssertionError(f"{code}: {reply['exceptionDetails']['exception'].get('description')}")
        return reply["result"].get("value")

    def wait(self, code: str) -> None:
        """Waits until a JavaScript expression is true."""
        end = time.monotonic() + SECONDS
        while not self.evaluate(code):
            if time.monotonic() > end:
                raise TimeoutError(code)
            time.sleep(0.05)

    def click(self, selector: str, count: int = 1) -> None:
        """Clicks with the mouse on the middle of the first element that a CSS selector finds."""
        place = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.evaluate(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({place})")
        for number in range(1, count + 1):
            self.mouse("mousePressed", x, y, number)
            self.mouse("mouseReleased", x, y, number)

    def mouse(self, event: str, x: float, y: float, count: int = 1, **more: Any) -> None:
        """Sends one event of the left mouse button, or of the wheel."""
        button = "none" if event == "mouseWheel" else "left"
        self._call("Input.dispatchMouseEvent", type=event, x=x, y=y, button=button, clickCount=count, **more)

    def type(self, text: str) -> None:
        """Types into what has the focus; a line feed is the Enter key."""
        for letter in text:
            if letter == "\n":
                for event in ("rawKeyDown", "char", "keyUp"):
                    self._call(
                        "Input.dispatchKeyEvent", type=event, key="Enter", text="\r", windowsVirtualKeyCode=13
                    )
            else:
                self._call("Input.insertText", text=letter)

    def screenshot(self, path: Path) -> None:
        """Writes what the page shows as PNG."""
        data = self._call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def _attach(self, size: tuple[int, int]) -> str:
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **metrics)
        return self._session

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._send(method, self._session, **parameters)

    def _send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive()
            if reply.get("id") == self._count:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']['message']}")
                return reply["result"]
            self._note(reply)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], SECONDS)[0]:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise RuntimeError("the browser ended")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        details = event.get("params", {})
        if event["method"] == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])
        elif event["method"] == "Runtime.exceptionThrown":
            self.errors.append(str(details["exceptionDetails"]))
        elif event["method"] == "Log.entryAdded" and details["entry"]["level"] in ("warning", "error"):
            self.errors.append(details["entry"]["text"])


def _start(command: list[str]) -> tuple[subprocess.Popen, int, int]:
    """Returns the process, what it writes and what it reads."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    # Away from 3 and 4, which they become in the child.
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]

    def connect() -> None:
        os.dup2(theirs[0], 3)
        os.dup2(theirs[1], 4)

    process = subprocess.Popen(
        command, preexec_fn=connect, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    for fd in (theirs_in, theirs_out, *theirs):
        os.close(fd)
    return process, ours_in, ours_out
