"""R3: the experts that vLLM's tokens visited, through verl's client and the agent loops' rows, are repeated by the tree
engine, which then equals stock verl's engine on rows alone whose routers are told the same."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
import torch
from verl_server import ask, user
from vllm_harness import LOG_PROB_TOLERANCE

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(600)]

TURN_TOKENS = 30


def session(served: SimpleNamespace) -> list[Any]:
    """The official client asks through the gateway: a conversation, two answers to one question, another question, and
    one whose answer ends at a stop text, for which the gateway asks the server in slices. The first question again."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics

    from tree_rl.verl_plugin.agent_loops.session_outputs import rows_to_outputs

    async def talk(chat: openai.AsyncOpenAI, _: Any) -> None:
        async def ask_for(messages: list[Any], **options: Any) -> Any:
            answer = await chat.chat.completions.create(model="m", messages=messages, **options)
            return answer.choices[0].message.model_dump()

        opening = [user("every unique token of the forest stands once")]
        turn = [*opening, await ask_for(opening, max_tokens=TURN_TOKENS)]
        await ask_for([*turn, user("and its segments?")], max_tokens=TURN_TOKENS, n=2)
        await ask_for([*turn, user("what does a tool return?")], max_tokens=100, stop=["never said"])
        await ask_for(opening, max_tokens=TURN_TOKENS)

    record = ask(served, talk).record
    metrics = AgentLoopMetrics(generate_sequences=0.0, tool_calls=0.0, num_preempted=0)
    return rows_to_outputs(record.calls, reward=1.0, figures={}, metrics=metrics)


@pytest.fixture(scope="module")
def rollout(served_experts: SimpleNamespace) -> SimpleNamespace:
    """A session's outputs and rows, and the experts that they say its tokens visited."""
    from engine_harness import Row

    outputs = session(served_experts)
    rows = [
        Row(tokens=[*one.prompt_ids, *one.response_ids], prompt=len(one.prompt_ids), mask=list(one.response_mask))
        for one in outputs
    ]
    # As verl stores them: int16 of the whole row, zeros behind the last token that went through the model.
    routes = [one.as_dict()["routed_experts"].numpy() for one in outputs]
    return SimpleNamespace(outputs=outputs, rows=rows, routes=routes)


@pytest.fixture(scope="module")
def engines(served_experts: SimpleNamespace) -> SimpleNamespace:
    """Stock verl's engine and ours, which repeats the rollout's routes."""
    from engine_harness import build_engine
    from routed_rows import replaying

    from tree_rl.verl_plugin.options import TreeConfig

    stock = build_engine(served_experts.model, tree=None)
    tree = build_engine(served_experts.model, tree=TreeConfig(mode="tree"), **replaying("R3"))
    return SimpleNamespace(stock=stock, tree=tree)


def updated(engines: SimpleNamespace, rollout: SimpleNamespace, routes: list[np.ndarray]) -> dict[str, Any]:
    """Forward and backward of the tree engine with the given routes."""
    from equivalence import actor_loss, run
    from routed_rows import batch_with

    return run(engines.tree, batch_with(routes, rollout.rows), actor_loss("vanilla", "token-mean"))


def test_rows_carry_what_the_routers_of_the_model_choose(
    served_experts: SimpleNamespace, rollout: SimpleNamespace
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(served_experts.model, dtype=torch.float32).eval()
    tokens, equal = 0, 0
    for row, routes_TLK in zip(rollout.rows, rollout.routes, strict=True):
        assert routes_TLK.shape == (len(row.tokens), 2, 2) and routes_TLK.dtype == np.int16
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row.tokens]), output_router_logits=True).router_logits
        chosen_TLK = torch.stack([layer_TE.topk(2).indices for layer_TE in logits], dim=1).numpy()
        # The last token was never fed to the model.
        same_T = (np.sort(chosen_TLK) == np.sort(routes_TLK)).all(axis=(1, 2))[:-1]
        tokens, equal = tokens + len(same_T), equal + int(same_T.sum())
        assert not routes_TLK[-1].any()
    print(f"\n{equal} of {tokens} tokens visit the experts that transformers chooses")
    assert tokens >= 200
    # Two experts that are almost tied may swap with the order of a sum.
    assert equal >= 0.99 * tokens


def test_the_tree_repeats_them_as_stock_verl_on_rows_alone(engines: SimpleNamespace, rollout: SimpleNamespace) -> None:
    from routed_rows import assert_same, stock_run

    from tree_rl.models.routers.merge_routes import number_routes
    from tree_rl.tree import Forest

    assert len(rollout.rows) >= 3
    tokens = [np.array(row.tokens) for row in rollout.rows]
    numbers = number_routes(np.concatenate(rollout.routes))
    forest = Forest.from_rows(tokens, merge_key=np.split(numbers, np.cumsum([len(row) for row in tokens])[:-1]))
    assert forest.num_unique < 0.8 * forest.num_flat
    expected = stock_run(engines.stock, rollout.rows, rollout.routes, experts=8)
    assert_same(expected, updated(engines, rollout, rollout.routes), rollout.rows)


def test_log_probs_of_the_rollout_come_back(engines: SimpleNamespace, rollout: SimpleNamespace) -> None:
    got = updated(engines, rollout, rollout.routes)["model_output"]["log_probs"].unbind()
    differences = list[float]()
    for row, one, log_probs in zip(rollout.rows, rollout.outputs, got, strict=True):
        # Position i predicts token i + 1.
        again = log_probs[row.prompt - 1 : len(row.tokens) - 1]
        pairs = zip(row.mask, one.response_logprobs, again.tolist(), strict=True)
        differences += [abs(drawn - replayed) for mask, drawn, replayed in pairs if mask]
    print(f"\n{len(differences)} trained tokens, largest difference of log-probs {max(differences):.2e}")
    assert len(differences) >= 4 * TURN_TOKENS and max(differences) < LOG_PROB_TOLERANCE


def test_routes_of_the_token_before_give_other_log_probs(engines: SimpleNamespace, rollout: SimpleNamespace) -> None:
    right, shifted = (
        updated(engines, rollout, routes)["model_output"]["log_probs"].values()
        for routes in (rollout.routes, [np.roll(routes_TLK, 1, axis=0) for routes_TLK in rollout.routes])
    )
    assert (right - shifted).abs().max() > 100 * LOG_PROB_TOLERANCE
