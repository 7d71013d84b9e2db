"""Refuses a job whose sessions would all fail because its agent does not exist or is not installed.

The check runs before Ray starts. Otherwise every session would fail a minute later.
"""

from typing import Any

from omegaconf import OmegaConf

from tree_rl.rollout.agents.agents_by_name import IN_ENVIRONMENT, check

GATEWAY_AGENT = "actor_rollout_ref.rollout.custom.gateway_agent"
TREE_AGENT = "actor_rollout_ref.rollout.custom.tree_agent"


def refuse_unknown_agent(config: Any) -> None:
    """Check `gateway_agent.agent_options` or `tree_agent.environment`, except for classes of the user.

    Raises:
        ValueError: an unknown name, option or value; or, for a job on one machine, a missing program.
    """
    gateway_agent, tree_agent = (
        None if config is None else OmegaConf.select(config, key) for key in (GATEWAY_AGENT, TREE_AGENT)
    )
    if gateway_agent is not None and gateway_agent.get("agent") == IN_ENVIRONMENT:
        options = OmegaConf.to_container(gateway_agent.get("agent_options") or OmegaConf.create({}), resolve=True)
    elif tree_agent is not None:
        options = {"environment": tree_agent.get("environment") or "shell"}
    else:
        return
    assert isinstance(options, dict)
    check({str(name): value for name, value in options.items()}, is_this_machine=config.trainer.nnodes == 1)
