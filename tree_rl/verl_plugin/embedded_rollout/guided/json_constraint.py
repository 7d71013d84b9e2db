"""JSON of a schema: the tokens that may come next. llguidance reads the schemas, as it does for vLLM and SGLang.

Shapes: R rows, V vocabulary of the model, which may be larger than the tokenizer's.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

REMEDY = "pip install 'tree_rl[guided]'"


class JsonConstraint:
    """What one answer may still become.

    Args:
        matcher: of the schema, behind the tokens that are drawn.
        vocabulary: V.
        own_end: the end token that the matcher knows.
        end_token_ids: those that end the answer. They may come wherever the JSON may end.
    """

    def __init__(self, matcher: "LLMatcher", *, vocabulary: int, own_end: int, end_token_ids: frozenset[int]) -> None:
        self.fault = ""
        """Why the schema cannot be followed any further. From then on end tokens alone are allowed."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._own_end = own_end
        self._end_token_ids = end_token_ids

    def allowed(self) -> np.ndarray:
        """Bool [V]: the tokens that may come next. At least one may."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed_V = np.unpackbits(bits, count=self._vocabulary, bitorder="little").astype(bool)
        allowed_V[self._own_end : self._own_end + 1] = False
        may_end = self._matcher.is_accepting()
        if self._matcher.is_error():
            self.fault = f"no token can follow: {one_line(self._matcher.get_error())}"
            allowed_V[:] = False
        allowed_V[[*self._end_token_ids]] = may_end or bool(self.fault)
        return allowed_V

    def take(self, token: int) -> None:
        """Go on behind a drawn token."""
        if token not in self._end_token_ids:
            self._matcher.consume_token(token)


class JsonSchemas:
    """Reads schemas for one tokenizer and model."""

    def __init__(self, tokenizer: Any, *, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary

    def constraint(
        self, schema: Mapping[str, Any], *, end_token_ids: frozenset[int], begun: Sequence[int] = ()
    ) -> JsonConstraint:
        """Constrain an answer. Takes milliseconds; the first time up to a second, for the vocabulary.

        Args:
            end_token_ids: those that end the answer.
            begun: the answer's tokens that are drawn already.

        Raises:
            ValueError: the schema asks for what cannot be enforced (the message names it), nothing satisfies it, there
                is no end token, or llguidance is missing or cannot read the tokenizer.
        """
        refuse_without_package()
        from llguidance import LLMatcher

        if not end_token_ids:
            raise ValueError("json_schema: expected an end token, received ignore_eos=True")
        grammar = LLMatcher.grammar_from_json_schema(dict(schema))
        matcher = LLMatcher(self._read_tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"json_schema: {one_line(matcher.get_error())}")
        if begun and not matcher.consume_tokens(list(begun)):
            raise ValueError("json_schema: the tokens that are drawn already begin no JSON of this schema")
        own_end = self._read_tokenizer.eos_token
        return JsonConstraint(matcher, vocabulary=self._vocabulary, own_end=own_end, end_token_ids=end_token_ids)

    @cached_property
    def _read_tokenizer(self) -> "LLTokenizer":
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(self._tokenizer, n_vocab=max(self._vocabulary, len(self._tokenizer)))
        except ValueError as error:
            raise ValueError(f"json_schema: this tokenizer cannot be constrained: {error}") from error


def constrained(logits_RV: torch.Tensor, constraints: Sequence[JsonConstraint | None]) -> torch.Tensor:
    """Logits [R, V] with minus infinity where a row's constraint forbids a token; None leaves a row as it is."""
    if not any(constraints):
        return logits_RV
    allowed_RV = np.ones(logits_RV.shape, dtype=bool)
    for row, constraint in enumerate(constraints):
        if constraint is not None:
            allowed_RV[row] = constraint.allowed()
    return logits_RV.masked_fill(~torch.from_numpy(allowed_RV).to(logits_RV.device), float("-inf"))


def refuse_without_package() -> None:
    """Raise `ValueError` if llguidance is not installed."""
    if importlib.util.find_spec("llguidance") is None:
        raise ValueError(
            f"gateway.json_output=enforce with rollout.name=hf needs llguidance: {REMEDY}, or choose instruct"
        )


def one_line(text: str) -> str:
    """What an error of llguidance says, without the state of its parser, and with the keyword that it is about."""
    return " ".join(text.partition("<state>")[0].split()).replace("regex parse error", "pattern")
