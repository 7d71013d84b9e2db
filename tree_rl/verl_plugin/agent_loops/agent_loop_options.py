"""The options of `rollout.custom.gateway_agent`: the agent, and the treatment of sessions that fail."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from math import isfinite
from typing import Any

from tree_rl.option_types import check_options, check_type, refuse_unknown
from tree_rl.rollout.agents.agents_by_name import AGENTS, IN_ENVIRONMENT, TIMEOUT_SECONDS
from tree_rl.rollout.branching.grow import BranchOptions
from tree_rl.rollout.gateway.options import GatewayOptions

CONFIG_KEY = "actor_rollout_ref.rollout.custom.gateway_agent"


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayAgentOptions:
    """Options of agents. Raises `ValueError` if a value is out of range; the message names its key."""

    agent: str
    """Class of the agent, as `package.module.Class`."""
    agent_options: Mapping[str, Any]
    """Arguments of the agent's constructor."""
    session_timeout_s: float = 1800.0
    """Limit of a session; an agent that takes longer is cancelled."""
    failed_reward: float | None = None
    """Reward of a session whose agent failed or was cancelled; figures that verl's `algorithm` reads are 0. None drops
    the session."""
    seed: int | None = None
    """Makes rollouts repeatable: a call's random numbers depend on it, the step, the prompt's index, the session and
    the call's prompt. None leaves them to the server."""
    branching: BranchOptions | None = None
    """How finished sessions branch in training: fields of `BranchOptions`. None: they do not."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "branching", read_branching(self.branching))
        acts_alone = self.agent_options.get("agent", "react")
        if self.branching is not None and acts_alone in set(AGENTS) - {"react"}:
            raise ValueError(
                f"{CONFIG_KEY}.branching: expected the agent react, or a class that acts by `environment.call` alone, "
                f"received {acts_alone}"
            )
        if self.branching is not None and not _can_record(self.agent):
            raise ValueError(f"{CONFIG_KEY}.branching: {self.agent} has no `record`; use AgentInEnvironment")
        if self.session_timeout_s <= 0:
            raise ValueError(f"{CONFIG_KEY}.session_timeout_s={self.session_timeout_s}: expected more than 0 seconds")
        if self.failed_reward is not None and not isfinite(self.failed_reward):
            raise ValueError(f"{CONFIG_KEY}.failed_reward={self.failed_reward}: expected a finite number")
        default = TIMEOUT_SECONDS if self.agent == IN_ENVIRONMENT else None
        of_agent = self.agent_options.get("timeout_seconds", default)
        if isinstance(of_agent, int | float) and of_agent >= self.session_timeout_s:
            raise ValueError(
                f"{CONFIG_KEY}.session_timeout_s={self.session_timeout_s}: expected more than "
                f"agent_options.timeout_seconds={of_agent}: a slow session would be cancelled before it is scored"
            )


def read_gateway_options(
    given: Mapping[str, Any], *, max_context_tokens: int, max_turn_tokens: int, template_options: Mapping[str, Any]
) -> tuple[GatewayAgentOptions, GatewayOptions]:
    """Read the options of `rollout.custom.gateway_agent`.

    Args:
        given: fields of `GatewayAgentOptions`, and under `gateway` fields of `GatewayOptions`. None means default.
        template_options: verl's `data.apply_chat_template_kwargs`.

    Raises:
        ValueError: an unknown key, a bad value or no agent; names the key.
    """
    options = _without_nulls(CONFIG_KEY, given)
    refuse_unknown(CONFIG_KEY, options, [*(field.name for field in fields(GatewayAgentOptions)), "gateway"])
    gateway = _without_nulls(f"{CONFIG_KEY}.gateway", options.pop("gateway", {}))
    check_options(CONFIG_KEY, options, GatewayAgentOptions)
    if not options.get("agent"):
        raise ValueError(
            f"{CONFIG_KEY}.agent: expected the class of an agent as package.module.Class, received nothing"
        )
    check_options(f"{CONFIG_KEY}.gateway", gateway, GatewayOptions)
    defaults = {
        "max_context_tokens": max_context_tokens,
        "max_turn_tokens": max_turn_tokens,
        "template_options": dict(template_options),
    }
    read = GatewayAgentOptions(**{"agent_options": {}, **options}), GatewayOptions(**{**defaults, **gateway})
    _refuse_reasoning_apart(*read)
    return read


def _refuse_reasoning_apart(options: GatewayAgentOptions, gateway: GatewayOptions) -> None:
    """Raise a `ValueError` if `react` would strip reasoning that the gateway keeps in a field of its own."""
    of_agent = options.agent_options.get("options")
    is_react = options.agent == IN_ENVIRONMENT and options.agent_options.get("agent") in (None, "react")
    strips = isinstance(of_agent, Mapping) and of_agent.get("think") == "strip"
    if is_react and strips and gateway.reasoning != "inline":
        raise ValueError(
            f"{CONFIG_KEY}.agent_options.options.think=strip: the gateway keeps reasoning apart; set "
            f"{CONFIG_KEY}.gateway.reasoning=inline"
        )


def read_branching(given: BranchOptions | Mapping[str, Any] | None) -> BranchOptions | None:
    """Read `gateway_agent.branching`; raises `ValueError` for an unknown key or a bad value, and names it."""
    if given is None or isinstance(given, BranchOptions):
        return given
    options = _without_nulls(f"{CONFIG_KEY}.branching", given)
    check_options(f"{CONFIG_KEY}.branching", options, BranchOptions)
    if "policy" not in options:
        raise ValueError(f"{CONFIG_KEY}.branching.policy: expected the name of a policy, received nothing")
    return BranchOptions(**options)


@cache
def agent_class(path: str) -> type[Any]:
    """Import an agent's class. Raises `ValueError`, `ImportError` or `AttributeError` if the path is wrong."""
    module, _, name = path.rpartition(".")
    if not module:
        raise ValueError(f"{CONFIG_KEY}.agent={path!r}: expected a class as package.module.Class")
    found: type[Any] = getattr(import_module(module), name)
    return found


def _can_record(path: str) -> bool:
    try:
        return hasattr(agent_class(path), "record")
    except (ImportError, AttributeError):
        # The machine that reads the options may not have the agent; the sessions' machine reports it.
        return True


def _without_nulls(key: str, given: Any) -> dict[str, Any]:
    check_type(key, given, Mapping)
    return {str(name): value for name, value in given.items() if value is not None}
