"""A real headless browser, driven over two pipes by the DevTools protocol.

https://chromedevtools.github.io/devtools-protocol/. It opens no port, and only the browser itself needs to be
installed.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_WITHIN_S = 240.0


class Browser:
    """One page of a browser.

    Args:
        folder: For its profile; must be empty.
    """

    def __init__(self, folder: Path) -> None:
        assert PROGRAM is not None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        options += ["--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={folder}"]
        # The browser uses the descriptors 3 and 4 for the protocol.
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}',
                "-",
                PROGRAM,
                *options,
                "about:blank",
            ],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._read = 0, b""
        self._session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        self.call("Page.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Send a command to the browser, and wait for its answer."""
        self._number += 1
        asked = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._out, json.dumps(asked).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _WITHIN_S
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._in, 1 << 16) if ready else b""
            assert data, "the browser does not answer"
            self._read += data
        message, _, self._read = self._read.partition(b"\0")
        return dict(json.loads(message))

    def open(self, address: str, width: int = 1300, height: int = 900, scheme: str = "light") -> None:
        """Open a page in a window of this size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call("Page.navigate", url=address)

    def evaluate(self, program: str) -> Any:
        """The value of a JavaScript expression in the page."""
        found = self.call("Runtime.evaluate", expression=program, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, program: str) -> Any:
        """Wait until the value of an expression is true, and return it."""
        deadline = time.monotonic() + _WITHIN_S
        while not (value := self.evaluate(program)):
            text = self.evaluate("document.body && document.body.innerText")
            assert time.monotonic() < deadline, f"{program} never came true: {text}"
            time.sleep(0.05)
        return value

    def screenshot(self) -> bytes:
        """The whole page as a PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait(_WITHIN_S)
        os.close(self._in)
        os.close(self._out)
