"""A real headless Chromium through its driver, over WebDriver's own HTTP."""

import base64
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
)  # fmt: skip
KEYS = {"ArrowRight": "\ue014", "ArrowLeft": "\ue012", "ArrowDown": "\ue015", "Escape": "\ue00c", "Enter": "\ue007"}


class Browser:
    """One window."""

    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http, self._session = http, session

    def call(self, path: str, **body: Any) -> Any:
        answer = self._http.post(f"/session/{self._session}{path}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    def open(self, address: str, *, width: int = 1280, height: int = 800) -> None:
        self.call("/window/rect", width=width, height=height)
        # A change of the fragment alone would load nothing.
        self.call("/url", url="about:blank")
        self.call("/url", url=address)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.call("/execute/sync", script=script, args=list(arguments))

    def press(self, *keys: str) -> None:
        actions = [
            {"type": kind, "value": KEYS.get(key, key)} for key in keys for kind in ("keyDown", "keyUp")
        ]  # fmt: skip
        self.call("/actions", actions=[{"type": "key", "id": "keys", "actions": actions}])

    def state(self) -> dict[str, str]:
        """What the page says of itself: group, segment, segments, lines, found."""
        return dict(self.run("return {...document.body.dataset}"))

    def screenshot(self, path: Path) -> None:
        answer = self._http.get(f"/session/{self._session}/screenshot")
        path.write_bytes(base64.b64decode(answer.json()["value"]))


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
            for _ in range(600):
                try:
                    if http.get("/status").json()["value"]["ready"]:
                        break
                except httpx.TransportError:
                    time.sleep(0.1)
            arguments = [*OPTIONS, f"--user-data-dir={profile}"]
            wanted = {"browserName": "chrome", "goog:chromeOptions": {"args": arguments}}
            made = http.post("/session", json={"capabilities": {"alwaysMatch": wanted}})
            assert made.status_code == 200, made.text
            session = made.json()["value"]["sessionId"]
            yield Browser(http, session)
            http.delete(f"/session/{session}")
    finally:
        driver.terminate()
        driver.wait()
