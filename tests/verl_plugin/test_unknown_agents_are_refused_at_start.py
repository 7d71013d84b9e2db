"""verl's driver refuses a job whose sessions would all fail, before it starts Ray."""

import re
from typing import Any

import pytest
from omegaconf import OmegaConf

from tree_rl.rollout.agents.agents_by_name import IN_ENVIRONMENT
from tree_rl.verl_plugin.compat import constants_ppo
from tree_rl.verl_plugin.launch.session_agent import GATEWAY_AGENT, TREE_AGENT, refuse_unknown_agent

UNCONFINED = {"sandbox": {"unconfined": True}}


def config(options: dict[str, Any], agent: str = IN_ENVIRONMENT) -> Any:
    made = OmegaConf.create({"trainer": {"nnodes": 1}})
    OmegaConf.update(made, GATEWAY_AGENT, {"agent": agent, "agent_options": options}, force_add=True)
    return made


def test_the_driver_starts_nothing_for_an_agent_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        constants_ppo.get_ppo_ray_runtime_env(config({"agent": "command_line", "options": {"max_turns": 3}}))
    said = capsys.readouterr().err
    assert "agent_options.agent command_line.max_turns: no such option" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"options": {"max_turns": "many"}}, "agent react.max_turns='many': expected a whole number"),
        ({"sandbox": {"unconfined": "no"}}, "environment swe.unconfined='no': expected true or false"),
        ({"sandbox": {"readable": "/opt"}}, "environment swe.readable='/opt': expected a list"),
        ({"sandbox": {"limits": {"processes": "1"}}}, "environment swe.limits.processes='1': expected a whole number"),
        ({"sandbox": {"limits": {"memory": 1}}}, "environment swe.limits.memory: no such option"),
        ({"sandbox": "docker"}, "agent_options.sandbox='docker': expected options with their names or null"),
        ({"timeout_seconds": "long"}, "agent_options.timeout_seconds='long': expected a number or null"),
    ],
)
def test_a_value_of_another_type_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        refuse_unknown_agent(config(options))


@pytest.mark.parametrize("key", [GATEWAY_AGENT, TREE_AGENT])
def test_without_bubblewrap_nothing_starts_unless_sessions_are_called_unconfined(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tree_rl.rollout.sandbox.sandbox.why_no_bubblewrap", lambda: "not found")
    refused = config({}) if key == GATEWAY_AGENT else OmegaConf.create({"trainer": {"nnodes": 1}})
    OmegaConf.update(refused, key, {}, force_add=True, merge=True)
    with pytest.raises(ValueError, match=r"apt install bubblewrap.*agent_options\.sandbox\.unconfined=true"):
        refuse_unknown_agent(refused)
    refuse_unknown_agent(config(UNCONFINED))


def test_other_agents_and_other_jobs_pass() -> None:
    for passes in (None, OmegaConf.create({}), config({"whatever": 1}, agent="my_package.Agent"), config(UNCONFINED)):
        refuse_unknown_agent(passes)
