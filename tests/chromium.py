"""A headless Chromium driven over the DevTools protocol through two pipes: no port, no driver, nothing to install."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]
PATIENCE = 120  # seconds, on a busy machine


def found() -> str | None:
    """The browser of this machine: what CHROMIUM names, or one on the path."""
    names = [os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome"]
    return next((place for name in names if name and (place := shutil.which(name))), None)


class Tab:
    """One page in the browser, what it wrote to its console, and what it asked the network for."""

    def __init__(self, sending: int, receiving: int):
        self._sending, self._receiving, self._rest, self._count, self._session = sending, receiving, b"", 0, ""
        self.console: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """What the browser answers."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session and not method.startswith("Browser."):
            message["sessionId"] = self._session
        os.write(self._sending, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._hear()
            if heard.get("id") == self._count:
                if "error" in heard:
                    raise RuntimeError(f"{method}: {heard['error']}")
                return heard["result"]

    def open(self, page: Path) -> None:
        """Go to a file, and wait until it is loaded."""
        self.go(page.as_uri())

    def go(self, address: str) -> None:
        """Go to an address, and wait until it is loaded."""
        self._loaded = False
        self.call("Page.navigate", url=address)
        while not self._loaded:
            self._hear()

    def ask(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """What stands in the first such element."""
        return str(self.ask(f"document.querySelector({json.dumps(selector)}).textContent"))

    def texts(self, selector: str) -> list[str]:
        """What stands in each such element."""
        found = self.ask(f"[...document.querySelectorAll({json.dumps(selector)})].map((each) => each.textContent)")
        return list(found)

    def press(self, key: str, selector: str) -> None:
        """A key, pressed while such an element has the focus."""
        self.ask(f"document.querySelector({json.dumps(selector)}).focus()")
        codes = {"ArrowRight": 39, "ArrowLeft": 37, "Home": 36, "End": 35, "Tab": 9, "Enter": 13, " ": 32}
        words = {"text": "\r"} if key == "Enter" else {"text": " "} if key == " " else {}
        for kind in ("keyDown", "keyUp"):
            typed = words if kind == "keyDown" else {}
            code = codes[key]
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **typed)

    def resize(self, width: int, height: int = 900) -> None:
        """Another window."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str, media: str = "") -> None:
        """Another theme of the system, or another medium."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def picture(self, path: Path) -> Path:
        """The whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def _hear(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            if not select([self._receiving], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"the browser said nothing for {PATIENCE} seconds")
            more = os.read(self._receiving, 2**20)
            if not more:
                raise RuntimeError("the browser has closed its pipe: look at what it wrote to stderr")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        heard: dict[str, Any] = json.loads(line)
        self._note(heard.get("method", ""), heard.get("params", {}))
        return heard

    def _note(self, method: str, event: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.consoleAPICalled":
            self.console.append(" ".join(str(each.get("value")) for each in event["args"]))
        elif method == "Runtime.exceptionThrown":
            details = event["exceptionDetails"]
            self.console.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Log.entryAdded":
            self.console.append(event["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])


def _high_pipe() -> tuple[int, int]:
    """A pipe whose ends are none of the numbers that they are to get."""
    low = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low]
    for end in low:
        os.close(end)
    return high[0], high[1]


@contextmanager
def opened(chromium: str, profile: Path) -> Iterator[Tab]:
    """A tab of a fresh browser, which is gone afterwards."""
    (to_browser, from_us), (from_browser, to_us) = _high_pipe(), _high_pipe()
    command = f'exec "$0" "$@" 3<&{to_browser} 4>&{to_us}'  # the two that the protocol names
    process = subprocess.Popen(
        ["bash", "-c", command, chromium, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(to_browser, to_us),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(to_us)
    try:
        yield Tab(from_us, from_browser)
    finally:
        os.close(from_us)  # a browser without its pipe ends
        os.close(from_browser)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
