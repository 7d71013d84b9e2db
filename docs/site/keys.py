"""Writes the keys in docs/configuration.md from the dataclasses that read them: python docs/site/keys.py."""

import ast
import inspect
import itertools
import re
import textwrap
import typing
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from tree_rl.rollout.agents.command_line import CommandLineOptions
from tree_rl.rollout.agents.harnesses import HarnessOptions
from tree_rl.rollout.agents.mini_swe import MiniSweOptions
from tree_rl.rollout.agents.react import ReActOptions
from tree_rl.rollout.gateway.calls.side_calls import SideCall
from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.sandbox.processes.limits import Limits
from tree_rl.rollout.sandbox.sandbox import SandboxOptions
from tree_rl.verl_plugin.agent_loops.agent_loop_options import GatewayAgentOptions
from tree_rl.verl_plugin.embedded_rollout.hf_options import HFRolloutOptions
from tree_rl.verl_plugin.options import TreeConfig

PAGE = Path(__file__).parents[1] / "configuration.md"
AGENT = "actor_rollout_ref.rollout.custom.gateway_agent"
AGENTS_OPTIONS = f"{AGENT}.agent_options.options"
SECTIONS: dict[str, tuple[str, type]] = {
    "tree": ("tree", TreeConfig),
    "gateway_agent": (AGENT, GatewayAgentOptions),
    "gateway": (f"{AGENT}.gateway", GatewayOptions),
    "side_call": (f"{AGENT}.gateway.side_calls[i]", SideCall),
    "react": (AGENTS_OPTIONS, ReActOptions),
    "mini_swe": (AGENTS_OPTIONS, MiniSweOptions),
    "command_line": (AGENTS_OPTIONS, CommandLineOptions),
    "harness": (AGENTS_OPTIONS, HarnessOptions),
    "sandbox": (f"{AGENT}.agent_options.sandbox", SandboxOptions),
    "limits": (f"{AGENT}.agent_options.sandbox.limits", Limits),
    "hf": ("actor_rollout_ref.rollout.engine_kwargs.hf", HFRolloutOptions),
}
"""Name in the page's marks, where the keys stand in verl's config, and the dataclass that reads them."""
MARKED = re.compile(r"(<!-- keys: (\w+) -->\n).*?(<!-- end of keys -->)", re.DOTALL)
FROM_VERL = {
    "agent_options": "none",
    "max_context_tokens": "verl's `prompt_length + response_length`",
    "max_turn_tokens": "verl's `response_length`",
    "template_options": "verl's `data.apply_chat_template_kwargs`",
}
"""By key, the default that the agent loops give to a field that has none of its own."""
FILL = textwrap.TextWrapper(
    width=120, initial_indent="* ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
)


def page(text: str) -> str:
    """The page with the lists between its marks made anew."""
    return MARKED.sub(lambda found: f"{found[1]}\n{keys(*SECTIONS[found[2]])}\n{found[3]}", text)


def keys(place: str, options: type) -> str:
    """What one dataclass reads, as a list in Markdown."""
    said, hints = meanings(options), typing.get_type_hints(options)
    items = [f"Under `{place}`:\n"]
    for entry in fields(options):
        if not entry.name.startswith("_"):
            usual = FROM_VERL.get(entry.name) or default(entry)
            usual = usual if usual == "required" else f"default {usual}"
            meaning = choices(hints[entry.name], said[entry.name]) + said[entry.name]
            meaning = re.sub(r"\bNone\b", "null", " ".join(meaning.split()))
            items.append(FILL.fill(f"**`{entry.name}`**, {usual}. {meaning}"))
    return "".join(f"{item}\n" for item in items)


def meanings(options: type) -> dict[str, str]:
    """By field, the docstring that stands below it in the source, those of base classes included."""
    said: dict[str, str] = {}
    for owner in reversed([base for base in options.__mro__ if base.__module__.startswith("tree_rl.")]):
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0].body  # type: ignore[attr-defined]
        for entry, following in itertools.pairwise(body):
            if isinstance(entry, ast.AnnAssign) and isinstance(following, ast.Expr):
                said[ast.unparse(entry.target)] = ast.literal_eval(following.value)
    return said


def choices(hint: Any, said: str) -> str:
    """The values of a field that takes few, where its docstring leaves one out."""
    parts = (hint, *typing.get_args(hint))
    literals = [value for part in parts if typing.get_origin(part) is typing.Literal for value in typing.get_args(part)]
    names = [f"`{str(value).lower() if isinstance(value, bool) else value}`" for value in literals]
    return "" if all(name.strip("`") in said for name in names) else f"One of {', '.join(names)}. "


def default(entry: Field[Any]) -> str:
    """The default of a field as YAML writes it."""
    if entry.default_factory is not MISSING:
        made = entry.default_factory()
        if is_dataclass(made):
            pairs = (
                f"{part.name}: {getattr(made, part.name)}"
                for part in fields(made)
                if getattr(made, part.name) != part.default
            )
            return f"`{{{', '.join(pairs)}}}`"
        return "none"
    if entry.default is MISSING:
        return "required"
    if isinstance(entry.default, tuple):
        names = dict.fromkeys(getattr(part, "name", str(part)) for part in entry.default)
        return ", ".join(f"`{name}`" for name in names) or "none"
    if entry.default is None or isinstance(entry.default, bool):
        return str(entry.default).lower().replace("none", "null")
    return f"`{entry.default}`" if entry.default != "" else "none"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
