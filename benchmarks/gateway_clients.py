"""The clients of gateway_overhead.py, in a process of their own: sessions at once, their calls one after the other.

Reads endpoints and options as JSON from standard input, and writes what each session's clients saw.
"""

import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from gateway_faults import EDITED, HEALTHY, LEFT, STATUS, ClientReport

TOOL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command in the repository and return its output.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
WORDS = (Path(__file__).parents[1] / "docs" / "code.md").read_text().split()
TEN_MEGABYTES = json.dumps({"messages": [{"role": "user", "content": "x" * (10 << 20)}]}).encode()


def prose(words: int, seed: int) -> str:
    """Words of this repository's documentation."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


@cache
def five_megabytes() -> str:
    """Text that is within a body's limit and beyond a context's."""
    return prose(900_000, 0)


def keep_to(*, clients: bool) -> None:
    """Leave the last core to the clients, and them to it."""
    cores = range(os.cpu_count() or 1)
    os.sched_setaffinity(0, cores[-1:] if clients else cores[:-1] or cores)


class Client:
    """One session's: an agent that calls a tool after every answer, and what goes wrong between its calls."""

    def __init__(self, http: Any, number: int, url: str, token: str) -> None:
        self.http, self.url, self.token = http, f"{url}/chat/completions", token
        self.random = random.Random(number)
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": prose(300, number)},
            {"role": "user", "content": prose(200, -number)},
        ]
        self.seconds: list[float] = []
        self.tokens: list[list[int]] = []
        self.faults: Counter[str] = Counter()

    async def play(self, turns: int, faulty: float) -> ClientReport:
        """Make `turns` healthy calls, and before each as many faulty ones as make their share of all calls `faulty`."""
        for turn in range(turns):
            while self.random.random() < faulty:
                kind = self.random.choice(list(STATUS))
                await self.fault(kind)
                self.faults[kind] += 1
            body = self.body(self.messages)
            started = time.perf_counter()
            answer = await self.http.post(self.url, content=body, headers=self.headers(HEALTHY))
            self.seconds.append(time.perf_counter() - started)
            message = self.read(answer)
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": prose(250, turn)}
            self.messages += [message, result]
        return ClientReport(seconds=self.seconds, tokens=self.tokens, faults=dict(self.faults))

    async def fault(self, kind: str) -> None:
        """Make one faulty call."""
        if kind == LEFT:
            body = self.body(self.messages, stream=True)
            async with self.http.stream("POST", self.url, content=body, headers=self.headers(kind)) as events:
                assert events.status_code == 200
                await anext(events.aiter_raw())
            return
        answer = await self.http.post(self.url, content=self.faulty_body(kind), headers=self.headers(kind))
        assert answer.status_code == STATUS[kind], (kind, answer.status_code, answer.text[:300])
        if kind == EDITED:
            self.read(answer)

    def faulty_body(self, kind: str) -> bytes:
        """What a faulty call sends."""
        body = self.body(self.messages)
        if kind == "cut JSON":
            return body[: len(body) * 2 // 3]
        if kind == "no UTF-8":
            return body[: len(body) // 2] + b"\xc3\x28" + body[len(body) // 2 :]
        if kind == "10 MB":
            return TEN_MEGABYTES
        if kind == "5 MB of text":
            return self.body([*self.messages, {"role": "user", "content": five_megabytes()}])
        if kind == EDITED:
            places = [place for place, message in enumerate(self.messages) if message["role"] in ("user", "tool")]
            place = self.random.choice(places)
            edited = {**self.messages[place], "content": prose(200, self.random.getrandbits(64))}
            return self.body([*self.messages[:place], edited, *self.messages[place + 1 :]])
        return body

    def body(self, messages: Sequence[dict[str, Any]], **more: Any) -> bytes:
        """A request."""
        return json.dumps({"model": "m", "messages": messages, "tools": [TOOL], **more}).encode()

    def headers(self, kind: str) -> dict[str, str]:
        """The key, and the kind of call for the benchmark's clock."""
        token = self.token[::-1] if kind == "wrong key" else self.token
        return {"authorization": f"Bearer {token}", "x-kind": kind}

    def read(self, answer: Any) -> dict[str, Any]:
        """The message of an answer, its reasoning left out."""
        body = answer.json()
        self.tokens.append([body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]])
        message: dict[str, Any] = body["choices"][0]["message"]
        message.pop("reasoning_content", None)
        return message


async def play(endpoints: Sequence[tuple[str, str]], turns: int, faulty: float) -> list[ClientReport]:
    """All sessions at once."""
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits) as http:
        clients = [Client(http, number, *endpoint) for number, endpoint in enumerate(endpoints)]
        return await asyncio.gather(*[client.play(turns, faulty) for client in clients])


def main() -> None:
    """Play what standard input says."""
    asked = json.load(sys.stdin)
    if not asked["share_cores"]:
        keep_to(clients=True)
    reports = asyncio.run(play(asked["endpoints"], asked["turns"], asked["faulty"]))
    print(json.dumps([asdict(one) for one in reports]))


if __name__ == "__main__":
    main()
