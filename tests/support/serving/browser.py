"""A headless Chromium for tests of pages, driven by the WebDriver protocol."""

import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest


class Browser:
    """A headless Chromium, driven by the WebDriver protocol."""

    def __init__(self, port: int, profile: Path) -> None:
        self.base = f"http://127.0.0.1:{port}"
        flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
        flags += f" --disable-component-update --disable-sync --user-data-dir={profile}"
        options = {"goog:chromeOptions": {"args": flags.split()}, "goog:loggingPrefs": {"browser": "ALL"}}
        session = self.call("POST", "/session", {"capabilities": {"alwaysMatch": options}})
        self.base += f"/session/{session['sessionId']}"

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        sent = None if body is None else json.dumps(body).encode()
        request = Request(self.base + path, sent, {"Content-Type": "application/json"}, method=method)
        with urlopen(request, timeout=30) as answer:
            return json.load(answer)["value"]

    def run(self, script: str) -> Any:
        return self.call("POST", "/execute/sync", {"script": script, "args": []})

    def resize(self, width: int) -> None:
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": size})

    def move(self, axis: str, index: int) -> None:
        notify = "one.dispatchEvent(new Event('input', {bubbles: true}))"
        self.run(f"const one = document.getElementById('{axis}'); one.value = {index}; {notify}")


def _started() -> "tuple[subprocess.Popen[str], int]":
    """Return a chromedriver and its port, below the ports that the system gives to connections."""
    for port in random.SystemRandom().sample(range(20000, 30000), 20):
        driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.PIPE, text=True)
        assert driver.stdout is not None
        if any("started successfully on port" in line for line in driver.stdout):
            return driver, port
        driver.stdout.close()
        driver.wait()
    raise AssertionError("chromedriver did not start")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        assert "CI" not in os.environ, "apt-get install chromium chromium-driver"
        pytest.skip("needs chromium and chromium-driver")
    driver, port = _started()
    with driver:
        try:
            page = Browser(port, tmp_path_factory.mktemp("profile"))
            yield page
            page.call("DELETE", "")
        finally:
            driver.terminate()
