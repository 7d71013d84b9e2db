"""verl's driver refuses a job whose sessions would all fail, before it starts Ray."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from tree_rl.verl_plugin.launch.session_agent import GATEWAY_AGENT, IN_ENVIRONMENT, refuse_unknown_agent


def config(options: dict[str, Any], agent: str = IN_ENVIRONMENT) -> Any:
    made = OmegaConf.create({"trainer": {"nnodes": 1}})
    OmegaConf.update(made, GATEWAY_AGENT, {"agent": agent, "agent_options": options}, force_add=True)
    return made


def test_the_driver_starts_nothing_for_an_agent_that_does_not_exist() -> None:
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    with pytest.raises(ValueError, match=r"agent_options\.agent command_line\.max_turns: no such option"):
        get_ppo_ray_runtime_env(config({"agent": "command_line", "options": {"max_turns": 3}}))
    with pytest.raises(ValueError, match="expected one of react"):
        refuse_unknown_agent(config({"agent": "reactor"}))


def test_other_agents_and_other_jobs_pass() -> None:
    for passes in (None, OmegaConf.create({}), config({"whatever": 1}, agent="my_package.Agent"), config({})):
        refuse_unknown_agent(passes)
