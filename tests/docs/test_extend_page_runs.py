"""The files that docs/extend.md prints work as the page says."""

import asyncio
import random
import re
import runpy
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import check_train, on_this_machine
from shell_blocks import ROOT
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from verl.workers.config import FSDPActorConfig

from tree_rl.credit import CreditRow, CreditTree, Leaf, estimator_named
from tree_rl.models import use_edge_head, use_tree_attention
from tree_rl.rollout.agents.in_environment import AgentInEnvironment
from tree_rl.rollout.branching.policies import Cut, Node, SessionNodes
from tree_rl.rollout.gateway.backend import Generation
from tree_rl.rollout.gateway.gateway import Gateway
from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.transcript import rows_of_calls
from tree_rl.training import Rows, TreeOptions, TreeStep
from tree_rl.tree import Forest
from tree_rl.verl_plugin.agent_loops.agent_loop_options import read_branching
from tree_rl.verl_plugin.path_weights import custom_weights

pytestmark = pytest.mark.slow
PAGE = ROOT / "docs" / "extend.md"
PAGE_OF_ENVIRONMENTS = ROOT / "docs" / "environments.md"
TASK = {"number": 37}
MESSAGES = [{"role": "user", "content": "Guess a number between 1 and 100."}]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder with the page's files, importable."""
    folder = tmp_path_factory.mktemp("extend")
    named = re.findall(r"`(\w+)\.py`[^`]*:\n\n```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(named) == 7 == PAGE.read_text(encoding="utf-8").count("```python")
    environments = re.findall(r"```python\n(.*?)```", PAGE_OF_ENVIRONMENTS.read_text(encoding="utf-8"), re.DOTALL)
    named += [("guess", text) for text in environments if "class GuessEnvironment" in text]
    for name, text in named:
        (folder / f"{name}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder
        for name, _ in named:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    with pytest.MonkeyPatch.context() as patch:
        for path in (ROOT / "recipes", ROOT / "recipes" / "swe_tasks"):
            patch.syspath_prepend(str(path))
        from tiny_swe_model import build_swe_tokenizer

        made = build_swe_tokenizer()
        for name in ("tiny_swe_model", "generate"):
            sys.modules.pop(name, None)
    return made


class Script:
    """A model that says given words, one a call."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, words: list[str]) -> None:
        self.tokenizer, self.words = tokenizer, words

    async def generate(self, prompt_ids: Any, **asked: Any) -> Generation:
        ids = [*self.tokenizer.encode(self.words.pop(0)), self.tokenizer.eos_token_id]
        return Generation(token_ids=tuple(ids), log_probs=None, finish_reason="stop")


def play(tokenizer: PreTrainedTokenizerBase, words: list[str], **options: Any) -> tuple[Any, list[Any]]:
    """What a session earns, and its rows."""

    async def session() -> tuple[Any, list[Any]]:
        limits = GatewayOptions(max_context_tokens=2048, max_turn_tokens=32)
        async with Gateway(tokenizer=tokenizer, backend=Script(tokenizer, words), options=limits) as gateway:
            opened = gateway.open_session()
            agent = AgentInEnvironment(environment="guess.GuessEnvironment", timeout_seconds=60, **options)
            result = await agent.run(gateway.endpoint(opened), messages=MESSAGES, task=TASK)
            record = await gateway.close_session(opened)
        return result, rows_of_calls(record.calls)

    return asyncio.run(session())


def test_an_agent_with_options_plays_an_environment_by_its_key(files: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    result, rows = play(tokenizer, ["50", "37"], agent="forks.Forks", options={"width": 1})
    assert (result.reward, result.status) == (1 / 2, "completed")
    assert len(rows) == 1 and "too high" in tokenizer.decode(rows[0].token_ids)


def test_forks_leave_a_row_per_draw_that_share_the_way_to_it(files: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    guesses = ["50", "25", "30", "37", "40", "45"]
    result, rows = play(tokenizer, guesses, agent="forks.Forks", options={"width": 3, "turns": 2})
    assert result.reward == 1 / 6
    # Of three draws at the first turn one goes on, and forks into three at the second: five leaves.
    assert len(rows) == 5
    forest = Forest.from_rows([row.token_ids for row in rows])
    assert forest.num_unique < 0.5 * forest.num_flat
    assert sum(int(row.response_mask[-1]) for row in rows) == 5, "every row ends in a draw, which trains"


def test_a_policy_of_ones_own_branches_at_the_last_turn(files: Path) -> None:
    options = read_branching({"policy": "last_turn.last_turn", "options": {"branches": 3}})
    nodes = (Node(start=0, end=5, turn=0), Node(start=5, end=9, turn=1))
    session = SessionNodes(session=0, reward=1.0, tokens=9, turns=2, nodes=nodes)
    assert options.choose([session], random.Random(0), **options.options) == [Cut(session=0, token=5, k=3)]


def test_a_model_of_ones_own_equals_rows_alone(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(files / "model_check.py"))
    assert float(capsys.readouterr().out.split()[-1]) < 1e-5


@pytest.mark.parametrize("max_tokens", [None, 3])
def test_a_loss_of_ones_own_has_the_gradients_of_rows_alone(files: Path, max_tokens: int | None) -> None:
    from own_loss import sequence_loss  # type: ignore[import-not-found]

    rows = [[5, 6, 7, 8, 9], [5, 6, 7, 10], [5, 6, 7, 8, 11, 12], [13, 14]]
    rewards, lengths = torch.tensor([1.0, -0.4, 0.7, 0.2]), [len(row) for row in rows]
    alone, tree = tiny_model(), tiny_model()
    for row, reward in zip(rows, rewards, strict=True):
        log_probs = alone(torch.tensor([row])).logits[0, :-1].log_softmax(-1)
        mean = log_probs.gather(1, torch.tensor(row[1:])[:, None]).sum() / len(row)
        (-reward * mean * mean.detach().exp()).backward()
    use_tree_attention(tree)
    use_edge_head(tree)
    step = TreeStep(tree, TreeOptions(max_tokens=max_tokens))
    step.run(Rows.of(rows, trained=[[0] + [1] * (len(row) - 1) for row in rows]), sequence_loss(rewards, lengths))
    for one, other in zip(tree.parameters(), alone.parameters(), strict=True):
        assert float((one.grad - other.grad).norm() / other.grad.norm()) < 1e-5


def prompt_of_three_sessions() -> CreditTree:
    rows = [[1, 2, 3], [1, 2, 4], [1, 5]]
    steps = [np.array([-1, *[0] * (len(row) - 1)]) for row in rows]
    made = [CreditRow(tokens=np.array(row), leaf=leaf, steps=steps[leaf]) for leaf, row in enumerate(rows)]
    return CreditTree.of(made, [Leaf(reward=reward) for reward in (1.0, 0.0, 0.2)])


def test_an_estimator_of_ones_own_is_found_by_its_dotted_name_with_its_option(files: Path, tmp_path: Path) -> None:
    found = estimator_named("own_credit.above_average")
    # V(root) = 0.4. Token 2: 0.5. Then 1 and 0; token 5: 0.2.
    expected = [0, 0.05, 0.3, 0, 0.05, -0.2, 0, -0.1]
    assert found.credit(prompt_of_three_sessions(), scale=0.5) == pytest.approx(expected)
    keys = re.findall(r"`\+?(algorithm\.[\w.]+=[\w.]+)`", PAGE.read_text(encoding="utf-8").split("## A branching")[1])
    assert keys[:2] == ["algorithm.adv_estimator=own_credit.above_average", "algorithm.credit.scale=0.5"]
    check_train(on_this_machine(["trainer.v1.trainer_mode=tree_sync", keys[0], f"+{keys[1]}"], tmp_path))


def test_weights_of_ones_own_are_found_by_their_dotted_name(files: Path) -> None:
    tree = prompt_of_three_sessions()
    weights = custom_weights("own_weights.by_depth", [2, 2, 1], [{}] * 3, [([0, 1, 2], tree)])
    # Five nodes; the first two rows pass three of them, the last two.
    assert [one.tolist() for one in weights] == [[0.6, 0.6], [0.6, 0.6], [0.4]]


def tiny_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)
    config.num_attention_heads, config.num_key_value_heads, config.initializer_range = 4, 2, 0.2
    return Qwen3ForCausalLM(config)


def test_verl_finds_the_registered_loss_and_the_job_is_accepted(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "soft_reinforce", None)
    import_module("own_policy_loss")
    registered = get_policy_loss_fn("soft_reinforce")
    keys = re.findall(r"`(actor_rollout_ref[\w.]+=\w+)`", PAGE.read_text(encoding="utf-8"))
    assert len(keys) == 2
    check_train(on_this_machine(["trainer.v1.trainer_mode=tree_sync", *keys], tmp_path))
    config = FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, policy_loss={"loss_mode": "soft_reinforce"}
    )
    log_prob = torch.tensor([[-1.0, -2.0, -0.5]], requires_grad=True)
    old, mask = torch.tensor([[-1.0, -1.0, -0.5]]), torch.tensor([[1, 1, 0]])
    total, metrics = registered(old, log_prob, torch.tensor([[2.0, 1.0, 9.0]]), mask, "token-mean", config)
    damping = float(torch.tensor(-1.0).exp())
    assert total.item() == pytest.approx((2.0 * 1.0 + 1.0 * 2.0 * damping) / 2)
    assert metrics["actor/damping"] == pytest.approx((2 + damping) / 3)
