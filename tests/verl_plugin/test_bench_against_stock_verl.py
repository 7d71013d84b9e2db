"""`tree-rl bench --against verl` on a tiny model: real updates of both engines behind a gate. Times are not judged."""

import csv
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from engine_harness import nested
from typer.testing import CliRunner

from tree_rl.benchmark.against_verl import verl_updates
from tree_rl.benchmark.against_verl.engines import build_engine, save_random_model
from tree_rl.benchmark.against_verl.worker_rows import rows_as_received, rows_to_update
from tree_rl.benchmark.batch import Batch, agent_batch
from tree_rl.benchmark.gradient_errors import GateError
from tree_rl.cli import app
from tree_rl.cost.model_sizes import MODEL_SIZES
from tree_rl.verl_plugin.options import TreeConfig

TINY = ["bench", "--against", "verl", "--model", "tiny", "--layers", "1", "--num-rows", "8", "--commit", "test"]


def small_batch() -> Batch:
    return agent_batch(por=0.5, num_rows=4, row_tokens=40, num_groups=1, trained_share=0.5, vocab=512)


def test_both_engines_are_timed_on_the_same_rows(tmp_path: Path) -> None:
    arguments = ["--row-tokens", "64", "--por", "0", "--por", "0.6", "--repeats", "2", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*TINY, *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    with (tmp_path / "verl_tiny_agents.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["por"]) for row in rows] == pytest.approx([0.0, 0.6], abs=0.01)
    for row in rows:
        assert float(row["tree_gradient_error"]) < 1e-5 and float(row["verl_gradient_error"]) < 1e-5
        for side in ("tree", "verl"):
            phases = float(row[f"{side}_old_log_probs_s"]) + float(row[f"{side}_update_s"])
            assert 0 < phases <= 1.01 * float(row[f"{side}_s_high"])
        assert (row["commit"], row["verl_attention"], row["verl"]) == ("test", "sdpa", "0.9.1")
        # Stock verl projects prompts and observations, too.
        assert float(row["flop_bound_all_projected"]) > float(row["flop_bound"])
    assert (tmp_path / "verl_tiny_agents.png").stat().st_size > 5_000


def test_a_wrong_gradient_is_not_timed(tmp_path: Path) -> None:
    path = save_random_model(MODEL_SIZES["tiny"].with_layers(1), tmp_path, torch.device("cpu"))
    batch = small_batch()
    settings = {"dtype": torch.float32, "attention": "sdpa"}
    stock = verl_updates.Side(engine=build_engine(path, tree=None, **settings), max_tokens=None)
    # A weight per unique token is another objective.
    config = TreeConfig(mode="tree", path_weighting="token_unique", self_check=False)
    wrong = verl_updates.Side(engine=build_engine(path, tree=config, **settings), max_tokens=None)
    truth = verl_updates.gradients_of(stock, batch)
    sides = {verl_updates.TREE: stock, verl_updates.STOCK: stock}
    assert verl_updates.check_engine_gradients(sides, batch, truth).tree == 0
    with pytest.raises(GateError, match=r"gradient of the tree.*stock verl"):
        verl_updates.check_engine_gradients({**sides, verl_updates.TREE: wrong}, batch, truth)


def test_rows_reach_the_engine_with_their_masks_and_advantages() -> None:
    batch = small_batch()
    untrained = replace(batch, trained=tuple(0 * trained for trained in batch.trained))
    for each in (batch, untrained):
        data = rows_as_received(each, max_tokens=100)
        lengths = [len(row) for row in each.rows]
        update = rows_to_update(data, each, nested([torch.arange(1.0, length + 1) for length in lengths]))
        for index, (row, trained) in enumerate(zip(each.rows, each.trained, strict=True)):
            prompt, response = update["prompts"][index], update["responses"][index]
            assert torch.cat([prompt, response]).tolist() == row.tolist() and len(prompt) and len(response)
            assert update["response_mask"][index].tolist() == trained[len(prompt) :].tolist()
            assert not trained[: len(prompt)].any()
            # Position i holds the log-prob of token i + 1.
            assert update["old_log_probs"][index].tolist() == list(range(len(prompt), len(row)))
            assert update["advantages"][index].unique().tolist() == pytest.approx([each.advantage_B[index]])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--steps", "2"], "--against verl: --steps is not for this comparison"),
        (["--dtype", "float16"], "--against verl: --dtype float16 is not for this comparison"),
        (["--packed-attention", "flash_attention_2"], "flash-attn is not installed"),
        (["--against", "rows"], "--against rows: expected packed or verl"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(arguments: list[str], expected: str) -> None:
    result = CliRunner().invoke(app, [*TINY, *arguments])
    assert result.exit_code == 2 and expected in result.output, result.output


def test_without_verl_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tree_rl.extras.find_spec", lambda name: None if name == "verl" else find_spec(name))
    result = CliRunner().invoke(app, TINY)
    assert result.exit_code == 2 and "--against verl needs verl, which is not installed" in result.output
