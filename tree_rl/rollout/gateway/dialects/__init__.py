"""How model families write reasoning and tool calls, and how a turn of theirs is read."""
