"""Model families whose official chat templates trl ships, where it is installed, and how they end their turns."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from dictated_answers import Scene
from gateway_harness import build_tokenizer

from tree_rl.rollout.gateway.protocols.messages import CalledTool, ChatMessage


@dataclass(frozen=True, kw_only=True)
class Family:
    dialect: str
    templates: tuple[str, ...]
    eos: str
    bos: str = "<|endoftext|>"
    specials: tuple[str, ...] = ()
    call_end: str = ""
    """What ends a turn with calls; empty for `eos`."""
    answer_end: str = ""
    max_calls: int = 2
    """Calls that the template writes in one turn."""


FAMILIES = (
    Family(dialect="hermes", templates=("qwen2_5", "qwen3", "qwen3_instruct_2507"), eos="<|im_end|>"),
    Family(dialect="qwen3_coder", templates=("qwen3_5_think", "qwen3_6", "qwen3_8"), eos="<|im_end|>"),
    Family(
        dialect="glm4",
        templates=("glm4moe",),
        eos="<|endoftext|>",
        specials=("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        call_end="<|observation|>",
        answer_end="<|user|>",
    ),
    Family(
        dialect="harmony",
        templates=("gptoss",),
        eos="<|return|>",
        specials=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"),
        call_end="<|call|>",
        max_calls=1,
    ),
    Family(
        dialect="llama3",
        templates=("llama3_1", "llama3_2"),
        eos="<|eot_id|>",
        bos="<|begin_of_text|>",
        specials=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|eom_id|>"),
        max_calls=1,
    ),
)


def template_file(name: str) -> Path | None:
    spec = importlib.util.find_spec("trl")
    path = Path(spec.submodule_search_locations[0], "chat_templates", f"{name}.jinja") if spec else None
    return path if path and path.exists() else None


def tokenizer_of(family: Family, template: str) -> Any:
    """The tests' tokenizer with the family's special tokens and its template."""
    tokenizer = build_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": [family.eos, *family.specials]})
    tokenizer.eos_token = family.eos
    tokenizer.bos_token = family.bos
    return tokenizer


PROPERTIES: dict[str, Any] = {
    "path": {"type": "string"},
    "old": {"type": "string"},
    "line": {"type": "integer"},
    "all": {"type": "boolean"},
    "ranges": {"type": "array", "items": {"type": "array"}},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES}
EDIT = {"type": "function", "function": {"name": "edit_file", "description": "Replace text.", "parameters": PARAMETERS}}
ARGUMENTS: list[dict[str, Any]] = [
    {"path": "a b.py", "old": "    if x < 3:\n\treturn \"ü\" # '\\n'\n", "line": 7, "all": True},
    {"ranges": [[1, 2], [{"k": None}]], "old": "5", "note": None, "path": ""},
    {"old": '{"a": 1}', "note": "true", "line": -3},
]
TEMPLATES = [
    pytest.param(
        family,
        template_file(name),
        id=f"trl-{name}",
        marks=pytest.mark.skipif(template_file(name) is None, reason=f"no trl here ships a chat template {name}"),
    )
    for family in FAMILIES
    for name in family.templates
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
