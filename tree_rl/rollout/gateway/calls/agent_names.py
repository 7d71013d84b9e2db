"""Who asks, from the headers that harnesses send by themselves."""

import re
from collections.abc import Mapping

MAIN = "main"
AGENT_ID = "x-claude-code-agent-id"
"""Claude Code's, for every sub-agent."""
OWN_OF_PARENT = {"x-parent-session-id": "x-session-id", "x-codex-parent-thread-id": "thread-id"}
"""opencode's and Codex's: a sub-agent has an id of its own, and names the session or thread that started it."""
UNFIT = re.compile(r"[^A-Za-z0-9._-]+")
LONGEST_NAME = 64


def agent_of_headers(headers: Mapping[str, str]) -> str:
    """The name of a sub-agent; `main` for anybody else."""
    names = [headers.get(AGENT_ID), *(headers.get(own) for parent, own in OWN_OF_PARENT.items() if headers.get(parent))]
    name = next(filter(None, names), "")
    return UNFIT.sub("-", name)[:LONGEST_NAME] or MAIN
