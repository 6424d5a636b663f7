"""Chromium without a window, driven by chromedriver over the WebDriver protocol (https://www.w3.org/TR/webdriver2/)."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

WAIT_S = 120.0
CHROMIUM = next((at for name in ("chromium", "chromium-browser", "google-chrome") if (at := shutil.which(name))), None)
DRIVER = shutil.which("chromedriver")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="there is no Chromium: apt-get install chromium chromium-driver"
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1360,1000",
)  # fmt: skip


class Chrome:
    """One browser window."""

    def __init__(self, session: httpx.Client) -> None:
        self._session = session

    def _ask(self, method: str, path: str, **body: Any) -> Any:
        found = self._session.request(method, path, **({"json": body} if method == "POST" else {}))
        assert found.status_code == 200, found.text
        return found.json()["value"]

    def go(self, url: str) -> None:
        """Load a page."""
        self._ask("POST", "/url", url=url)

    def run(self, script: str) -> Any:
        """Run a script in the page and return its result."""
        return self._ask("POST", "/execute/sync", script=script, args=[])

    def wait(self, condition: str) -> None:
        """Wait until an expression of the page's is true."""
        end = time.monotonic() + WAIT_S
        while not self.run(f"return Boolean({condition})"):
            assert time.monotonic() < end, f"waited {WAIT_S:g} s for {condition}; the page: {self.html()[:3000]}"
            time.sleep(0.1)

    def html(self) -> str:
        """The page as it is now."""
        return str(self._ask("GET", "/source"))

    def alert(self) -> bool:
        """Whether a page has opened a dialog."""
        return self._session.get("/alert/text").status_code == 200


@contextlib.contextmanager
def chrome(profile: Path) -> Iterator[Chrome]:
    """A browser with a new profile in a folder, while the block runs."""
    assert CHROMIUM is not None
    assert DRIVER is not None
    driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert driver.stdout is not None
        port = next(found[1] for line in driver.stdout if (found := re.search(r"successfully on port (\d+)", line)))
        base = f"http://127.0.0.1:{port}"
        options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options, "unhandledPromptBehavior": "ignore"}}}
        with httpx.Client(timeout=WAIT_S, trust_env=False) as client:
            made = client.post(f"{base}/session", json=wanted).json()["value"]
            client.base_url = httpx.URL(f"{base}/session/{made['sessionId']}")
            try:
                yield Chrome(client)
            finally:
                ended = client.delete(f"{base}/session/{made['sessionId']}")  # ends the browser, too
                assert ended.status_code == 200, ended.text
    finally:
        driver.terminate()
        driver.wait(20)
        assert driver.stdout is not None
        driver.stdout.close()
