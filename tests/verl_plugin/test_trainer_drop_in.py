"""One line added to a verl command turns a run into a tree run."""

import subprocess
import sys

from tree_rl.verl_plugin.launch.tree_arguments import accept_model_type

PRINT_CONFIG = [sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo", "--cfg", "job"]


def test_only_our_model_types_are_touched() -> None:
    line = ["main_ppo", "actor_rollout_ref.model.model_type=tree_language_model", "critic.model.model_type=value_model"]
    line += ["+critic.model.model_type=tree_value_model", "data.train_batch_size=8", "--cfg"]
    received = list(line)
    accept_model_type(received)
    assert received == [line[0], f"++{line[1]}", *line[2:]]


def test_stock_main_accepts_the_documented_line() -> None:
    line = [
        "actor_rollout_ref.model.model_type=tree_language_model",
        "critic.model.model_type=tree_value_model",
        "trainer.v1.trainer_mode=tree_sync",
    ]
    printed = subprocess.run([*PRINT_CONFIG, *line], check=True, capture_output=True, text=True).stdout
    assert "model_type: tree_language_model" in printed
    assert "model_type: tree_value_model" in printed
    assert "trainer_mode: tree_sync" in printed
