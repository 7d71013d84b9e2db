"""Roles of messages, and the names that data sets and libraries give them."""

import re

USER, ASSISTANT, SYSTEM, TOOL = "user", "assistant", "system", "tool"
CALLS = "function_call"
"""ShareGPT's role for a turn of the model whose text is a tool call."""
SPELLINGS = {
    USER: ("user", "human", "humanmessage"),
    ASSISTANT: ("assistant", "bot", "chatbot", "model", "ai", "llm", "agent", "claude", "bard", "bing", "aimessage"),
    SYSTEM: ("system", "systemmessage"),
    TOOL: (
        *("tool", "function", "observation", "ipython", "toolmessage", "tool_result", "tool_response", "tool_output"),
        *("function_result", "function_response", "function_output", "function_call_output"),
    ),
    CALLS: ("function_call", "tool_call", "tool_calls", "function_calls"),
}
BY_SPELLING = {spelling: role for role, spellings in SPELLINGS.items() for spelling in spellings}
GPT = re.compile(r"(chat_?)?gpt(_?[\d.]\w*)?")
UNREAD = ("exit",)
"""Roles to skip: mini-swe-agent ends a trajectory with `exit`, which no model reads."""
EXPECTED = "system, user, assistant, tool, or a name like human, gpt, bot, model, observation"


def role_named(name: str, template: str) -> str | None:
    """The template's role for a name in the file, or `CALLS`; None if neither this module nor `template` (its source)
    knows the name."""
    plain = re.sub(r"[\s-]+", "_", name.strip().casefold())
    if role := BY_SPELLING.get(plain) or (ASSISTANT if GPT.fullmatch(plain) else None):
        return role
    if f"'{name}'" in template or f'"{name}"' in template:
        return name
    return SYSTEM if plain == "developer" else None
