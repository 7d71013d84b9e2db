"""Cases are tests as data: a child process runs programs on the code under test, and the parent compares the results.

Only the parent knows the expected values. The child answers in JSON, from which the parent rebuilds plain values. So
neither the child's exit code nor its objects decide: code passes a case only by returning the expected value.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RUNNER_NAME = "case_runner.py"
"""The child's program, in this folder; run in the repository as `python3 -I -B case_runner.py PROGRAMS_FILE`."""
MAX_ANSWER_CHARACTERS = 8192
"""Longest answer; a longer one fails its case without being parsed."""
DRAW = random.SystemRandom()


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A program and what it must return or raise. Raises `ValueError` if `expected` is not JSON of this shape."""

    name: str
    program: str
    """Body of a function that returns a plain value; the repository can be imported."""
    expected: str
    """JSON text: `{"value": ...}`, or `{"raises": "ValueError"}` for an error of this class or a subclass."""

    def __post_init__(self) -> None:
        match _parsed(self.expected):
            case {"value": _, **more} if not more:
                return
            case {"raises": str(), **more} if not more:
                return
        raise ValueError(
            f'case {self.name}: expected JSON, {{"value": ...}} or {{"raises": "NAME"}}, received {self.expected!r}'
        )


def programs_for_child(cases: Sequence[Case], rng: random.Random = DRAW) -> tuple[str, Mapping[str, str]]:
    """Write the child's input, which contains no names and no expected values.

    Returns:
        JSON text `[[id, program], ...]` in random order with random ids, and the name of the case of each id.
    """
    if len({case.name for case in cases}) < len(cases):
        raise ValueError(f"cases: expected distinct names, received {sorted(case.name for case in cases)}")
    ids = [str(number) for number in rng.sample(range(1 << 48), len(cases))]
    shuffled = rng.sample(cases, len(cases))
    programs = [[number, case.program] for number, case in zip(ids, shuffled, strict=True)]
    return json.dumps(programs), {number: case.name for number, case in zip(ids, shuffled, strict=True)}


def passed_cases(cases: Sequence[Case], key: Mapping[str, str], output: str) -> set[str]:
    """Names of the cases whose answer equals the expectation.

    A missing, malformed or oversized answer fails its case, as do two different answers. Ignores other lines, and never
    raises for the child's output.

    Args:
        key: names by id, from `programs_for_child`.
        output: the child's output, with answers in lines `ID JSON`.
    """
    answers: dict[str, set[str]] = {}
    for line in output.split("\n"):
        number, _, answer = line.partition(" ")
        if number in key:
            answers.setdefault(key[number], set()).add(answer)
    return {
        case.name
        for case in cases
        if len(said := answers.get(case.name, set())) == 1 and _is_right(json.loads(case.expected), *said)
    }


def _is_right(expectation: Mapping[str, Any], answer: str) -> bool:
    if len(answer) > MAX_ANSWER_CHARACTERS:
        return False
    match _parsed(answer):
        case {"value": value}:
            return "value" in expectation and same(expectation["value"], value)
        case {"raises": list(names)}:
            return "raises" in expectation and expectation["raises"] in names
    return False


def _parsed(text: str) -> Any:
    """Decoded JSON; None if it is invalid, nested too deep, or has too long integers."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def same(expected: Any, received: Any) -> bool:
    """True if two JSON values are equal in type and value: 1 differs from True and 1.0, and NaN equals NaN."""
    if type(expected) is not type(received):
        return False
    if isinstance(expected, list):
        return len(expected) == len(received) and all(map(same, expected, received))
    if isinstance(expected, dict):
        return expected.keys() == received.keys() and all(same(expected[name], received[name]) for name in expected)
    is_nan = expected != expected and received != received
    return bool(is_nan or expected == received)
