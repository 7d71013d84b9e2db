"""Two nodes with two training processes each take the same ten steps of the GRPO recipe as one node with four; so do
nodes whose two processes share the tokens of each forest."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from emulated_nodes import EXISTING_CLUSTER, REPOSITORY, running_nodes, why_none
from safetensors.torch import load_file

RECIPE = REPOSITORY / "recipes" / "grpo" / "run_qwen3_fsdp2.sh"
STEPS = 10
RANKS = 4
LEARNT = ("actor/", "critic/", "tree/", "response_length/", "training/rollout_probs_diff")
NOT_LEARNT = ("actor/perf", "perf/", "memory", "mfu", "seconds", "_time", "timing", "cost_")
"""Parts of names that measure a machine, not what is learnt."""
RELATIVE, ABSOLUTE = 1e-5, 1e-6
OF_LAYOUT = ("tree/imbalance", "tree/split_groups", "tree/repeated_tokens", "tree/partitions", "actor/tree/")
"""Figures of how rows lie on ranks, and of what those compute."""
OF_RANKS = ("actor/pg_clipfrac", "actor/ppo_kl")
"""Means over the tokens of a rank, which verl averages over ranks whatever they hold."""
FIXED_COSTS = "actor_rollout_ref.actor.fsdp_config.full_determinism=true"
"""Otherwise costs, and so how rows are dealt, are fitted to measured seconds."""
SHARING_RELATIVE = 1e-4
"""Of final weights: sums over ranks come in another order, and Adam makes steps of the rounding of small gradients."""
SHARES_TOKENS = [f"actor_rollout_ref.{role}.fsdp_config.ulysses_sequence_parallel_size=2" for role in ("actor", "ref")]

WHY = why_none()
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400), pytest.mark.skipif(WHY is not None, reason=str(WHY))]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run leaves."""

    steps: list[dict[str, float]]
    """Figures of every step that depend on what is learnt."""
    updates: list[dict[str, object]]
    """The trainer's ledger: prompts and digests of the rows of every update."""
    weights: dict[str, torch.Tensor]
    """After the last step."""


def train(folder: Path, *more: str, nodes: int) -> Run:
    """Run the recipe on emulated nodes, four training processes in all; `more` are overrides."""
    folder.mkdir()
    environment = {"PYTHON": sys.executable, "OUTPUT": f"{folder}/out", "ROLLOUT_N": "4", "NNODES": str(nodes)}
    environment |= {"VERL_FILE_LOGGER_PATH": f"{folder}/metrics.jsonl", "NGPUS": str(RANKS // nodes)}
    environment |= {"RAY_RUNTIME_ENV_HOOK": "tree_rl.verl_plugin.launch.carried_environment.carry", "STEPS": str(STEPS)}
    saved = ["actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]"]
    saved.append(f"trainer.save_freq={STEPS}")
    overrides = [*EXISTING_CLUSTER, FIXED_COSTS, *more, "trainer.logger=[console,file]", *saved]
    with running_nodes(nodes, gpus=RANKS // nodes) as cluster:
        command, given = ["bash", str(RECIPE), *overrides], {"environment": environment, "folder": folder}
        done = cluster.drive(command, python=Path(sys.executable), seconds=1100, **given)
    (folder / "log").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    checkpoint = folder / "out" / "checkpoints"
    weights: dict[str, torch.Tensor] = {}
    for file in sorted((checkpoint / f"global_step_{STEPS}" / "actor" / "huggingface").glob("*.safetensors")):
        weights |= load_file(file)
    figures = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return Run(
        steps=[{name: value for name, value in step.items() if is_learnt(name)} for step in figures],
        updates=[json.loads(line) for line in (checkpoint / "updates.jsonl").read_text().splitlines()],
        weights=weights,
    )


def is_learnt(name: str) -> bool:
    return name.startswith(LEARNT) and not any(part in name for part in NOT_LEARNT)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One node whose four processes have rows of their own."""
    return train(tmp_path_factory.mktemp("nodes") / "one", nodes=1)


def assert_same_training(one: Run, other: Run, *, besides: tuple[str, ...] = (), within: float = RELATIVE) -> None:
    """The same rows, figures and weights; figures whose names begin as those of `besides` may differ."""
    assert len(one.steps) == len(other.steps) == STEPS
    assert other.updates == one.updates, "the same rows, token for token, in the same updates"
    for step, (left, right) in enumerate(zip(one.steps, other.steps, strict=True), start=1):
        expected, found = ({k: v for k, v in one.items() if not k.startswith(besides)} for one in (left, right))
        assert set(left) == set(right)
        assert found == pytest.approx(expected, rel=RELATIVE, abs=ABSOLUTE), f"step {step}"
    assert set(one.weights) == set(other.weights) and len(one.weights) > 10
    errors = {
        name: float((other.weights[name].double() - weight.double()).norm() / weight.double().norm())
        for name, weight in one.weights.items()
    }
    print(f"largest relative difference of a final weight: {max(errors.values()):.1e}")
    assert max(errors.values()) < within, errors


def test_two_nodes_train_as_one_node_does(one: Run, tmp_path: Path) -> None:
    assert {"actor/pg_loss", "actor/grad_norm", "critic/score/mean", "tree/por"} <= set(one.steps[0])
    assert_same_training(one, train(tmp_path / "two", nodes=2))
    assert one.steps[-1]["tree/session_score/mean"] > one.steps[0]["tree/session_score/mean"] + 0.2, "it learns"


def test_nodes_whose_processes_share_tokens_train_as_one_node_does(one: Run, tmp_path: Path) -> None:
    sharing = train(tmp_path / "sharing", *SHARES_TOKENS, nodes=2)
    assert_same_training(one, sharing, besides=OF_LAYOUT + OF_RANKS, within=SHARING_RELATIVE)
