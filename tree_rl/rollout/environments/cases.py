"""Cases: tests that are data. A child runs programs on the code under test; the parent, which alone knows what they
should return, compares.

The child answers in JSON, and what is compared are plain values rebuilt from it. So neither the child's exit code nor
an object of its own making decides anything: code under test passes a case only by saying the expected value.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RUNNER_NAME = "case_runner.py"
"""The child's program, beside this file: `python3 -I -B case_runner.py PROGRAMS_FILE` in the repository."""
MAX_ANSWER_CHARACTERS = 8192
"""A longer answer fails its case, unread."""
DRAW = random.SystemRandom()


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A program and what it must return or raise.

    Raises:
        ValueError: `expected` is not JSON of the described shape.
    """

    name: str
    """Name of the test."""
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
    """Write down what the child may know.

    Returns:
        JSON text for the child, `[[id, program], ...]` in random order under random ids, and the key to its answers:
        id -> name of the case.

    Raises:
        ValueError: two cases of one name.
    """
    if len({case.name for case in cases}) < len(cases):
        raise ValueError(f"cases: expected distinct names, received {sorted(case.name for case in cases)}")
    ids = [str(number) for number in rng.sample(range(1 << 48), len(cases))]
    shuffled = rng.sample(cases, len(cases))
    programs = [[number, case.program] for number, case in zip(ids, shuffled, strict=True)]
    return json.dumps(programs), {number: case.name for number, case in zip(ids, shuffled, strict=True)}


def passed_cases(cases: Sequence[Case], key: Mapping[str, str], output: str) -> set[str]:
    """Names of the cases whose answer equals the expectation.

    A missing, malformed or oversized answer fails its case, as do two answers that differ. Lines that answer no case
    do not count. Never raises for what the child wrote.

    Args:
        cases: as given to `programs_for_child`.
        key: from there.
        output: all that the child printed; the lines that count are `ID JSON`.
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
    """JSON, or None where it is none: too deep and integers of too many digits too."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def same(expected: Any, received: Any) -> bool:
    """Whether two values of JSON are equal in type and value: 1 is neither True nor 1.0, NaN is NaN."""
    if type(expected) is not type(received):
        return False
    if isinstance(expected, list):
        return len(expected) == len(received) and all(map(same, expected, received))
    if isinstance(expected, dict):
        return expected.keys() == received.keys() and all(same(expected[name], received[name]) for name in expected)
    is_nan = expected != expected and received != received
    return bool(is_nan or expected == received)
