"""A case passes if the child says the expected plain value once; nothing else that code under test does counts."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import small_swe

from tree_rl.rollout.environments.cases import Case, passed_cases, programs_for_child

CALL = "from solution import f\nreturn f(2)"


def value_case(value: object, program: str = CALL, name: str = "f") -> Case:
    return Case(name=name, program=program, expected=json.dumps({"value": value}))


def run(folder: Path, solution: str, cases: list[Case]) -> set[str]:
    return small_swe.passed_cases(folder, {"solution.py": solution}, cases, 60.0)


PLAIN: list[tuple[str, object]] = [
    *(("4", 4), ("1.5", 1.5), ("float('nan')", float("nan")), ("-float('inf')", float("-inf")), ("None", None)),
    ("(1, (2.0, 'x'))", [1, [2.0, "x"]]),
    ("{'a': [None, True]}", {"a": [None, True]}),
    ("chr(0xd800) + chr(0) + chr(0x2028) + '\\n'", chr(0xD800) + chr(0) + chr(0x2028) + "\n"),
    ("10 ** 400", 10**400),
]
OTHER: list[tuple[str, object]] = [
    *(("True", 1), ("1", True), ("1.0", 1), ("1", 1.0), ("0", None), ("False", 0), ("'1'", 1), ("[1]", [1, 1])),
    *(("{1: 2}", {"1": 2}), ("{True: 2}", {"true": 2}), ("{'a': 1, 'b': 2}", {"a": 1}), ("{1, 2}", [1, 2])),
    ("'nan'", float("nan")),
]


@pytest.mark.parametrize(("answers", "are_right"), [(PLAIN, True), (OTHER, False)], ids=["plain", "other"])
def test_plain_values_pass_and_other_types_and_values_fail(tmp_path: Path, answers: Any, are_right: bool) -> None:
    functions = [f"def f{at}():\n    print('noise')\n    return {said}\n" for at, (said, _) in enumerate(answers)]
    cases = [
        value_case(value, f"import solution\nreturn solution.f{at}()", f"{at}: {said}")
        for at, (said, value) in enumerate(answers)
    ]
    passed = run(tmp_path, "".join(functions), cases)
    assert passed == ({case.name for case in cases} if are_right else set())


EQUAL_TO_ALL = """
class Meta(type):
    __eq__ = lambda self, other: True
    __hash__ = type.__hash__
class Any_({base}, metaclass=Meta):
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
    __hash__ = lambda self: 0
    __len__ = lambda self: 1
    __iter__ = lambda self: iter([4])
    __getitem__ = lambda self, key: 4
    items = lambda self: [('a', 4)]
    __str__ = __repr__ = lambda self: '4'
    __instancecheck__ = lambda self, other: True
    __class__ = property(lambda self: {shown})
"""


@pytest.mark.parametrize("base", ["object", "list", "dict", "int", "str", "float", "tuple", "BaseException"])
def test_objects_equal_to_everything_are_no_plain_values(tmp_path: Path, base: str) -> None:
    shown = base if base != "object" else "int"
    wrapped = ("Any_()", "[Any_()]", "{'a': Any_()}", "{Any_(): 4}")
    made = "".join(f"def f{number}():\n    return {one}\n" for number, one in enumerate(wrapped))
    cases = [
        value_case(value, f"import solution\nreturn solution.f{number}()", f"{number} {value!r}")
        for number in range(len(wrapped))
        for value in (4, [4], {"a": 4}, "4", [], {}, 0, "", 0.0, [[]])
    ]
    assert run(tmp_path, EQUAL_TO_ALL.format(base=base, shown=shown) + made, cases) == set()


def test_errors_pass_by_their_class_or_a_base(tmp_path: Path) -> None:
    cases = [
        Case(name=kind, program=CALL, expected=json.dumps({"raises": kind}))
        for kind in ("KeyError", "LookupError", "ValueError", "SystemExit")
    ]
    assert run(tmp_path, "def f(x):\n    raise KeyError(x)\n", cases) == {"KeyError", "LookupError"}
    assert run(tmp_path, "def f(x):\n    raise SystemExit(0)\n", cases) == {"SystemExit"}
    assert run(tmp_path, "def f(x):\n    return 10 ** 5000\n", cases) == set(), "the encoder's error is not f's"
    assert run(tmp_path, "def f(x):\n    return {'raises': ['KeyError']}\n", cases) == set()
    assert run(tmp_path, "def f(x):\n    raise KeyError(x)\n", [value_case(None)]) == set()


REPLACED_RUNNER = """
import sys
main = sys.modules["__main__"]
main.answer = lambda body: {"value": 5, "raises": [None]}
main.plain = lambda value: 5
def f(x):
    return 5
"""
EVERY_DESCRIPTOR = """
import json, os, sys
for number, _ in json.load(open(sys.argv[1])):
    for said in ('{"value": 4}', '{"value": 5}', "null", "["):
        for descriptor in range(3, 9):
            try:
                os.write(descriptor, f"\\n{number} {said}\\n".encode())
            except OSError:
                pass
def f(x):
    return 4
"""
FORGERIES = {
    "an early exit": "import os\nos._exit(0)\n",
    "an exit by the system": "raise SystemExit(0)\n",
    "a crash": "import os\nos.kill(os.getpid(), 11)\n",
    "a value without end": "def f(x):\n    a = []\n    a.append(a)\n    return a\n",
    "a huge integer": "def f(x):\n    return 10 ** 5000\n",
    "a huge text": "def f(x):\n    return 'x' * 10 ** 6\n",
    "a replaced runner": REPLACED_RUNNER,
    "guesses on every descriptor": EVERY_DESCRIPTOR,
}


@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES)
def test_what_the_child_does_besides_counts_nothing(tmp_path: Path, forgery: str) -> None:
    cases = [value_case(4), value_case(4, "import solution\nreturn solution.f(3)", "again")]
    assert run(tmp_path, forgery, cases) == set()


def test_a_thread_and_a_program_without_a_compiler_hold_nobody_up(tmp_path: Path) -> None:
    solution = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\nf = lambda x: 4\n"
    cases = [value_case(4), value_case(4, "return (", "no program"), value_case(4, CALL, "again")]
    assert run(tmp_path, solution, cases) == {"f", "again"}


def test_answers_of_strangers_do_not_raise() -> None:
    case = value_case(4)
    _, key = programs_for_child([case])
    (number,) = key
    right = f'{number} {{"value": 4}}'
    assert passed_cases([case], key, f"noise\n{right}\n{right}\n0 x\n\n \n") == {"f"}
    for said in (
        *("", "{", "null", "[]", "4", '{"value"', '{"values": 4}', '{"value": 4, "value": 5}', '{"value": 4.0}'),
        *('{"raises": [null]}', '{"raises": {}}', '{"raises": "value"}', '{"value": ' + "9" * 5000 + "}"),
        *('{"value": ' + "[" * 8000, "[" * 10**6, '{"value": ' + " " * 10**5 + "4}", '{"value": NaN}'),
        *('{"value": 1e999}', '{"value": "\\ud800"}', "\ud800", "\0"),
    ):
        assert passed_cases([case], key, f"{number} {said}\n") == set(), said[:40]
        assert passed_cases([case], key, f"{right}\n{number} {said}\n") == set(), "two answers that differ"
    assert passed_cases([case], key, f"x{right}\n0{right}\n {right}\n") == set()


def test_the_child_knows_programs_alone_in_another_order_every_time() -> None:
    cases = [value_case(index * 1000 + 7, f"return {index}", f"name-{index}") for index in range(20)]
    written = {programs_for_child(cases)[0] for _ in range(3)}
    assert len(written) == 3
    for text in written:
        assert sorted(program for _, program in json.loads(text)) == sorted(case.program for case in cases)
        assert "name-" not in text and "expected" not in text
    assert programs_for_child(cases, random.Random(1)) == programs_for_child(cases, random.Random(1))


@pytest.mark.parametrize("expected", ["", "4", "[]", "{}", '{"value": 1, "raises": "X"}', '{"raises": 4}', "[" * 9999])
def test_a_case_without_an_expectation_is_refused(expected: str) -> None:
    with pytest.raises(ValueError, match="case odd: expected JSON"):
        Case(name="odd", program="return 1", expected=expected)


def test_two_cases_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="distinct names"):
        programs_for_child([value_case(1), value_case(2)])
