"""Faults among the calls of gateway_overhead.py, and the checks that none loses a record or leaves anything behind."""

import asyncio
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEALTHY = "healthy"
EDITED = "history edited"
LEFT = "client left"
STATUS: Mapping[str, int | None] = {
    "cut JSON": 400,
    "no UTF-8": 400,
    "10 MB": 413,
    "5 MB of text": 400,
    "wrong key": 401,
    "back end 429": 429,
    "back end 500": 500,
    "back end hangs": 504,
    LEFT: None,
    EDITED: 200,
}
"""Kinds of faulty calls, and the status of the gateway's answer. 5 MB are within the limit of bytes and beyond that of
tokens. A hanging back end ends with the call's time-out. A client leaves between the events of a stream. An agent that
edits its history gets an answer, in a branch."""
UNKNOWN_SESSION = ("wrong key",)
"""No session counts these: the gateway answers before it knows the session."""


async def fail(kind: str) -> None:
    """Fail as the kind of a call says. If the client leaves, work until it has left.

    Raises:
        BackendError: with the status of the kind.
    """
    from tree_rl.rollout.gateway.backend import BackendError

    if kind in ("back end hangs", LEFT):
        await asyncio.sleep(3600)
    if kind in ("back end 429", "back end 500"):
        raise BackendError(kind, status=STATUS[kind] or 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientReport:
    """What a session's clients saw."""

    seconds: list[float]
    """Seconds of each healthy call, from request to answer."""
    tokens: list[list[int]]
    """[calls answered with 200, 2] tokens of the prompt and of the answer, in order."""
    faults: dict[str, int]
    """Kind -> calls."""


def check_record(record: Any, given: Sequence[tuple[Any, Any]], report: ClientReport) -> None:
    """Compare a session's record with what the model gave and what the clients saw.

    Args:
        record: `RecordedSession`.
        given: prompt and answer of each call that the model answered, in order.
        report: by the session's clients.

    Raises:
        AssertionError: a call, a token or a row is lost, or there is one too many.
    """
    from tree_rl.rollout.transcript import rows_of_calls

    recorded = [(call.prompt_ids, call.response_ids) for call in record.calls]
    assert recorded == list(given), f"{len(recorded)} calls recorded, {len(given)} answered, or other tokens"
    lengths = [[len(prompt), len(answer)] for prompt, answer in recorded]
    assert lengths == report.tokens, (
        f"tokens of prompts and answers: {lengths} recorded, {report.tokens} seen by clients"
    )
    rows = rows_of_calls(record.calls, shared="first_row")
    assert len(rows) == 1 + report.faults.get(EDITED, 0), f"{len(rows)} rows of {report.faults}"
    trained = sum(sum(row.response_mask) for row in rows)
    assert trained == sum(answer for _, answer in report.tokens), f"{trained} tokens trained of {report.tokens}"
    refused: Counter[int] = Counter()
    for kind, count in report.faults.items():
        status = STATUS[kind]
        if status not in (None, 200) and kind not in UNKNOWN_SESSION:
            refused[status or 0] += count
    assert record.refused == refused, f"refused {record.refused}, expected {refused}"
    assert record.cancelled == report.faults.get(LEFT, 0), f"{record.cancelled} cancelled of {report.faults}"


def held() -> dict[str, int]:
    """Numbers of open files, child processes, threads, and entries of the temporary directory."""
    tasks = list(Path("/proc/self/task").iterdir())
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "children": sum(len((task / "children").read_text().split()) for task in tasks),
        "threads": len(tasks),
        "temporary": len(os.listdir(tempfile.gettempdir())),
    }
