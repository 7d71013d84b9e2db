"""Writes docs/keys.md, every key of the options, from the dataclasses that read them: python docs/site/keys.py."""

import ast
import inspect
import itertools
import re
import textwrap
import typing
from collections.abc import Iterator
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

PAGE = Path(__file__).parents[1] / "keys.md"
AGENT = "actor_rollout_ref.rollout.custom.gateway_agent"
SECTIONS: list[tuple[str, str, type]] = [
    ("The tree engine", "tree", TreeConfig),
    ("Agents on the gateway", AGENT, GatewayAgentOptions),
    ("The gateway", f"{AGENT}.gateway", GatewayOptions),
    ("A side call", f"{AGENT}.gateway.side_calls[i]", SideCall),
    ("The agent `react`", f"{AGENT}.agent_options.options", ReActOptions),
    ("The agent `mini_swe`", f"{AGENT}.agent_options.options", MiniSweOptions),
    ("The agent `command_line`", f"{AGENT}.agent_options.options", CommandLineOptions),
    ("Harnesses", f"{AGENT}.agent_options.options", HarnessOptions),
    ("Sandboxes", f"{AGENT}.agent_options.sandbox", SandboxOptions),
    ("Limits of a command", f"{AGENT}.agent_options.sandbox.limits", Limits),
    ("The embedded rollout engine", "actor_rollout_ref.rollout.engine_kwargs.hf", HFRolloutOptions),
]
"""Heading, where the keys stand in verl's config, and the dataclass that reads them."""
FROM_VERL = {
    "agent_options": "none",
    "max_context_tokens": "verl's `prompt_length + response_length`",
    "max_turn_tokens": "verl's `response_length`",
    "template_options": "verl's `data.apply_chat_template_kwargs`",
}
"""By key, the default that the agent loops give to a field that has none of its own."""
HEAD = """# Every key

Made from the dataclasses that read the keys, by `python docs/site/keys.py`; a test holds the two equal.
[Configuration](configuration.md) says why you would change a key and what else tree_rl adds to a config. verl's own
options are in [verl's options on trees](verl_options.md), those of other libraries' environments in
[environments](environments.md#environments-of-other-libraries).
"""


def page() -> str:
    """The whole page, as Markdown."""
    return "\n".join([HEAD, *(line for section in SECTIONS for line in table(*section))]).rstrip() + "\n"


def table(title: str, place: str, options: type) -> Iterator[str]:
    """Heading and table of one dataclass."""
    said = meanings(options)
    shown = {entry.name: entry for entry in fields(options) if not entry.name.startswith("_")}
    yield f"## {title}\n"
    yield f"Under `{place}`. {first_line(options)}\n"
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, entry in shown.items():
        usual = FROM_VERL.get(name) or default(entry)
        yield f"| `{name}` | {kind(options, name)} | {usual} | {cell(said.get(name, ''))} |"
    yield ""


def first_line(options: type) -> str:
    """Of the class's docstring, as a sentence."""
    return cell((inspect.getdoc(options) or "").splitlines()[0].partition(";")[0].rstrip(".") + ".")


def meanings(options: type) -> dict[str, str]:
    """By field, the docstring that stands below it in the source, those of base classes included."""
    said: dict[str, str] = {}
    for owner in reversed([base for base in options.__mro__ if base.__module__.startswith("tree_rl.")]):
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0].body  # type: ignore[attr-defined]
        for entry, following in itertools.pairwise(body):
            if isinstance(entry, ast.AnnAssign) and isinstance(following, ast.Expr):
                said[ast.unparse(entry.target)] = ast.literal_eval(following.value)
    return said


def kind(options: type, name: str) -> str:
    """The type of a field in words that YAML knows."""
    hint = typing.get_type_hints(options)[name]
    return cell(" or ".join(dict.fromkeys(words(hint))))


def words(hint: Any) -> Iterator[str]:
    """Names of the alternatives of a type."""
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        yield from (f"`{str(value).lower() if isinstance(value, bool) else value}`" for value in typing.get_args(hint))
    elif origin in (tuple, list):
        yield "list"
    elif origin is None or isinstance(hint, type):
        names = {str: "text", int: "integer", float: "number", bool: "true, false", type(None): "null"}
        yield "mapping" if is_dataclass(hint) or hint not in names else names[hint]
    elif origin in (typing.Union, type(int | str)):
        yield from (word for part in typing.get_args(hint) for word in words(part))
    else:
        yield "mapping"


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


def cell(text: str) -> str:
    """A text on one line, with nothing that ends a cell of a table."""
    return re.sub(r"\bNone\b", "null", " ".join(text.split())).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
