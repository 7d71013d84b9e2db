"""Turns with reasoning and calls that a scripted model writes to clients of every protocol."""

from collections.abc import Callable, Sequence

CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
LS = CALL % ("shell", '{"command":  "ls -l"}')
THOUGHT = "<think>\n\nlook around \n</think>\n\n"
TURNS = (THOUGHT + "I look.\n" + LS + LS, LS, "<think>\nhm\n</think>\nso " + LS, "Done.")


def by_turn(turns: Sequence[str]) -> Callable[[str], str]:
    """Writes one turn after another."""
    return lambda prompt: turns[prompt.count("<|im_start|>assistant") - 1]
