"""Refuses a job whose sessions would all fail: an agent that does not exist, or that is not installed.

verl's driver asks before it starts Ray. Without this, every session fails a minute later and names its own reason only.
"""

from typing import Any

from omegaconf import OmegaConf

GATEWAY_AGENT = "actor_rollout_ref.rollout.custom.gateway_agent"
IN_ENVIRONMENT = "tree_rl.rollout.agents.in_environment.AgentInEnvironment"


def refuse_unknown_agent(config: Any) -> None:
    """Check `rollout.custom.gateway_agent.agent_options`; agents of the user's own are left to their sessions.

    Raises:
        ValueError: an unknown name, option or value; or, where one machine does it all, a missing program.
    """
    configured = None if config is None else OmegaConf.select(config, GATEWAY_AGENT)
    if configured is None or configured.get("agent") != IN_ENVIRONMENT:
        return
    # Agents bring their client's libraries.
    from tree_rl.rollout.agents.agents_by_name import check

    options = OmegaConf.to_container(configured.get("agent_options") or OmegaConf.create({}), resolve=True)
    assert isinstance(options, dict)
    check({str(name): value for name, value in options.items()}, is_this_machine=config.trainer.nnodes == 1)
