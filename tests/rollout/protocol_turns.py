"""Turns with reasoning and calls that a scripted model writes to clients of every protocol."""

import random
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from gateway_harness import generated_edges, misspell, trained_edges
from transformers import PreTrainedTokenizerFast

from tree_rl.rollout.gateway.backend import Generation
from tree_rl.rollout.gateway.session import RecordedSession
from tree_rl.rollout.transcript import rows_of_calls

CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
LS = CALL % ("shell", '{"command":  "ls -l"}')
THOUGHT = "<think>\n\nlook around \n</think>\n\n"
TURNS = (THOUGHT + "I look.\n" + LS + LS, LS, "<think>\nhm\n</think>\nso " + LS, "Done.")


class Ledger:
    """Writes what a script says for a prompt, in misspelt tokens with random log-probs."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, script: Callable[[str], str]) -> None:
        self.tokenizer, self.script = tokenizer, script
        self.given: list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]] = []

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, Any], session: str
    ) -> Generation:
        number = len(self.given)
        written = self.script(self.tokenizer.decode(list(prompt_ids)))
        ids = (*misspell(self.tokenizer, written, seed=number), self.tokenizer.eos_token_id)[:max_tokens]
        log_probs = tuple(-random.Random(f"{number} {place}").random() for place in range(len(ids)))
        self.given.append((tuple(prompt_ids), ids, log_probs))
        return Generation(
            token_ids=ids, log_probs=log_probs, finish_reason="stop" if len(ids) < max_tokens else "length"
        )

    def check(self, record: RecordedSession) -> None:
        """Calls and trained tokens are as they were given: none missing, added, or with another log-prob."""
        recorded = [(call.prompt_ids, call.response_ids, call.log_probs) for call in record.calls]
        assert set(recorded) == set(self.given)
        assert trained_edges(rows_of_calls(record.calls)) == generated_edges(record.calls)


def writing(tiny: SimpleNamespace, *turns: str) -> Ledger:
    """A model that writes one turn after another, and finds every token recorded as it was given."""
    return Ledger(tiny.tokenizer, lambda prompt: turns[prompt.count("<|im_start|>assistant") - 1])
