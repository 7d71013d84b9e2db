"""A model that plays a script in any family's dialect, and an independent ledger of what it generated.

Its tokens are misspelt: no tokenizer would choose them for their text. A record that tokenizes text cannot be right.
"""

import json
import random
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tree_rl.rollout.gateway.backend import Generation
from tree_rl.rollout.gateway.session import RecordedSession
from tree_rl.rollout.transcript import rows_of_calls

ROOT = Path(__file__).parents[2]
HERMES = ROOT / "tests" / "rollout" / "reasoning_chat.jinja"
MARK = re.compile(
    r"<\|[\w/]+\|>|<｜[^｜\n]{1,40}｜>|\[/?[A-Z_]{4,}\]|</?(?:think|tool_call|tool_response|arg_key|arg_value)>"
)
"""What templates of families use as control tokens."""
START = "<|start of text|>"
CALL_ID = "call00001"
"""Nine letters and digits, as Mistral's template wants."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialect:
    """A family: its chat template, and how its turns end."""

    name: str
    tokenizer: PreTrainedTokenizerFast
    call_end: str
    """Token behind a turn with a call."""
    answer_end: str
    """Token behind any other turn."""

    @classmethod
    def of(cls, name: str, template: str, *ends: str) -> "Dialect":
        """A family with a byte-level tokenizer of some hundred merges.

        Args:
            template: chat template; its control tokens are those of the tokenizer.
            ends: the end token, and the tokens behind a call and an answer where they are others.
        """
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
        backend.train_from_iterator([(ROOT / "LICENSE").read_text(), template] * 5, trainer)
        marks = dict.fromkeys([*ends, START, *MARK.findall(template)])
        backend.add_tokens([AddedToken(mark, normalized=False, special=mark in (START, *ends)) for mark in marks])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=ends[0], bos_token=START)
        tokenizer.chat_template = template
        call_end, answer_end = (ends[1], ends[-1]) if len(ends) > 1 else (ends[0], ends[0])
        return cls(name=name, tokenizer=tokenizer, call_end=call_end, answer_end=answer_end)

    def writes(self, content: str, call: tuple[str, Mapping[str, Any]] | None = None) -> str:
        """A turn as the family's own template renders it, and its end."""
        end = self.answer_end if call is None else self.call_end
        said = {"role": "assistant", "content": content}
        if call is None:
            return self._rendered(said).rsplit(end, 1)[0] + end
        error: Exception | None = None
        for arguments in (dict(call[1]), json.dumps(call[1])):
            function = {"name": call[0], "arguments": arguments}
            try:
                said_in_full = {**said, "tool_calls": [{"id": CALL_ID, "type": "function", "function": function}]}
                return self._rendered(said_in_full).rsplit(end, 1)[0] + end
            except (TypeError, ValueError, TemplateError) as raised:
                error = raised
        raise ValueError(f"the template of {self.name} renders no call") from error

    def _rendered(self, message: dict[str, Any]) -> str:
        """What the template writes for an answer behind what it writes to ask for one."""
        question = [{"role": "user", "content": "x"}]
        asked = self.tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        whole: str = self.tokenizer.apply_chat_template([*question, message], tokenize=False)
        # Some templates begin a thought in the prompt, and leave an empty one in the history.
        alike = zip(asked, whole, strict=False)
        shared = next((place for place, (one, other) in enumerate(alike) if one != other), len(asked))
        return whole[shared:]


@dataclass(kw_only=True, slots=True)
class ScriptedModel:
    """Plays the turns of a script in calls that show the tool, and answers all others with a title."""

    dialect: Dialect
    tool: str
    """A call is of the script if its prompt holds this."""
    turns: Sequence[str]
    ledger: Counter[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]] = field(default_factory=Counter)
    """Prompt, ids and log-probs of each generated call."""
    played: int = 0
    prompts: list[int] = field(default_factory=list)
    """Length of each prompt, in characters."""

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, Any], session: str
    ) -> Generation:
        """Play."""
        tokenizer = self.dialect.tokenizer
        prompt = tokenizer.decode(list(prompt_ids))
        self.prompts.append(len(prompt))
        text = self.dialect.writes("A title")
        if self.tool in prompt:
            text = behind(prompt, self.turns[min(self.played, len(self.turns) - 1)])
            self.played += 1
        ids = tuple(misspelt(tokenizer, text, seed=len(self.prompts)))[:max_tokens]
        log_probs = log_probs_of(prompt_ids, ids)
        self.ledger[tuple(prompt_ids), ids, log_probs] += 1
        return Generation(token_ids=ids, log_probs=log_probs, finish_reason="stop")


def log_probs_of(prompt_ids: Sequence[int], ids: Sequence[int]) -> tuple[float, ...]:
    """A number for each token that follows from all tokens up to it, as a model's does."""
    state, found = 0, []
    for place, token in enumerate([*prompt_ids, *ids]):
        state = zlib.crc32(token.to_bytes(4, "little"), state)
        if place >= len(prompt_ids):
            found.append(-(state + 1) / 2**32)
    return tuple(found)


def misspelt(tokenizer: PreTrainedTokenizerFast, text: str, seed: int) -> list[int]:
    """Ids of a text, half of its words in pieces."""
    drawn, added, pieces = random.Random(seed), set(tokenizer.added_tokens_decoder), list[int]()
    for token in tokenizer.encode(text, add_special_tokens=False):
        letters = list(tokenizer.convert_ids_to_tokens(token))
        split = token not in added and drawn.random() < 0.5
        pieces += tokenizer.convert_tokens_to_ids(letters) if split else [token]
    return pieces


def behind(prompt: str, turn: str) -> str:
    """What a turn adds to a prompt that begins its call, as a forced `tool_choice` does under Hermes' template."""
    call = turn[max(0, turn.find("<tool_call>")) :]
    for begun in ('{"name":', '"arguments":'):
        if prompt.endswith(begun) and begun in call:
            return call.split(begun, 1)[1]
    return turn


def prefixes(known: dict[tuple[int, int], int], tokens: Sequence[int]) -> list[int]:
    """Number of each prefix that ends with a token, added to those that are known; equal prefixes have one number."""
    number, passed = 0, []
    for token in tokens:
        number = known.setdefault((number, token), len(known) + 1)
        passed.append(number)
    return passed


def differences(model: ScriptedModel, record: RecordedSession) -> int:
    """Calls, tokens and log-probs that differ between the ledger and the record or its rows."""
    recorded = Counter((call.prompt_ids, call.response_ids, call.log_probs or ()) for call in record.calls)
    wrong = ((model.ledger - recorded) + (recorded - model.ledger)).total()
    known: dict[tuple[int, int], int] = {}
    generated: set[tuple[int, float]] = set()
    for prompt, ids, log_probs in model.ledger:
        generated |= set(zip(prefixes(known, (*prompt, *ids))[len(prompt) :], log_probs, strict=True))
    trained: set[tuple[int, float]] = set()
    for row in rows_of_calls(record.calls):
        passed = prefixes(known, row.token_ids)[len(row.prompt_ids) :]
        drawn = zip(passed, row.response_log_probs, row.response_mask, strict=True)
        trained |= {(number, log_prob) for number, log_prob, mask in drawn if mask}
    return wrong + len(generated ^ trained)
