"""A headless Chromium driven over its DevTools protocol, through two pipes."""

import fcntl
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

FLAGS = (
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
WAIT_S = 120
READS, WRITES = 3, 4
"""Chromium's ends of the pipes."""


class Page:
    """One tab."""

    def __init__(self, commands: IO[bytes], answers: IO[bytes]) -> None:
        self._commands, self._answers = commands, answers
        self._rest = b""
        self._last = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        command = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            command["sessionId"] = self._session
        self._commands.write(json.dumps(command).encode() + b"\0")
        self._commands.flush()
        while True:
            message = self._read()
            if message.get("id") == self._last:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def _read(self) -> dict[str, Any]:
        parts = [self._rest]
        while b"\0" not in parts[-1]:
            parts.append(os.read(self._answers.fileno(), 2**16))
            assert parts[-1], "the browser has ended"
        text, _, self._rest = b"".join(parts).partition(b"\0")
        return json.loads(text)

    def evaluate(self, script: str) -> Any:
        """Value of an expression, awaited."""
        told = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def open(self, address: str, *, width: int = 1280, height: int = 800) -> None:
        """Load a page of ours and wait until it has drawn."""
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=address)
        # The old page answers until the new one stands.
        self.evaluate(
            f"""new Promise((done) => {{
                const look = () => location.href === {json.dumps(address)} && window.viewer?.state.window
                    ? done() : setTimeout(look, 20);
                look();
            }})"""
        )

    def press(self, key: str) -> None:
        text = {"Enter": "\r", "Escape": ""}.get(key, key if len(key) == 1 else "")
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def happened(self, method: str) -> list[dict[str, Any]]:
        """Parameters of the events of a kind since the page was opened."""
        self.evaluate("1")
        return [event["params"] for event in self.events if event["method"] == method]


@contextmanager
def open_browser(program: str, profile: Path) -> Iterator[Page]:
    """Start Chromium with a profile of its own and end it afterwards."""
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    command = [program, *FLAGS, *root, f"--user-data-dir={profile}", "about:blank"]
    ends = [*os.pipe(), *os.pipe()]
    # Away from the numbers that they get in the child.
    read_commands, write_commands, read_answers, write_answers = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in ends]
    for end in ends:
        os.close(end)
    for end in (write_commands, read_answers):
        os.set_inheritable(end, False)

    def place() -> None:
        os.dup2(read_commands, READS)
        os.dup2(write_answers, WRITES)

    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, close_fds=False, preexec_fn=place
    )
    for end in (read_commands, write_answers):
        os.close(end)
    try:
        with os.fdopen(write_commands, "wb") as commands, os.fdopen(read_answers, "rb", buffering=0) as answers:
            yield Page(commands, answers)
    finally:
        process.terminate()
        process.wait(timeout=WAIT_S)
