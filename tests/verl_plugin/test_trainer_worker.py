"""A worker's mini-batches hold whole groups, and padding rows change nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import Row, nested, ppo_batch, save_model, tiny_qwen3
from local_trainer import build_worker, parameters
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from tree_rl.verl_plugin.plugin_presence import PluginNotLiveError
from tree_rl.verl_plugin.trainer.workers import shuffled_rows

PAD = Row(tokens=[1] * 128, prompt=127, mask=[0], uid="pad")
METRICS = ("actor/pg_loss", "actor/ppo_kl", "loss", "grad_norm")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "actor": save_model(root / "actor", tiny_qwen3()),
        "critic": save_model(root / "critic", tiny_qwen3(), value=True),
    }


def group(uid: str, first: int, branches: int) -> list[Row]:
    stem = [first, 5, 6, 7]
    return [
        Row(tokens=[*stem, 10 + b, 11, 12 + b], prompt=2, mask=[0, 1, 1, 0, 1], advantage=float(b - 1), uid=uid)
        for b in range(branches)
    ]


def batch(rows: list[Row], real: list[Row], **flags: Any) -> TensorDict:
    """The rows, with the columns of the real ones independent of where padding stands."""
    columns = ppo_batch(real, seed=1)
    order = [real.index(row) if row in real else None for row in rows]
    data = ppo_batch(rows, **{"global_batch_size": 2, **flags})
    data["temperature"] = torch.ones(len(rows))
    for name in ("old_log_probs", "advantages", "returns", "values", "ref_log_prob"):
        taken = columns[name].unbind()
        filled = [torch.zeros(1) if index is None else taken[index] for index in order]
        data[name] = nested(filled)
    return data


def train(path: Path, rows: list[Row], real: list[Row], **flags: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    worker = build_worker(path)
    output = worker.train_mini_batch(batch(rows, real, **flags))
    return parameters(worker), tu.get(output, "metrics")


def test_padding_rows_change_neither_weights_nor_metrics(paths: dict[str, Path]) -> None:
    first, second = group("a", 3, 2), group("b", 4, 2)
    real = first + second
    flags = {"global_batch_size": 2, "epochs": 1}
    plain, plain_metrics = train(paths["actor"], real, real, num_mini_batch=2, **flags)
    padded_rows = first + [PAD] * 3 + second + [PAD] * 3
    # verl's own count of rows travels along and must lose against the number of mini-batches.
    padded, padded_metrics = train(paths["actor"], padded_rows, real, num_mini_batch=2, mini_batch_size=1, **flags)
    for name, value in plain.items():
        torch.testing.assert_close(padded[name], value, rtol=1e-4, atol=1e-6)
    for name in METRICS:
        got, want = (torch.as_tensor(_plain(metrics[name])) for metrics in (padded_metrics, plain_metrics))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
    assert len(padded_metrics["grad_norm"]) == 2


def _plain(value: Any) -> Any:
    return value.aggregate() if hasattr(value, "aggregate") else value


def test_without_our_key_a_mini_batch_is_verls(paths: dict[str, Path]) -> None:
    rows = group("a", 3, 2) + group("b", 4, 2)
    _, metrics = train(paths["actor"], rows, rows, mini_batch_size=1, epochs=1, global_batch_size=1)
    assert len(metrics["grad_norm"]) == 4


def test_shuffling_moves_whole_mini_batches() -> None:
    order = shuffled_rows(12, 3, 5, seed=7).reshape(5, 3, 4)
    for epoch in order:
        assert sorted(epoch[:, 0].tolist()) == [0, 4, 8]
        assert (epoch - epoch[:, :1]).tolist() == [[0, 1, 2, 3]] * 3
    assert len({tuple(epoch[:, 0].tolist()) for epoch in order}) > 1
    assert torch.equal(shuffled_rows(12, 3, 5, seed=7).reshape(5, 3, 4), order)


def test_shuffle_trains_every_mini_batch_once_per_epoch(paths: dict[str, Path]) -> None:
    rows = group("a", 3, 2) + group("b", 4, 2)
    flags = {"dataloader_kwargs": {"shuffle": True}, "seed": 3, "global_batch_size": 2}
    _, metrics = train(paths["actor"], rows, rows, num_mini_batch=2, epochs=3, **flags)
    assert len(metrics["grad_norm"]) == 6


def test_critic_model_type_chooses_the_tree_critic(paths: dict[str, Path]) -> None:
    tree = build_worker(paths["critic"], model_type="value_model", hf_model_type="tree_value_model")
    assert type(tree.engine).__name__ == "TreeFSDPEngineWithValueHead"
    rows = group("a", 3, 2)
    output = tree.train_mini_batch(batch(rows, rows, num_mini_batch=1, epochs=1, global_batch_size=2))
    assert tu.get(output, "metrics")["loss"][0] > 0


def test_a_process_without_the_engine_is_named(paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.engine import EngineRegistry

    left = {name: value for name, value in EngineRegistry._engines.items() if not name.startswith("tree_")}
    monkeypatch.setattr(EngineRegistry, "_engines", left)
    with pytest.raises(PluginNotLiveError, match=r"worker rank 0 on .*tree_language_model.*VERL_USE_EXTERNAL_PLUGINS"):
        build_worker(paths["actor"])
