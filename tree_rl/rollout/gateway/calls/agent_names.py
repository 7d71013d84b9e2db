"""Names the agent that makes a call, by headers that harnesses send."""

import re
from collections.abc import Mapping

MAIN = "main"
AGENT_ID = "x-claude-code-agent-id"
"""Header of Claude Code's sub-agents."""
SESSION_ID, PARENT_SESSION_ID = "x-session-id", "x-parent-session-id"
"""Headers of opencode: a sub-agent has its own session id, and names the session that started it."""
THREAD_ID, PARENT_THREAD_ID = "thread-id", "x-codex-parent-thread-id"
"""Headers of Codex: the same for threads."""
UNFIT = re.compile(r"[^A-Za-z0-9._-]+")
LONGEST_NAME = 64


def agent_of_headers(headers: Mapping[str, str]) -> str:
    """The name of the sub-agent that makes a call; `main` if it is none."""
    name = headers.get(AGENT_ID) or ""
    for own, parent in ((SESSION_ID, PARENT_SESSION_ID), (THREAD_ID, PARENT_THREAD_ID)):
        if not name and headers.get(parent):
            name = headers.get(own) or ""
    return UNFIT.sub("-", name)[:LONGEST_NAME] or MAIN
