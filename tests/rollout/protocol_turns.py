"""Turns with reasoning and calls that a scripted model writes to clients of every protocol."""

from types import SimpleNamespace

from ledger import Ledger

CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
LS = CALL % ("shell", '{"command":  "ls -l"}')
THOUGHT = "<think>\n\nlook around \n</think>\n\n"
TURNS = (THOUGHT + "I look.\n" + LS + LS, LS, "<think>\nhm\n</think>\nso " + LS, "Done.")


def writing(tiny: SimpleNamespace, *turns: str) -> Ledger:
    """A model that writes one turn after another, and finds every token recorded as it was given."""
    return Ledger(tiny.tokenizer, lambda prompt: turns[prompt.count("<|im_start|>assistant") - 1])
