"""Who asks, from the headers that harnesses send by themselves."""

import re
from collections.abc import Mapping

MAIN = "main"
AGENT_ID = "x-claude-code-agent-id"
"""Claude Code's, for every sub-agent."""
SESSION_ID, PARENT_SESSION_ID = "x-session-id", "x-parent-session-id"
"""opencode's: a sub-agent has a session of its own, and names the one that started it."""
THREAD_ID, PARENT_THREAD_ID = "thread-id", "x-codex-parent-thread-id"
"""Codex's: the same, of threads."""
UNFIT = re.compile(r"[^A-Za-z0-9._-]+")
LONGEST_NAME = 64


def agent_of_headers(headers: Mapping[str, str]) -> str:
    """The name of a sub-agent; `main` for anybody else."""
    name = headers.get(AGENT_ID) or ""
    for own, parent in ((SESSION_ID, PARENT_SESSION_ID), (THREAD_ID, PARENT_THREAD_ID)):
        if not name and headers.get(parent):
            name = headers.get(own) or ""
    return UNFIT.sub("-", name)[:LONGEST_NAME] or MAIN
