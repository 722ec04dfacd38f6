"""A headless Chromium, driven through two pipes by the DevTools protocol; it may reach no network."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-extensions --hide-scrollbars "
    "--host-resolver-rules=MAP&*&~NOTFOUND --remote-debugging-pipe"
)
_SECONDS = 30.0


@dataclass
class Page:
    """What a browser has seen of a page.

    Attributes:
        errors: messages of the console that are warnings or errors, and exceptions.
        requests: addresses that the page asked for, its own among them.
    """

    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


class Browser:
    """One tab.

    Args:
        profile: an empty directory.
    """

    def __init__(self, profile: Path) -> None:
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        flags = [flag.replace("&", " ") for flag in _FLAGS.split()]
        words = [PROGRAM or "", *flags, f"--user-data-dir={profile}", "about:blank"]
        # Chromium reads commands from descriptor 3 and answers on descriptor 4.
        shell = ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write}', "bash", *words]
        self._process = subprocess.Popen(
            shell,
            pass_fds=[to_read, to_write],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_read)
        os.close(to_write)
        self._rest, self._number, self._session = b"", 0, None
        self.page = Page()
        targets = self.call("Target.getTargets")["targetInfos"]
        (tab,) = [target["targetId"] for target in targets if target["type"] == "page"]
        self._session = self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; return its result."""
        self._number += 1
        told = {"id": self._number, "method": method, "params": parameters}
        told |= {} if self._session is None else {"sessionId": self._session}
        os.write(self._to, json.dumps(told).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._happened(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no answer of the browser after {_SECONDS:g} s"
            chunk = os.read(self._from, 1 << 20)
            assert chunk, "the browser has ended"
            self._rest += chunk
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _happened(self, event: dict[str, Any]) -> None:
        given = event.get("params", {})
        match event.get("method"):
            case "Runtime.consoleAPICalled" if given["type"] in ("error", "warning", "assert"):
                self.page.errors.append(str(given["args"]))
            case "Runtime.exceptionThrown":
                self.page.errors.append(str(given["exceptionDetails"]))
            case "Log.entryAdded" if given["entry"]["level"] in ("error", "warning"):
                self.page.errors.append(str(given["entry"]))
            case "Network.requestWillBeSent":
                self.page.requests.append(given["request"]["url"])

    def open(self, file: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """Open a file in a window of a size; return when it is drawn."""
        self.page = Page()
        is_phone = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.theme(dark=dark)
        self.call("Page.navigate", url=file.absolute().as_uri())
        self.until("document.readyState === 'complete' && location.protocol === 'file:'")
        return self.page

    def until(self, expression: str) -> None:
        """Wait until an expression in the page is true."""
        deadline = time.monotonic() + _SECONDS
        while not self.ask(expression):
            assert time.monotonic() < deadline, f"not after {_SECONDS:g} s: {expression}"
            time.sleep(0.05)

    def theme(self, *, dark: bool) -> None:
        """Let the page see that its reader prefers dark, or light, colours."""
        preferred = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[preferred])

    def ask(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, file: Path, *, whole: bool = True) -> Path:
        """Write a PNG of the page, or of what its window shows; return its file."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(taken["data"]))
        return file

    def close(self) -> None:
        """End all its processes."""
        with contextlib.suppress(AssertionError, OSError):
            self._session = None
            self.call("Browser.close")
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=10)
        os.close(self._to)
        os.close(self._from)


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Yield a browser, and end it."""
    opened = Browser(profile)
    try:
        yield opened
    finally:
        opened.close()
