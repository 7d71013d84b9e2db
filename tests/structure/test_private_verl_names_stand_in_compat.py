"""compat.py is the only module that imports verl or TransferQueue beyond verl's documented plug points."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

from tree_rl.verl_plugin import compat

PLUGIN = Path(compat.__file__).parent
FOLDERS = (PLUGIN, PLUGIN.parent / "benchmark" / "against_verl")
MODULES = sorted(path for folder in FOLDERS for path in folder.rglob("*.py") if path.name != "compat.py")

DOCUMENTED: dict[str, tuple[str, ...]] = {
    "verl.base_config": ("BaseConfig",),
    "verl.checkpoint_engine": ("CheckpointEngine", "CheckpointEngineRegistry"),
    "verl.experimental.agent_loop.agent_loop": ("AgentLoopBase", "AgentLoopMetrics", "AgentLoopOutput", "register"),
    "verl.plugin.platform": ("PlatformBase", "PlatformRegistry", "get_platform"),
    "verl.protocol": ("DataProto",),
    "verl.single_controller.base.decorator": ("Dispatch", "make_nd_compute_dataproto_dispatch_fn", "register"),
    "verl.trainer.config": ("CheckpointConfig",),
    "verl.trainer.ppo.core_algos": ("register_adv_est",),
    "verl.trainer.ppo.v1.trainer_base": ("register_trainer",),
    "verl.workers.config": (
        *("FSDPActorConfig", "FSDPEngineConfig", "FSDPOptimizerConfig", "HFModelConfig", "RolloutConfig"),
        "TrainingWorkerConfig",
    ),
    "verl.workers.rollout.base": ("BaseRollout",),
    "verl.workers.rollout.replica": ("RolloutMode", "RolloutReplica", "RolloutReplicaRegistry", "TokenOutput"),
}
"""Modules of verl that ours import directly -> verl's documented plug points, which they may take from there."""
ALLOWED = {(module, name) for module, names in DOCUMENTED.items() for name in names}


def foreign_imports(tree: ast.Module) -> set[tuple[str, str]]:
    """(module, name) of every import of verl or transfer_queue, wherever in the module it stands."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {(node.module, alias.name) for alias in node.names}
    return {(module, name) for module, name in found if module.split(".")[0] in ("verl", "transfer_queue")}


@pytest.mark.parametrize("module", DOCUMENTED)
def test_plug_points_are_where_verl_documents_them(module: str) -> None:
    found = import_module(module)
    assert [name for name in DOCUMENTED[module] if not hasattr(found, name)] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_module_imports_documented_plug_points_alone_and_hides_none_in_a_string(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert foreign_imports(tree) - ALLOWED == set()
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    hidden = re.compile(r"^\s*(from|import) (verl|transfer_queue)\b", re.MULTILINE)
    assert [text for text in strings if hidden.search(text)] == []


def test_no_listed_plug_point_or_private_name_is_unused() -> None:
    sources = [path.read_text() for path in MODULES]
    assert set().union(*(foreign_imports(ast.parse(text)) for text in sources)) == ALLOWED
    words = set(re.findall(r"\w+", "".join(sources)))
    assert set(compat.PRIVATE_NAMES) | set(compat.PRIVATE_MODULES) <= words
