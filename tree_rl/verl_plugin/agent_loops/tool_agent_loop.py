"""verl's agent loop `tree_tool_agent`: the agent `react` in an environment, with a short config.

`actor_rollout_ref.rollout.custom.tree_agent` configures it; `extra_info.tree_agent` of a sample overrides that.
"""

from collections.abc import Mapping
from typing import Any

from verl.experimental.agent_loop.agent_loop import register

from tree_rl.option_types import refuse_unknown
from tree_rl.verl_plugin.agent_loops.gateway_agent_loop import GatewaySettings, TreeGatewayAgentLoop

CONFIG_KEY = "actor_rollout_ref.rollout.custom.tree_agent"
KEYS = ["environment", "strip_reasoning", "parallel_tools", "max_turns", "max_turn_tokens"]
PARALLEL_TOOLS: Mapping[str, bool | str] = {"single": False, "in_turn": True, "branches": "branches"}
"""Values of `ReActOptions.parallel_tools` by the values of `tree_agent.parallel_tools`."""


@register("tree_tool_agent")
class TreeToolAgentLoop(TreeGatewayAgentLoop):
    """Runs `react` against the worker's gateway, with the environment's tools instead of verl's."""

    def settings(self, task: Mapping[str, Any]) -> GatewaySettings:
        """Read `custom.tree_agent`; the sample's options override it."""
        configured = (self.rollout_config.get("custom") or {}).get("tree_agent") or {}
        return self._read(as_gateway_agent({**configured, **(task.get("tree_agent") or {})}))


def as_gateway_agent(given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert `custom.tree_agent`, some of `KEYS`, to the keys of `custom.gateway_agent`; None means default.

    Raises a `ValueError` that names an unknown key or the key of a bad value.
    """
    options = {key: value for key, value in given.items() if value is not None}
    refuse_unknown(CONFIG_KEY, options, KEYS)
    parallel = options.get("parallel_tools", "in_turn")
    if parallel not in PARALLEL_TOOLS:
        raise ValueError(f"{CONFIG_KEY}.parallel_tools={parallel!r}: expected one of {', '.join(PARALLEL_TOOLS)}")
    return {
        "agent": "tree_rl.rollout.agents.in_environment.AgentInEnvironment",
        "agent_options": {
            "agent": "react",
            "options": {
                "max_turns": options.get("max_turns", 8),
                "parallel_tools": PARALLEL_TOOLS[parallel],
                "think": "strip" if options.get("strip_reasoning", True) else "keep",
            },
            "environment": options.get("environment", "shell"),
        },
        # Reasoning in the text, so that agents can remove it.
        "gateway": {"reasoning": "inline", "max_turn_tokens": options.get("max_turn_tokens")},
    }
