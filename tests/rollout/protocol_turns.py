"""Turns with reasoning and calls that a scripted model writes to clients of every protocol."""

import json
from collections.abc import Callable
from types import SimpleNamespace

from gateway_harness import TinyModel, misspell

CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
LS = CALL % ("shell", '{"command":  "ls -l"}')
THOUGHT = "<think>\n\nlook around \n</think>\n\n"
TURNS = (THOUGHT + "I look.\n" + LS + LS, LS, "<think>\nhm\n</think>\nso " + LS, "Done.")


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def shell(command: str) -> str:
    return call("shell", command=command)


def thinking(text: str, *rest: str) -> str:
    return f"<think>\n{text}\n</think>\n\n" + "\n".join(rest)


def misspelling(tiny: SimpleNamespace, script: Callable[[str], str]) -> TinyModel:
    """A model that writes what a script says for a prompt, in other tokens each time."""
    backend = tiny.backend()

    def write(prompt: str) -> list[int]:
        ids = misspell(tiny.tokenizer, script(prompt), seed=len(backend.prompts))
        return [*ids, tiny.tokenizer.eos_token_id]

    backend.script = write
    return backend


def writing(tiny: SimpleNamespace, *turns: str) -> TinyModel:
    """A model that writes one turn after another, in misspelt tokens."""
    return misspelling(tiny, lambda prompt: turns[prompt.count("<|im_start|>assistant") - 1])
