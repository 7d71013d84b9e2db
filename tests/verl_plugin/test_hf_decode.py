"""The embedded engine against `transformers.generate` and a full forward; draws are from what it reports."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from dense_models import FAMILIES
from latent_models import latent_configs
from tiny_sizes import VOCAB
from transformers import AutoModelForCausalLM

from tree_rl.verl_plugin.embedded_rollout.decode import DecodeEngine, Request
from tree_rl.verl_plugin.embedded_rollout.grouped_attention import GROUPED_SDPA
from tree_rl.verl_plugin.embedded_rollout.sampling import Sampling, sample
from tree_rl.verl_plugin.embedded_rollout.server import needs_eager

KINDS = ("qwen3", "mistral_window", "gemma2_softcap", "gpt_oss_sinks")
CONFIGS = {kind: FAMILIES[kind] for kind in KINDS} | {"latent_attention": latent_configs()["deepseek_v3"]}


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = CONFIGS[name]
    attention = "eager" if needs_eager(config) else GROUPED_SDPA
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model


def prompts(lengths: list[int], seed: int = 1) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, size=length).tolist() for length in lengths]


def reference_of(model: torch.nn.Module) -> torch.nn.Module:
    """The same weights under a stock attention implementation."""
    stock = "eager" if needs_eager(model.config) else "sdpa"
    reference = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), attn_implementation=stock).eval()
    reference.load_state_dict(model.state_dict())
    return reference


def qwen3_engine() -> DecodeEngine:
    return DecodeEngine(build("qwen3"), capacity_tokens=96)


def run_to_end(engine: DecodeEngine) -> None:
    while not engine.is_idle:
        engine.step()


def played(engine: DecodeEngine, ids: list[list[int]], **sampling: Any) -> list[Request]:
    requests = [engine.request(one, Sampling(**{"temperature": 1.0, **sampling})) for one in ids]
    run_to_end(engine)
    return requests


def assert_log_probs_of_a_full_forward(model: torch.nn.Module, request: Request, temperature: float = 1.0) -> None:
    ids = torch.tensor([request.prompt_ids + request.token_ids])
    with torch.no_grad():
        logits = reference_of(model)(input_ids=ids).logits[0].float() / temperature
    first = len(request.prompt_ids)
    expected = torch.log_softmax(logits[first - 1 : -1], -1).gather(1, ids[0, first:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(request.log_probs), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_greedy_equals_generate_and_log_probs_equal_a_full_forward(name: str) -> None:
    model = build(name)
    engine = DecodeEngine(model, capacity_tokens=96)
    greedy = {"max_tokens": 20, "temperature": 0.0, "stop_token_ids": frozenset({1})}
    requests = [engine.request(ids, Sampling(**greedy)) for ids in prompts([1, 17, 5, 33, 2])]
    for _ in range(4):
        engine.step()
    requests += played(engine, prompts([9, 40], seed=2), **greedy)
    reference = reference_of(model)
    for request in requests:
        asked = {"attention_mask": torch.ones(1, len(request.prompt_ids)), "max_new_tokens": 20, "do_sample": False}
        expected = reference.generate(torch.tensor([request.prompt_ids]), eos_token_id=1, pad_token_id=0, **asked)
        assert request.token_ids == expected[0, len(request.prompt_ids) :].tolist()
        assert_log_probs_of_a_full_forward(model, request)


def test_a_prompt_that_continues_a_finished_session_reuses_its_keys_and_values() -> None:
    engine, history = qwen3_engine(), prompts([20])[0]
    for turn in range(4):
        (request,) = played(engine, [history], max_tokens=10)
        # All but the observation and the last sampled token, which has not been run before.
        assert request.cached_tokens == (len(history) - 4 if turn else 0)
        assert_log_probs_of_a_full_forward(engine.model, request)
        history = history + request.token_ids + prompts([3], seed=turn)[0]


def test_simultaneous_requests_of_one_prompt_prefill_it_once_and_have_log_probs_at_their_temperature() -> None:
    engine = qwen3_engine()
    requests = played(engine, prompts([50]) * 6, max_tokens=8, temperature=1.3)
    assert sorted(request.cached_tokens for request in requests) == [0, 49, 49, 49, 49, 49]
    for request in requests:
        assert request.finish_reason == "length" and len(request.token_ids) == 8
        assert_log_probs_of_a_full_forward(engine.model, request, 1.3)
    assert len({tuple(request.token_ids) for request in requests}) > 1


def test_results_do_not_depend_on_how_few_slots_there_are() -> None:
    model = build("qwen3")
    per_slot = 2 * 2 * 2 * 8 * 4 * 97
    shared = prompts([12])[0]
    ids = [shared + tail for tail in prompts([3, 9, 1, 22, 5, 2, 14])] + prompts([30, 2], seed=5)
    outputs = []
    for slots in (1, 3, 64):
        engine = DecodeEngine(model, capacity_tokens=96, kv_cache_bytes=slots * per_slot)
        assert engine.cache.num_slots == slots
        requests = [engine.request(p, Sampling(max_tokens=4 + 3 * i, temperature=0.0)) for i, p in enumerate(ids)]
        run_to_end(engine)
        outputs.append([request.token_ids for request in requests])
    assert outputs[0] == outputs[1] == outputs[2]


def test_new_weights_invalidate_reusable_prefixes() -> None:
    engine, ids = qwen3_engine(), prompts([20])
    played(engine, ids, max_tokens=4)
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.mul_(1.1)
    engine.forget_prefixes()
    (request,) = played(engine, ids, max_tokens=8)
    assert request.cached_tokens == 0
    assert_log_probs_of_a_full_forward(engine.model, request)


def test_abort_returns_the_tokens_so_far_and_the_engine_goes_on() -> None:
    engine, endless = qwen3_engine(), Sampling(max_tokens=50, temperature=1.0)
    running = engine.request(prompts([4])[0], endless)
    for _ in range(3):
        engine.step()
    waiting = engine.request(prompts([4])[0], endless)
    assert engine.abort_all() == [running, waiting]
    assert (running.finish_reason, len(running.token_ids), waiting.token_ids) == ("abort", 4, [])
    (again,) = played(engine, [running.prompt_ids + running.token_ids], max_tokens=5)
    assert again.cached_tokens == len(running.prompt_ids) + 3
    assert_log_probs_of_a_full_forward(engine.model, again)


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([], "empty prompt"),
        ([3, VOCAB], rf"token id {VOCAB}: expected ids in \[0, {VOCAB}\)"),
        ([3] * 96, "prompt of 96 tokens leaves no room in a context of 96"),
    ],
)
def test_bad_prompts_are_refused_by_name(ids: list[int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        qwen3_engine().request(ids, Sampling(max_tokens=4))


LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, -30.0, float("-inf")])


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"temperature": 0.5}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 1.0, "top_p": 0.8}, [0, 1]),
        ({"temperature": 2.0, "top_p": 0.9, "top_k": 3}, [0, 1, 2]),
        ({"temperature": 1.0, "top_p": 1e-6}, [0]),
    ],
)
def test_frequencies_match_the_reported_log_probs(options: dict[str, float], kept: list[int]) -> None:
    many, generator = 20_000, torch.Generator().manual_seed(7)
    drawn = sample(LOGITS.expand(many, -1).clone(), [Sampling(max_tokens=1, **options)] * many, [generator] * many)
    tokens, log_probs = map(torch.tensor, drawn)
    scaled, expected = LOGITS / options["temperature"], torch.zeros(6)
    expected[kept] = torch.softmax(scaled[kept], 0)
    counts = torch.bincount(tokens, minlength=6) / len(tokens)
    torch.testing.assert_close(counts, expected, atol=0.012, rtol=0)
    torch.testing.assert_close(log_probs.exp(), expected[tokens], atol=1e-6, rtol=1e-5)


def test_each_row_of_a_batch_is_drawn_and_reported_as_it_asks() -> None:
    """Greedy rows report temperature one, rows that ask for raw log-probs neither temperature nor filters."""
    greedy, best = Sampling(max_tokens=1, temperature=0.0, top_p=0.5), Sampling(max_tokens=1, top_k=1)
    raw = Sampling(max_tokens=1, temperature=0.5, top_k=2, raw_log_probs=True)
    generators = [torch.Generator().manual_seed(i) for i in range(52)]
    tokens, log_probs = sample(LOGITS.expand(52, -1).clone(), [greedy, best, *[raw] * 50], generators)
    assert tokens[:2] == [0, 0] and set(tokens[2:]) == {0, 1}
    expected = torch.log_softmax(LOGITS, 0)[tokens]
    expected[1] = 0.0
    torch.testing.assert_close(torch.tensor(log_probs), expected)


def test_a_seed_decides_the_draw_whatever_shares_the_batch() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    seeded = Sampling(max_tokens=1, seed=5)
    alone = sample(logits, [seeded], [torch.Generator().manual_seed(5)])
    samplings = [Sampling(max_tokens=1), seeded, Sampling(max_tokens=1)]
    batch = sample(logits.expand(3, -1).clone(), samplings, [torch.Generator().manual_seed(one) for one in (1, 5, 2)])
    assert batch[0][1] == alone[0][0]
