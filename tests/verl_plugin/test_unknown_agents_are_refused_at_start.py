"""verl's driver refuses a job whose sessions would all fail, before it starts Ray."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from tree_rl.rollout.agents.agents_by_name import IN_ENVIRONMENT
from tree_rl.verl_plugin.launch.session_agent import GATEWAY_AGENT, TREE_AGENT, refuse_unknown_agent

UNCONFINED = {"sandbox": {"unconfined": True}}


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


@pytest.mark.parametrize("key", [GATEWAY_AGENT, TREE_AGENT])
def test_without_bubblewrap_nothing_starts_unless_sessions_are_called_unconfined(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tree_rl.rollout.sandbox.sandbox.why_no_bubblewrap", lambda: "not found")
    refused = OmegaConf.create({"trainer": {"nnodes": 1}})
    OmegaConf.update(refused, key, {"agent": IN_ENVIRONMENT} if key == GATEWAY_AGENT else {}, force_add=True)
    with pytest.raises(ValueError, match=r"apt install bubblewrap.*agent_options\.sandbox\.unconfined=true"):
        refuse_unknown_agent(refused)
    refuse_unknown_agent(config(UNCONFINED))


def test_other_agents_and_other_jobs_pass() -> None:
    for passes in (None, OmegaConf.create({}), config({"whatever": 1}, agent="my_package.Agent"), config(UNCONFINED)):
        refuse_unknown_agent(passes)
