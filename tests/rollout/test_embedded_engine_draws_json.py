"""`json_schema` in the embedded engine: its draws satisfy the schema, with the log-probs of the constrained draw."""

import asyncio
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from gateway_harness import build_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from verl.workers.config import HFModelConfig, RolloutConfig

from tree_rl.verl_plugin.embedded_rollout.decode import DecodeEngine, Request
from tree_rl.verl_plugin.embedded_rollout.guided.json_constraint import JsonSchemas
from tree_rl.verl_plugin.embedded_rollout.hf_options import HFRolloutOptions
from tree_rl.verl_plugin.embedded_rollout.sampling import Sampling
from tree_rl.verl_plugin.embedded_rollout.server import HFServer

llguidance = pytest.importorskip("llguidance")

ROOT = Path(__file__).parents[2]
TIGHT = {"x-guidance": {"whitespace_flexible": False}}
"""llguidance then writes `{"a":1}`: random weights draw as much white space as they may."""
POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": -9, "maximum": 9},
        "ï": {"enum": ["é", '"\\', "\U0001f600", None]},
    },
    "required": ["x", "ï"],
    "additionalProperties": False,
}
HOSTILE: Mapping[str, dict[str, Any]] = {
    "nested": {
        "type": "object",
        "properties": {"points": {"type": "array", "items": POINT, "minItems": 1, "maxItems": 2}, "in": POINT},
        "required": ["points", "in"],
        "additionalProperties": False,
    },
    "enum": {"enum": ["forest", "for", "forêt", "", 12, 1, True, None, ["a", {"b": 1}]]},
    "any of": {"anyOf": [POINT, {"type": "boolean"}, {"type": "array", "items": {"const": "tree"}, "maxItems": 3}]},
    "references": {
        "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
        "type": "object",
        "properties": {"root": {"$ref": "#/$defs/tree"}},
        "required": ["root"],
        "additionalProperties": False,
    },
    "text": {"type": "string", "minLength": 1, "maxLength": 12},
    "pattern": {"type": "string", "pattern": "^[a-cé]{2,5}-[0-9]{3}$"},
    "number": {"type": "number", "minimum": 0, "maximum": 2},
}


@pytest.fixture(scope="module")
def swe() -> SimpleNamespace:
    """The recipes' tiny tokenizer and a model for it."""
    paths = [str(ROOT / "recipes"), str(ROOT / "recipes" / "swe_tasks")]
    sys.path[:0] = paths
    try:
        import tiny_swe_model

        tokenizer = tiny_swe_model.build_swe_tokenizer()
    finally:
        del sys.path[:2]
        for name in ("tiny_swe_model", "tiny_model", "generate"):
            sys.modules.pop(name, None)
    return SimpleNamespace(tokenizer=tokenizer, model=build_model(tokenizer))


def engine_of(model: Any) -> DecodeEngine:
    return DecodeEngine(model, capacity_tokens=700, kv_cache_bytes=1 << 26, seed=3)


def ends_of(tokenizer: Any) -> frozenset[int]:
    """The tokenizer's own, and another special token."""
    return frozenset(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))


def draw(engine: DecodeEngine, requests: Sequence[Request]) -> None:
    while not engine.is_idle:
        engine.step()
    assert all(request.finish_reason in ("stop", "length") for request in requests)


def ask(engine: DecodeEngine, one: SimpleNamespace, schema: Any, **options: Any) -> Request:
    ends = ends_of(one.tokenizer)
    vocabulary = engine.model.get_input_embeddings().weight.shape[0]
    constraint = JsonSchemas(one.tokenizer, vocabulary=vocabulary).constraint(schema, end_token_ids=ends)
    sampling = Sampling(**{"max_tokens": 400, "stop_token_ids": ends, **options})
    return engine.request([5, 9, 200, 7], sampling, constraint)


def check(one: SimpleNamespace, schema: Any, request: Request) -> Any:
    """A whole answer, decoded and validated."""
    assert request.finish_reason == "stop" and request.token_ids[-1] in ends_of(one.tokenizer)
    text = one.tokenizer.decode(request.token_ids[:-1])
    assert one.tokenizer.decode(request.token_ids[:-1], skip_special_tokens=True) == text
    jsonschema.validate(json.loads(text), schema)
    return json.loads(text)


def scores_of(model: Any, request: Request) -> torch.Tensor:
    """The trainer's logits [T, V] in front of each drawn token, from one forward over the whole row."""
    with torch.no_grad():
        logits = model(torch.tensor([request.prompt_ids + request.token_ids])).logits[0].float()
    return logits[len(request.prompt_ids) - 1 : -1]


def check_log_probs(model: Any, request: Request, allowed_TV: np.ndarray, temperature: float = 1.0) -> None:
    """Each is the log-softmax of the trainer's logits over the allowed tokens alone."""
    scores = scores_of(model, request).masked_fill(~torch.from_numpy(allowed_TV), float("-inf")) / temperature
    expected = torch.log_softmax(scores, dim=-1).gather(1, torch.tensor(request.token_ids)[:, None])[:, 0]
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(torch.tensor(request.log_probs), expected, atol=1e-5, rtol=0)


def allowed_by_trial(one: SimpleNamespace, schema: Any, request: Request, vocabulary: int) -> np.ndarray:
    """Bool [T, V]: every token of the vocabulary tried behind every beginning of the answer, without masks.

    Where the schema leaves one text, the tokenizer's spelling of it is the only one.
    """
    ends = ends_of(one.tokenizer)
    own_end = one.tokenizer.eos_token_id
    read = llguidance.hf.from_tokenizer(one.tokenizer, n_vocab=vocabulary)
    matcher = llguidance.LLMatcher(read, llguidance.LLMatcher.grammar_from_json_schema(schema))
    rows = []
    for token in request.token_ids:
        forced = matcher.compute_ff_tokens()[:1]
        tried = forced or [number for number in range(vocabulary) if number != own_end]
        fits = [number in tried and matcher.validate_tokens([number]) == 1 for number in range(vocabulary)]
        row = np.array(fits)
        row[[*ends]] = matcher.is_accepting()
        rows.append(row)
        assert token in ends or matcher.consume_token(token)
    return np.array(rows)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", HOSTILE)
def test_the_text_satisfies_the_schema_and_log_probs_are_those_of_the_constrained_draw(
    tiny: SimpleNamespace, name: str, temperature: float
) -> None:
    schema = {**HOSTILE[name], **TIGHT}
    engine = engine_of(tiny.model)
    requests = [ask(engine, tiny, schema, temperature=temperature, seed=number) for number in range(4)]
    draw(engine, requests)
    for request in requests:
        check(tiny, schema, request)
    allowed = allowed_by_trial(tiny, schema, requests[0], len(tiny.tokenizer))
    check_log_probs(tiny.model, requests[0], allowed, temperature)


def test_the_recipes_tokenizer_and_loose_white_space_draw_json_too(swe: SimpleNamespace) -> None:
    engine = engine_of(swe.model)
    requests = {name: ask(engine, swe, schema, seed=1) for name, schema in HOSTILE.items()}
    draw(engine, list(requests.values()))
    for name, request in requests.items():
        check(swe, HOSTILE[name], request)


def shared_beginning(texts: Sequence[bytes]) -> bytes:
    alike = [len(set(letters)) == 1 for letters in zip(*texts, strict=False)]
    return texts[0][: [*alike, False].index(False)]


def test_of_finitely_many_answers_only_their_beginnings_are_allowed(tiny: SimpleNamespace) -> None:
    """The allowed tokens from the answers' bytes, without llguidance; several end tokens share the end."""
    schema, ends = {**HOSTILE["enum"], **TIGHT}, ends_of(tiny.tokenizer)
    answers = [json.dumps(one, ensure_ascii=False, separators=(",", ":")).encode() for one in schema["enum"]]
    read = llguidance.hf.from_tokenizer(tiny.tokenizer)
    specials = {*tiny.tokenizer.all_special_ids, *ends}
    bytes_of = {n: read.decode_bytes([n]) for n in range(len(tiny.tokenizer)) if n not in specials}
    engine, drawn = engine_of(tiny.model), set()
    requests = [ask(engine, tiny, schema, seed=number) for number in range(24)]
    draw(engine, requests)
    for request in requests:
        rows, before = [], b""
        for token, log_prob in zip(request.token_ids, request.log_probs, strict=True):
            left = [one.removeprefix(before) for one in answers if one.startswith(before)]
            fits = [n for n, more in bytes_of.items() if more and any(one.startswith(more) for one in left)]
            fits += ends if b"" in left else []
            # One text only can follow: its usual spelling is the only one.
            forced = shared_beginning(left)
            if log_prob == 0 and forced:
                fits = tiny.tokenizer.encode(forced.decode(), add_special_tokens=False)[:1]
            rows.append(np.isin(np.arange(len(tiny.tokenizer)), fits))
            before += bytes_of.get(token, b"")
        check_log_probs(tiny.model, request, np.array(rows))
        assert before in answers
        drawn |= {before, request.token_ids[-1]}
    assert ends < drawn and len(drawn) >= 6, "the draws differ, and end with both end tokens"


def test_rows_without_a_schema_draw_what_they_draw_alone(tiny: SimpleNamespace) -> None:
    def free(engine: DecodeEngine) -> Request:
        sampling = Sampling(max_tokens=30, stop_token_ids=ends_of(tiny.tokenizer), seed=4)
        return engine.request([5, 9, 11], sampling)

    alone, together = engine_of(tiny.model), engine_of(tiny.model)
    first, second = free(alone), free(together)
    other = ask(together, tiny, HOSTILE["nested"], seed=2)
    draw(alone, [first])
    draw(together, [second, other])
    assert first.token_ids == second.token_ids
    assert np.allclose(first.log_probs, second.log_probs, atol=1e-5)


def test_a_limit_cuts_the_json_and_the_rest_continues_it(tiny: SimpleNamespace) -> None:
    engine = engine_of(tiny.model)
    request = ask(engine, tiny, {**HOSTILE["nested"], **TIGHT}, seed=2, max_tokens=9)
    draw(engine, [request])
    assert request.finish_reason == "length" and len(request.token_ids) == 9
    with pytest.raises(json.JSONDecodeError):
        json.loads(tiny.tokenizer.decode(request.token_ids))


def test_greedy_draws_and_filters_stay_within_the_schema(tiny: SimpleNamespace) -> None:
    engine = engine_of(tiny.model)
    schema = {**HOSTILE["nested"], **TIGHT}
    options: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.05}, {"raw_log_probs": True}]
    requests = [ask(engine, tiny, schema, seed=1, **one) for one in options]
    draw(engine, requests)
    for request in requests:
        check(tiny, schema, request)


def test_padding_of_the_vocabulary_is_never_drawn(tiny: SimpleNamespace) -> None:
    padded = build_model(Padded(tiny.tokenizer))  # type: ignore[arg-type]
    engine = engine_of(padded)
    requests = [ask(engine, tiny, {**HOSTILE["text"], **TIGHT}, seed=number) for number in range(6)]
    draw(engine, requests)
    for request in requests:
        check(tiny, HOSTILE["text"], request)


class Padded:
    """A tokenizer for whose model the vocabulary is rounded up."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.eos_token_id = tokenizer.eos_token_id
        self._count = len(tokenizer)

    def __len__(self) -> int:
        return self._count + 101


LEAVES = st.one_of(
    st.builds(
        lambda values: {"enum": values}, st.lists(st.text(max_size=4) | st.integers(-5, 5) | st.none(), min_size=1)
    ),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-99, 99),
        st.integers(0, 50),
    ),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 5)),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"$ref": "#/$defs/Leaf%20%C3%A9"}]),
)


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(st.text(min_size=1, max_size=5), values, max_size=3)
    return named.flatmap(
        lambda properties: st.sets(st.sampled_from(sorted(properties)) if properties else st.nothing()).map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": sorted(required),
                "additionalProperties": False,
            }
        )
    )


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3)),
        st.builds(lambda choices: {"anyOf": choices}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)


@given(schema=SCHEMAS, seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_whatever_the_schema_asks_the_text_satisfies_it(tiny: SimpleNamespace, schema: Any, seed: int) -> None:
    whole = {**schema, **TIGHT, "$defs": {"Leaf é": {"enum": ["#", 0]}}}
    engine = engine_of(tiny.model)
    request = ask(engine, tiny, whole, seed=seed)
    draw(engine, [request])
    check(tiny, whole, request)


REFUSED: Mapping[str, dict[str, Any]] = {
    "uniqueItems": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
    "not": {"not": {"type": "string"}},
    "oneOf": {"oneOf": [{"type": "string"}, {"enum": ["a"]}]},
    "pattern": {"type": "string", "pattern": "^(?=a)b"},
    "format|nonsense": {"type": "string", "format": "nonsense"},
    "/\\$defs/x": {"$ref": "#/$defs/x"},
    "schema is false": {"anyOf": [False]},
    "Invalid type: wood": {"type": "wood"},
}


@pytest.mark.parametrize("keyword", REFUSED)
def test_a_schema_that_cannot_be_enforced_is_refused_by_its_keyword(tiny: SimpleNamespace, keyword: str) -> None:
    with pytest.raises(ValueError, match=f"json_schema: .*{keyword}"):
        ask(engine_of(tiny.model), tiny, REFUSED[keyword])


def test_a_tokenizer_that_cannot_spell_the_schema_is_refused() -> None:
    def schemas(model: Any, decoder: Any) -> JsonSchemas:
        words = Tokenizer(model)
        words.decoder = decoder
        return JsonSchemas(PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<e>"), vocabulary=5)

    ends = frozenset({2})
    letters = {"a": 0, "[": 1, "<e>": 2}
    few = schemas(models.BPE(vocab=letters, merges=[]), decoders.ByteLevel())
    constraint = few.constraint({"type": "array"}, end_token_ids=ends)
    assert np.flatnonzero(constraint.allowed()).tolist() == [1] and not constraint.fault
    constraint = few.constraint({"type": "object"}, end_token_ids=ends)
    assert np.flatnonzero(constraint.allowed()).tolist() == [2]
    assert constraint.fault == "no token can follow: NoExtensionBias"
    with pytest.raises(ValueError, match="this tokenizer cannot be constrained"):
        schemas(models.WordLevel(letters, unk_token="a"), None).constraint({"type": "object"}, end_token_ids=ends)
    with pytest.raises(ValueError, match="expected an end token, received ignore_eos=True"):
        few.constraint({"type": "object"}, end_token_ids=frozenset())


def server_of(tiny: SimpleNamespace, path: Path, **rollout: Any) -> HFServer:
    tiny.model.save_pretrained(path)
    tiny.tokenizer.save_pretrained(path)
    config = RolloutConfig(
        name="hf", tensor_model_parallel_size=1, prompt_length=100, response_length=300, dtype="float32", **rollout
    )
    model = HFModelConfig(path=str(path), override_config={"attn_implementation": "sdpa"})
    return HFServer(config, model, replica_rank=0, num_threads=1, weights_follow=False)


def test_an_answer_that_was_aborted_goes_on_within_its_json(tiny: SimpleNamespace, tmp_path: Path) -> None:
    server = server_of(tiny, tmp_path)
    params = {"temperature": 1.0, "logprobs": True, "json_schema": {**HOSTILE["nested"], **TIGHT}}

    async def run() -> Any:
        prompt, answer = [5, 9, 11], []
        for number in range(100):
            more = {"max_tokens": 3, "seed": number, "json_from": len(prompt)}
            part = await server.generate([*prompt, *answer], {**params, **more}, "id")
            answer += part.token_ids
            if part.extra_fields["finish_reason"] == "stop":
                break
        with pytest.raises(ValueError, match="begin no JSON of this schema"):
            await server.generate([*prompt, 300], {**params, "json_from": len(prompt)}, "id")
        return answer

    answer = asyncio.run(run())
    assert len(answer) > 9
    jsonschema.validate(json.loads(tiny.tokenizer.decode(answer[:-1])), HOSTILE["nested"])


def test_a_fault_ends_its_own_request_alone(tiny: SimpleNamespace, tmp_path: Path) -> None:
    server = server_of(tiny, tmp_path)
    constraint: Callable[..., Any] = server._schemas.constraint

    def faulty(*args: Any, **options: Any) -> Any:
        made = constraint(*args, **options)
        made.take(tiny.tokenizer.encode("}")[0])
        return made

    server._schemas.constraint = faulty  # type: ignore[method-assign]

    async def run() -> list[Any]:
        asked = [{"json_schema": {"type": "object"}, "temperature": 1.0}, {"temperature": 1.0, "max_tokens": 8}]
        calls = [server.generate([5, 6], one, str(number)) for number, one in enumerate(asked)]
        return await asyncio.gather(*calls, return_exceptions=True)

    failed, other = asyncio.run(run())
    assert isinstance(failed, ValueError) and str(failed).startswith("json_schema: ") and "\n" not in str(failed)
    assert other.stop_reason == "completed" and len(other.token_ids) >= 1


def test_without_the_package_enforce_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def config(json_output: str) -> RolloutConfig:
        gateway = {"gateway_agent": {"agent": "a.B", "gateway": {"json_output": json_output}}}
        return RolloutConfig(name="hf", tensor_model_parallel_size=1, custom=gateway)

    HFRolloutOptions.from_rollout(config("enforce"))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llguidance" else find(name))
    with pytest.raises(ValueError, match=r"json_output=enforce .*needs llguidance: pip install 'tree_rl\[guided\]'"):
        HFRolloutOptions.from_rollout(config("enforce"))
    HFRolloutOptions.from_rollout(config("instruct"))
