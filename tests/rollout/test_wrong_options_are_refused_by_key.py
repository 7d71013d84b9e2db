"""A wrong option of an agent, its gateway, environment, sandbox or branches is refused by its key before a session."""

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
from small_swe import all_tasks

from tree_rl.rollout.agents.agents_by_name import check
from tree_rl.rollout.agents.command_line import CommandLineOptions
from tree_rl.rollout.agents.in_environment import AgentInEnvironment
from tree_rl.rollout.agents.react import ReActOptions
from tree_rl.rollout.branching.grow import BranchOptions
from tree_rl.rollout.environments.swe_task import SweTask
from tree_rl.rollout.gateway.calls.side_calls import read_side_calls
from tree_rl.rollout.gateway.dialects.families import check_dialect
from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.verl_plugin.agent_loops.agent_loop_options import read_gateway_options

IN_ENVIRONMENT = "tree_rl.rollout.agents.in_environment.AgentInEnvironment"


def gateway_agent(**given: Any) -> None:
    read_gateway_options(
        {"agent": IN_ENVIRONMENT, **given}, max_context_tokens=10, max_turn_tokens=5, template_options={}
    )


def gateway(**given: Any) -> None:
    GatewayOptions(max_context_tokens=10, max_turn_tokens=5, **given)


def side_call(**given: Any) -> None:
    read_side_calls([given])


def agents(**given: Any) -> None:
    """Where the sessions run, and where a job starts that runs them elsewhere."""
    for is_this_machine in (True, False):
        with pytest.raises(ValueError) as refused:
            check(given, is_this_machine=is_this_machine)
    raise refused.value


def swe_task(**given: Any) -> None:
    SweTask.from_row({**next(iter(all_tasks().values())).to_row(), **given})


BRANCHES = {"branching": {"policy": "turns"}}
WRONG: dict[Callable[..., Any], list[tuple[dict[str, Any], str]]] = {
    gateway_agent: [
        ({"agent": None}, r"gateway_agent\.agent: expected the class of an agent"),
        ({"agnet_options": {}}, r"gateway_agent\.agnet_options: no such option"),
        ({"session_timeout_s": 0}, r"gateway_agent\.session_timeout_s=0"),
        ({"session_timeout_s": 600}, r"=600: expected more than agent_options\.timeout_seconds=900"),
        *(
            ({"failed_reward": value}, rf"gateway_agent\.failed_reward={value}: expected a finite number")
            for value in (inf, -inf)
        ),
        (
            {"agent_options": {"options": {"think": "strip"}}},
            r"agent_options\.options\.think=strip: .*; set .*gateway_agent\.gateway\.reasoning=inline",
        ),
        ({"gateway": {"on_dirft": "reuse"}}, r"gateway_agent\.gateway\.on_dirft: no such option"),
        ({"gateway": {"on_drift": "maybe"}}, "on_drift='maybe'"),
        ({"branching": {"rounds": 2}}, r"gateway_agent\.branching\.policy: expected the name of a policy"),
        ({"branching": {"policy": "turns", "budget": 5}}, r"gateway_agent\.branching\.budget: no such option"),
        (
            {**BRANCHES, "agent_options": {"agent": "codex"}},
            r"gateway_agent\.branching: expected the agent react, .* received codex",
        ),
        ({**BRANCHES, "agent": "builtins.object"}, r"gateway_agent\.branching: builtins\.object has no `record`"),
    ],
    gateway: [
        ({"on_drift": "ignore"}, "on_drift='ignore': expected reuse or branch"),
        ({"reasoning": "hidden"}, "reasoning='hidden'"),
        ({"max_calls": 0}, "max_calls=0: expected at least 1"),
        ({"dialect": "herme"}, "dialect="),
    ],
    check_dialect: [
        ({"name": name}, r"dialect=.*expected one of auto, hermes.*vllm:PARSER")
        for name in ("herme", "vllm:", "tgi:hermes", "")
    ],
    side_call: [
        ({"name": "judge"}, r"side_calls\.judge: expected a pattern .*known calls can be named: commit_message"),
        ({"name": "judge", "pattern": "x"}, r"side_calls\.pattern: no such option"),
        ({"name": "judge", "user": "("}, r"side_calls\.judge: '\(' is no regular expression"),
        ({"name": "judge", "user": "x", "weight": -1}, r"judge\.weight=-1: expected a number from 0 to 100"),
        ({"name": "judge", "user": "x", "weight": "none"}, "weight='none'"),
        ({"user": "x"}, r"side_calls\.name=None: expected a text"),
        ({"name": "a b", "user": "x"}, "name='a b': expected letters"),
    ],
    BranchOptions: [
        ({"policy": "turn"}, "branching.policy='turn': expected one of turns, entropy, tail, fixed"),
        ({"policy": "turns", "options": {"n": 2}}, "branching.policy=turns, or its options: .*'n'"),
        ({"policy": "nowhere.tail"}, "branching.policy=nowhere.tail, or its options: No module named"),
        ({"policy": "tail", "rounds": 0}, "branching.rounds=0: expected an integer of at least 1"),
        ({"policy": "turns", "budget_tokens": 0}, "branching.budget_tokens=0: expected"),
        ({"policy": "fixed", "options": {"every_tokens": 0}}, "branching.options.every_tokens=0"),
        ({"policy": "fixed", "options": {"depth": 0}}, "branching.options.depth=0"),
        ({"policy": "entropy", "options": {"weight": "1e-1"}}, "branching.options.weight='1e-1': expected a number"),
        ({"policy": "entropy", "options": {"branches": 0.5}}, "branching.options.branches=0.5"),
    ],
    ReActOptions: [
        ({"think": "hide"}, "think='hide'"),
        ({"max_turns": 0}, "max_turns=0"),
        ({"compact_after_tokens": 0}, "compact_after_tokens=0: expected at least 1"),
    ],
    CommandLineOptions: [({"command": "claude --print"}, "the place of the task")],
    agents: [
        ({"agent": "command_line"}, r"agent_options\.options\.command: expected a value; command_line has no default"),
        (
            {"agent": "command_line", "options": {"max_turns": 3}},
            r"agent_options\.options\.max_turns: no such option; known are",
        ),
        ({"agent": "claude"}, r"agent='claude': expected one of react, mini_swe, claude_code, .*, command_line, or"),
        ({"environment": "swe_bensh"}, r"environment='swe_bensh': expected one of swe, .*swe_gym, r2e, terminal_bench"),
        *(
            ({"timeout_seconds": value}, rf"agent_options\.timeout_seconds={value}: expected more than 0 seconds")
            for value in (0, -1.0)
        ),
        ({"environment_options": {"image": "x"}}, r"agent_options\.environment_options\.image: no such option"),
        ({"agnet": "react"}, r"agent_options\.agnet: no such option; known are agent, options,"),
        ({"sandbox": {"image": "x"}}, r"agent_options\.sandbox\.image: no such option"),
    ],
    AgentInEnvironment: [
        ({"sandbox": {"unconfned": True}}, "unconfned: no such option; known are backend, .*, unconfined"),
        ({"sandbox": {"limits": {"processes": 0}}}, r"Limits\.processes=0"),
    ],
    swe_task: [
        ({"tset_command": "x"}, r"extra_info\.swe\.tset_command"),
        ({"fail_to_pass": []}, "at least one test in fail_to_pass"),
        ({"files": []}, "`files` or an `image`"),
    ],
}


def test_reasoning_inside_the_text_can_be_stripped() -> None:
    gateway_agent(agent_options={"options": {"think": "strip"}}, gateway={"reasoning": "inline"})


@pytest.mark.parametrize(
    ("build", "given", "message"), [(build, *case) for build, cases in WRONG.items() for case in cases]
)
def test_wrong_options_are_refused_by_key(build: Callable[..., Any], given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**given)
