"""Turns as each family writes them, and conversations to write."""

import json
import re
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

Calls = Sequence[tuple[str, dict[str, Any]]]
MARKUP = (
    *("<tool_call>", "</tool_call>", "<function=x>", "</function>", "<parameter=k>", "</parameter>", "<arg_key>"),
    *("<arg_value>", "</arg_value>", "<think>", "</think>", "<|tool_call_begin|>", "<|tool_call_end|>", "[TOOL_CALLS]"),
    *("[ARGS]", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "```", "<|python_tag|>", "<|end|>"),
    *("<|call|>", "<|message|>"),
)
NAMES = st.text("abcXYZ0129_-.é中/", min_size=1, max_size=12).filter(lambda name: name.strip("./-"))
KEYS = st.text("abcKEY_-é ", min_size=1, max_size=6).map(str.strip).filter(bool)
TEXTS = st.lists(
    st.sampled_from(
        (*MARKUP, "\n", "\n\n", " ", "\t", '"', "'", "\\", "{", "}", "ü", "中", "\U0001f600", "a b", "5", "true")
    ),
    max_size=4,
).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=3,
)
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(KEYS, JSON, max_size=3)), min_size=1, max_size=3)
PLAIN = st.text("abc üZ\n.,5", max_size=12)
"""Text around calls."""
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def tools_for(calls: Calls) -> list[dict[str, Any]]:
    """Tools whose schemas type the arguments."""
    properties: dict[str, dict[str, Any]] = {}
    for name, arguments in calls:
        for key, value in arguments.items():
            types = properties.setdefault(name, {}).setdefault(key, {"type": []})["type"]
            if (written := TYPES.get(type(value), "null")) not in types:
                types.append(written)
    return [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": typed}}}
        for name, typed in {**{name: {} for name, _ in calls}, **properties}.items()
    ]


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def bare(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def hermes(calls: Calls) -> str:
    objects = [dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)


def qwen3_coder(calls: Calls) -> str:
    written = []
    for name, arguments in calls:
        inner = "".join(f"<parameter={key}>\n{bare(value)}\n</parameter>\n" for key, value in arguments.items())
        written.append(f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>")
    return "\n".join(written)


def glm4(calls: Calls) -> str:
    written = []
    for name, arguments in calls:
        pairs = (f"<arg_key>{k}</arg_key>\n<arg_value>{bare(value)}</arg_value>\n" for k, value in arguments.items())
        written.append(f"<tool_call>{name}\n{''.join(pairs)}</tool_call>")
    return "\n".join(written)


def kimi_k2(calls: Calls) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{dumps(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def deepseek_v3(calls: Calls) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def deepseek_v3_1(calls: Calls) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def mistral(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(arguments)}" for name, arguments in calls)


def mistral_list(calls: Calls) -> str:
    objects = [{"name": name, "arguments": arguments, "id": f"abc{i:06}"} for i, (name, arguments) in enumerate(calls)]
    return f"[TOOL_CALLS]{dumps(objects)}"


def llama3(calls: Calls) -> str:
    return "; ".join(dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def harmony(calls: Calls) -> str:
    return "<|call|><|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumps(arguments)}"
        for name, arguments in calls
    )


ALL = (hermes, qwen3_coder, glm4, kimi_k2, deepseek_v3, deepseek_v3_1, mistral, mistral_list, llama3, harmony)
OTHER_NAMES = {"deepseek_v3_1": "deepseek_v3", "mistral_list": "mistral"}
WRITERS = {write.__name__: (OTHER_NAMES.get(write.__name__, write.__name__), write) for write in ALL}
"""How calls are written -> the dialect, and the writer."""
AMBIGUOUS = re.compile(r"</parameter>\s*(<parameter=|</function>)|</arg_value>\s*(<arg_key>|</tool_call>)")
"""Text that no reader can tell from the end of a bare value."""


def is_ambiguous(form: str, calls: Calls) -> bool:
    """Whether a bare value of these calls ends early for every reader, or stands for more than one value."""
    if form not in ("qwen3_coder", "glm4"):
        return False
    values = [value for _, arguments in calls for value in arguments.values()]
    return any(AMBIGUOUS.search(bare(value)) for value in values)
