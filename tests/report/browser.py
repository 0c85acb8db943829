"""A real Chromium, driven through chromedriver's own protocol (W3C WebDriver), with nothing but the standard library."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


_WEARS = """
return matchMedia("(prefers-color-scheme: dark)").matches === arguments[0]
  && document.getAnimations().every(each => each.playState !== "running");
"""


class Browser:
    """A browser window.

    Args:
        root: URL of the chromedriver session.
    """

    def __init__(self, root: str) -> None:
        self.root = root

    def call(self, path: str, **body: Any) -> Any:
        return _post(f"{self.root}/{path}", body)

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self.call("goog/cdp/execute", cmd=command, params=parameters)

    def show(self, page: Path, width: int, *, dark: bool = False) -> None:
        """Open a page in a window ``width`` CSS pixels wide and 800 high."""
        narrow = width < 600
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=narrow
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.devtools("Emulation.setEmulatedMedia", features=scheme)
        self.call("url", url=page.resolve().as_uri())
        # A loaded page may still show the previous page's colours, or fade from them.
        until = time.monotonic() + 10
        while not self.run(_WEARS, dark) and time.monotonic() < until:
            time.sleep(0.05)

    def run(self, script: str, *args: Any) -> Any:
        return self.call("execute/sync", script=script, args=list(args))

    def messages(self) -> list[str]:
        """Return the console messages since the last call."""
        return [f"{entry['level']}: {entry['message']}" for entry in self.call("se/log", type="browser")]

    def picture(self, path: Path) -> None:
        """Save the whole page as a PNG."""
        shot = self.devtools("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start chromedriver and a Chromium with an empty profile in ``folder``; both end with the block."""
    assert CHROMIUM is not None
    assert DRIVER is not None
    driver, port = _start(folder / "chromedriver.txt")
    try:
        address = f"http://127.0.0.1:{port}"
        options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={folder / 'profile'}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        session = _post(f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})
        root = f"{address}/session/{session['sessionId']}"
        try:
            yield Browser(root)
        finally:
            with contextlib.suppress(urllib.error.URLError, TimeoutError):
                _OPENER.open(urllib.request.Request(root, method="DELETE"), timeout=30).close()
    finally:
        driver.terminate()
        driver.wait(timeout=30)


def _start(log: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start chromedriver and return it with its port; try again if the port, chosen on IPv6, is taken on IPv4."""
    for _ in range(20):
        with log.open("w") as out:
            driver = subprocess.Popen([str(DRIVER), "--port=0"], stdout=out, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 30
        while driver.poll() is None and time.monotonic() < deadline:
            words = log.read_text().split("on port ")
            if len(words) > 2 or (len(words) == 2 and "successfully" in words[0]):
                return driver, int(words[-1].split(".")[0])
            time.sleep(0.1)
        driver.kill()
        driver.wait()
    raise RuntimeError(log.read_text())


def _post(address: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        address, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    try:
        with _OPENER.open(request, timeout=120) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(error.read().decode()) from None
