"""Converts a recorded session to verl's outputs, one per row."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from tree_rl.rollout.expert_routes import routes_of_row
from tree_rl.rollout.gateway.calls.agent_names import MAIN
from tree_rl.rollout.gateway.tokens.images import ImageReader
from tree_rl.rollout.transcript import ModelCall, Row, rows_of_calls
from tree_rl.verl_plugin.extra_fields import CALL_WEIGHTS, CREDIT, GENERATED_TOKENS


def rows_to_outputs(
    calls: tuple[ModelCall, ...],
    *,
    reward: float,
    figures: Mapping[str, float],
    metrics: AgentLoopMetrics,
    credit: Mapping[str, Any] | None = None,
    images: ImageReader | None = None,
) -> list[AgentLoopOutput]:
    """Turn a session into verl's outputs, each with its `reward`. Raises `ValueError` if the model generated nothing.

    `credit` is its report to estimators; the calls' tokens have numbers of `images`, None for text.
    """
    rows = rows_of_calls(calls)
    if not rows or not rows[0].response_ids:
        raise ValueError(
            "session without a generated token: the agent made no call that was answered; the gateway refuses a first "
            "prompt that leaves no room in data.max_prompt_length + data.max_response_length"
        )
    turns = max(call.turn for call in calls) + 1
    return [
        AgentLoopOutput(
            **_tokens(row, images),
            response_mask=list(row.response_mask),
            response_logprobs=None if row.response_log_probs is None else list(row.response_log_probs),
            routed_experts=routes_of_row(row, [call.routes for call in calls]),
            reward_score=reward,
            num_turns=2 * turns,
            metrics=metrics,
            extra_fields={
                "turn_scores": [],
                "tool_rewards": [],
                "reward_extra_info": {**figures, "branches": len(rows)},
                GENERATED_TOKENS: sum(len(call.response_ids) for call in calls),
                **({} if row.response_weights is None else {CALL_WEIGHTS: list(row.response_weights)}),
                **({CREDIT: dict(credit)} if credit else {}),
                **provenance(row, calls),
            },
        )
        for row in rows
    ]


def _tokens(row: Row, images: ImageReader | None) -> dict[str, Any]:
    """A row's tokens, and its images in order."""
    if images is None:
        return {"prompt_ids": list(row.prompt_ids), "response_ids": list(row.response_ids)}
    (prompt_ids, before), (response_ids, after) = images.split(row.prompt_ids), images.split(row.response_ids)
    data = {"multi_modal_data": {"images": before + after}} if before or after else {}
    return {"prompt_ids": prompt_ids, "response_ids": response_ids, **data}


def provenance(row: Row, calls: tuple[ModelCall, ...]) -> dict[str, Any]:
    """The origin of a row's tokens, for verl's `extra_fields`.

    Returns:
        `response_calls` (one entry per response token, -1 for context), `call_turns, call_agents, call_sides,
        call_versions` (one per call of the session), and verl's oldest and newest weight version of the row's generated
        tokens.
    """
    own = [calls[index] for index in sorted(set(row.response_calls) - {-1})]
    return {
        "response_calls": list(row.response_calls),
        "call_turns": [call.turn for call in calls],
        "call_agents": [call.agent for call in calls],
        "call_sides": [call.side for call in calls],
        "call_versions": [(call.min_version, call.max_version) for call in calls],
        "min_global_steps": min((v for call in own if (v := call.min_version) is not None), default=None),
        "max_global_steps": max((v for call in own if (v := call.max_version) is not None), default=None),
    }


def figures_of_calls(calls: tuple[ModelCall, ...], names_of_sides: Sequence[str]) -> dict[str, float]:
    """Numbers of calls by agents and side calls, as figures of a session; every session reports the same names."""
    sides = Counter(call.side for call in calls)
    return {
        "agents": float(len({call.agent for call in calls})),
        "sub_agent_calls": float(sum(call.agent != MAIN for call in calls)),
        "side_calls": float(len(calls) - sides[None]),
        "untrained_calls": float(sum(call.weight == 0 for call in calls)),
        **{f"side_{name}": float(sides[name]) for name in names_of_sides},
    }
