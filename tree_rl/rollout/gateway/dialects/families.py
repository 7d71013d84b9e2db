"""Finds a model's dialect: by name, or by its chat template."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tree_rl.rollout.gateway.dialects.dialect import Dialect
from tree_rl.rollout.gateway.dialects.engine_parsers import ENGINES, EngineDialect
from tree_rl.rollout.gateway.dialects.harmony import Harmony
from tree_rl.rollout.gateway.dialects.json_arguments import DeepSeekV3, Hermes, KimiK2, Llama3, Mistral
from tree_rl.rollout.gateway.dialects.markup import Glm4, Qwen3Coder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DIALECTS: dict[str, Callable[[], Dialect]] = {
    kind.name: kind for kind in (Hermes, Qwen3Coder, Glm4, KimiK2, DeepSeekV3, Mistral, Llama3, Harmony)
}
AUTO = "auto"
_SIGNS: dict[str, Callable[[], Dialect]] = {
    "<|channel|>": Harmony,
    "<|tool_call_begin|>": KimiK2,
    "<｜tool▁call▁begin｜>": DeepSeekV3,
    "[TOOL_CALLS]": Mistral,
    "<function=": Qwen3Coder,
    "<arg_key>": Glm4,
    "<tool_call>": Hermes,
    '"parameters": ': Llama3,
}
"""Text by which a template shows its dialect. The first match decides."""


def check_dialect(name: str) -> None:
    """Raise `ValueError` for an unknown name."""
    engine, _, parser = name.partition(":")
    if name != AUTO and name not in DIALECTS and not (engine in ENGINES and parser):
        known = ", ".join([AUTO, *DIALECTS, *(f"{one}:PARSER" for one in ENGINES)])
        raise ValueError(f"dialect={name!r}: expected one of {known}")


def dialect_named(name: str, *, template: str, tokenizer: "PreTrainedTokenizerFast") -> Dialect:
    """The dialect of a model.

    Args:
        name: `auto`, a family, or an engine's parser as `vllm:NAME` or `sglang:NAME`.
        template: the model's chat template for prompts with tools. `auto` takes the dialect of its calls, because the
            model was trained on that format; Hermes if it writes no calls.

    Raises:
        ValueError: no dialect has the name, or the engine is not installed or has no such parser.
    """
    check_dialect(name)
    engine, _, parser = name.partition(":")
    if parser:
        return EngineDialect(engine, parser, tokenizer=tokenizer, reasoning=auto_dialect(template))
    return auto_dialect(template) if name == AUTO else DIALECTS[name]()


def auto_dialect(template: str) -> Dialect:
    """The dialect of a chat template's calls."""
    return next((kind() for sign, kind in _SIGNS.items() if sign in template), Hermes())
