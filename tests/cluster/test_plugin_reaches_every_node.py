"""Code that travels with a job trains on nodes that lack it.

Workers without the plugin, or with another version, end a job by name in test_plugin_is_asked_for_everywhere.py.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from emulated_nodes import (
    EXISTING_CLUSTER,
    REPOSITORY,
    Nodes,
    address,
    copy_of_the_code,
    environment_without_us,
    running_nodes,
    why_none,
)

RECIPE = REPOSITORY / "recipes" / "grpo" / "run_qwen3_fsdp2.sh"
REWARD = """
import sys
from pathlib import Path


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    with Path({seen!r}).open("a") as file:
        file.write(sys.modules["tree_rl.verl_plugin"].__file__ + "\\n")
    return float(len(solution_str) % 2)
"""

WHY = why_none()
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900), pytest.mark.skipif(WHY is not None, reason=str(WHY))]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment_without_us(tmp_path_factory.mktemp("bare") / "env")


@pytest.fixture(scope="module")
def bare_nodes(bare: Path) -> Iterator[Nodes]:
    """Two nodes on which tree_rl is not installed."""
    with running_nodes(2, gpus=1, pythons=[bare, bare]) as nodes:
        yield nodes


def one_step(folder: Path, python: Path) -> dict[str, str]:
    """Environment of the recipe, as small as it gets."""
    sizes = {"NNODES": "2", "STEPS": "1", "TRAIN_BATCH_SIZE": "4", "MINI_BATCH_SIZE": "4", "ROLLOUT_N": "2"}
    return {"PYTHON": str(python), "OUTPUT": str(folder / "out"), **sizes}


def test_code_sent_as_py_modules_trains_on_nodes_without_it(tmp_path: Path, bare: Path, bare_nodes: Nodes) -> None:
    code = copy_of_the_code(tmp_path / "code")
    modules = f"+ray_kwargs.ray_init.runtime_env.py_modules=[{code / 'tree_rl'},{code / 'tree_kernels'}]"
    command = ["bash", str(RECIPE), *EXISTING_CLUSTER, modules]
    environment = one_step(tmp_path, bare)
    environment |= {"PYTHONPATH": str(code), "VERL_USE_EXTERNAL_MODULES": "tree_rl.verl_plugin"}
    assert_trains(bare_nodes, command, bare, environment, tmp_path, found_in="py_modules_files")


def test_code_sent_as_working_dir_trains_on_nodes_without_it(tmp_path: Path, bare: Path, bare_nodes: Nodes) -> None:
    travelling = copy_of_the_code(tmp_path / "travelling")
    shutil.copytree(REPOSITORY / "recipes", travelling / "recipes", ignore=shutil.ignore_patterns("__pycache__"))
    runtime_env = {"env_vars": {"VERL_USE_EXTERNAL_MODULES": "tree_rl.verl_plugin"}}
    command = [
        *("ray", "job", "submit", "--address", f"http://{address(0)}:8265", "--working-dir", str(travelling)),
        *("--runtime-env-json", json.dumps(runtime_env), "--", "env"),
        *(f"{name}={value}" for name, value in one_step(tmp_path, bare).items()),
        *("bash", "recipes/grpo/run_qwen3_fsdp2.sh", *EXISTING_CLUSTER),
    ]
    assert_trains(bare_nodes, command, bare, {}, tmp_path, found_in="working_dir_files")


def assert_trains(
    nodes: Nodes, command: list[str], python: Path, environment: dict[str, str], folder: Path, *, found_in: str
) -> None:
    """With a reward function that notes from where its process has the plugin."""
    seen = folder / "seen"
    (folder / "reward.py").write_text(REWARD.format(seen=str(seen)))
    command = [*command, f"reward.custom_reward_function.path={folder / 'reward.py'}"]
    done = nodes.drive(command, python=python, environment=environment, folder=folder, seconds=500)
    (folder / "log").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "training/global_step:1" in done.stdout
    assert {found_in in line for line in seen.read_text().splitlines()} == {True}, seen.read_text()
