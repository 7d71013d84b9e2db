"""Model families whose official chat templates can be read on this machine, and how they end their turns.

Templates come from installed packages, or from the folder that TREE_RL_CHAT_TEMPLATES names, as FAMILY*.jinja.
"""

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from dictated_answers import Scene
from gateway_harness import build_tokenizer

from tree_rl.rollout.gateway.protocols.messages import CalledTool, ChatMessage

PACKAGE_FOLDERS = {"trl": "chat_templates", "axolotl": "utils/chat_templates/templates"}


@dataclass(frozen=True, kw_only=True)
class Family:
    dialect: str
    templates: tuple[str, ...]
    """As package/name."""
    eos: str
    bos: str = "<|endoftext|>"
    specials: tuple[str, ...] = ()
    call_end: str = ""
    """What ends a turn with calls; empty for `eos`."""
    answer_end: str = ""
    max_calls: int = 2
    """Calls that the template writes in one turn."""


FAMILIES = (
    Family(dialect="hermes", templates=("trl/qwen2_5", "trl/qwen3", "trl/qwen3_instruct_2507"), eos="<|im_end|>"),
    Family(dialect="qwen3_coder", templates=("trl/qwen3_5_think", "trl/qwen3_6", "trl/qwen3_8"), eos="<|im_end|>"),
    Family(
        dialect="glm4",
        templates=("trl/glm4moe",),
        eos="<|endoftext|>",
        specials=("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        call_end="<|observation|>",
        answer_end="<|user|>",
    ),
    Family(
        dialect="harmony",
        templates=("trl/gptoss",),
        eos="<|return|>",
        specials=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"),
        call_end="<|call|>",
        max_calls=1,
    ),
    Family(
        dialect="llama3",
        templates=("trl/llama3_1", "trl/llama3_2"),
        eos="<|eot_id|>",
        bos="<|begin_of_text|>",
        specials=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|eom_id|>"),
        max_calls=1,
    ),
    Family(
        dialect="deepseek_v3",
        templates=(),
        eos="<｜end▁of▁sentence｜>",
        bos="<｜begin▁of▁sentence｜>",
        specials=("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    ),
    Family(
        dialect="mistral",
        templates=("axolotl/mistral_v3_tekken",),
        eos="</s>",
        bos="<s>",
        specials=("<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]"),
    ),
    Family(
        dialect="kimi_k2",
        templates=(),
        eos="<|im_end|>",
        specials=(
            *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
    ),
)
"""DeepSeek's template in trl is R1's, which opens every answer with reasoning and drops it behind it."""


def found_templates() -> Iterator[tuple[str, Family, Path | None]]:
    """Name, family and file of each template; no file if neither a package nor the folder has it."""
    local = os.environ.get("TREE_RL_CHAT_TEMPLATES")
    for family in FAMILIES:
        own = sorted(Path(local).glob(f"{family.dialect}*.jinja")) if local else []
        yield from ((path.stem, family, path) for path in own)
        for name in family.templates:
            package, _, template = name.partition("/")
            yield name, family, packaged_template(package, template)
        if not own and not family.templates:
            yield family.dialect, family, None


def packaged_template(package: str, name: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0], PACKAGE_FOLDERS[package], f"{name}.jinja")
    return path if path.exists() else None


def tokenizer_of(family: Family, template: str) -> Any:
    """The tests' tokenizer with the family's special tokens and its template."""
    tokenizer = build_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": [family.eos, *family.specials]})
    tokenizer.eos_token = family.eos
    tokenizer.bos_token = family.bos
    return tokenizer


EDIT = {
    "type": "function",
    "function": {
        "name": "edit_file",
        "description": "Replace text.",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "old": {"type": "string"},
                "line": {"type": "integer"},
                "all": {"type": "boolean"},
                "ranges": {"type": "array", "items": {"type": "array"}},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        },
    },
}
ARGUMENTS: list[dict[str, Any]] = [
    {"path": "a b.py", "old": "    if x < 3:\n\treturn \"ü\" # '\\n'\n", "line": 7, "all": True},
    {"ranges": [[1, 2], [{"k": None}]], "old": "5", "note": None, "path": ""},
    {"old": '{"a": 1}', "note": "true", "line": -3},
]
TEMPLATES = [
    pytest.param(
        family,
        path,
        id=name.replace("/", "-"),
        marks=pytest.mark.skipif(path is None, reason=f"no package here ships a chat template of {name}"),
    )
    for name, family, path in found_templates()
]


def call(number: int, index: int = 0) -> CalledTool:
    return CalledTool(id=f"made{number}id{index}", name="edit_file", arguments=ARGUMENTS[(number + index) % 3])


def written_by_the_template(scene: Scene, history: list[ChatMessage], message: ChatMessage) -> str:
    """What a model writes that was trained on this template: the turn as it stands behind its prompt."""
    before = scene.renderer.render(history, tools=scene.tools, is_prompt=True)
    whole = scene.renderer.render([*history, message], tools=scene.tools, is_prompt=False)
    assert whole.startswith(before), "this template opens answers with what it drops behind them"
    cut = scene.renderer.cut_end(whole.removeprefix(before), is_followed=False)
    assert cut is not None
    return cut[0]
