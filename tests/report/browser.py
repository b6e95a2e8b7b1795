"""Chromium, driven over its debugging pipe: real keys and clicks, the console, the tree that a screen reader gets."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium: install the system's package `chromium` to test the page in a browser"
)
_FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--remote-debugging-pipe",
]  # fmt: skip
_KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, ""), "ArrowRight": (39, ""), "ArrowDown": (40, "")}


class Browser:
    """One page at a time. ``errors``: what the console complained of.

    The protocol: JSON that ends with a zero byte, to file 3 of the process and from its file 4.
    """

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (read, self._to), (self._from, write) = os.pipe(), os.pipe()
        files = f'exec 3<&{read} 4>&{write}; exec "$@"'
        command = ["bash", "-c", files, "bash", CHROMIUM, *_FLAGS, f"--user-data-dir={self._folder.name}"]
        self._process = subprocess.Popen(command, pass_fds=(read, write), stderr=subprocess.DEVNULL)
        os.close(read)
        os.close(write)
        self._rest, self._number, self._session = b"", 0, None
        self.errors: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._folder.cleanup()

    def send(self, method: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol, and its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {} if self._session is None else {"sessionId": self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._from, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        first, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(first)
        found, told = message.get("params", {}), message.get("method")
        if told == "Runtime.exceptionThrown":
            self.errors.append(str(found["exceptionDetails"]))
        elif (told == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning")) or told == "Log.entryAdded":
            self.errors.append(str(found))
        return message

    def open(self, page: Path, width: int = 1300, height: int = 900, dark: bool = False, fragment: str = "") -> None:
        """Open a file in a window of this size, and wait until it has loaded."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=page.resolve().as_uri() + fragment)
        while self.run("document.readyState + location.protocol") != "completefile:":
            time.sleep(0.005)  # each question takes time from the page

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, *keys: str) -> None:
        """Press keys one after the other."""
        for key in keys:
            code, text = _KEYS[key]
            named = {"key": key, "code": key, "windowsVirtualKeyCode": code}
            self.send("Input.dispatchKeyEvent", type="keyDown", **named, **({"text": text} if text else {}))
            self.send("Input.dispatchKeyEvent", type="keyUp", **named)

    def click(self, selector: str) -> None:
        """Click where the middle of an element is."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{found}.scrollIntoView({{block: 'center'}})")
        x, y, width, height = self.run(
            f"(({{x, y, width, height}}) => [x, y, width, height])({found}.getBoundingClientRect())"
        )
        x, y = x + width / 2, y + height / 2
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def heard(self) -> list[tuple[str, str]]:
        """Role and name of everything that a screen reader finds."""
        nodes = self.send("Accessibility.getFullAXTree")["nodes"]
        said = [(node.get("role", {}).get("value", ""), node.get("name", {}).get("value", "")) for node in nodes]
        return [(role, name) for role, name in said if name]

    def picture(self, path: Path) -> None:
        """What the window shows, as a PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))
