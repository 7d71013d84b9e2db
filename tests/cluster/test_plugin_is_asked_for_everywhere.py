"""Before the first step the trainer asks every worker for the plugin, and names those that lack it."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from omegaconf import OmegaConf
from verl.single_controller.base import Worker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.trainer import main_ppo

import tree_rl
from tree_rl.verl_plugin import plugin_presence
from tree_rl.verl_plugin.launch.job_environment import asks_for_trees, forwarding, plugin_variables
from tree_rl.verl_plugin.plugin_presence import PluginNotLiveError, find_faults, job_workers, require_plugin_everywhere

REPOSITORY = Path(__file__).parents[2]
VERSION = {"TREE_RL_JOB_VERSION": tree_rl.__version__}
DRIVER = ("here", tree_rl.__version__, "0.9.1")
# No platform named either: verl without the plugin knows none for CPUs.
WITHOUT_PLUGIN = {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_PLATFORM": ""}

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with another version, to be found before the installed one."""
    root = tmp_path_factory.mktemp("older")
    shutil.copytree(REPOSITORY / "tree_rl", root / "tree_rl", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "tree_rl" / "__init__.py").write_text('__version__ = "0.0.9"\n')
    return root


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Ray cluster; each test asks among the actors it is about."""
    # Ray puts the driver's working directory before everything else that its workers import from.
    with contextlib.chdir(tmp_path_factory.mktemp("driver")):
        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


@pytest.fixture(scope="module")
def bare(cluster: None) -> Iterator[RayWorkerGroup]:
    """A worker whose verl has no plugin."""
    group = start_group("bare", WITHOUT_PLUGIN)
    wait_until_built(*named("bare").values())
    yield group


def start_group(prefix: str, environment: dict[str, str]) -> RayWorkerGroup:
    """One worker of verl; a local class, so that unpickling it does not bring the plugin along."""

    class PlainWorker(Worker):
        pass

    pool = RayResourcePool([1], use_gpu=False, max_colocate_count=1, name_prefix=prefix)
    worker, how = RayClassWithInitArgs(cls=ray.remote(PlainWorker)), {"device_name": "cpu", "worker_env": environment}
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=worker, name_prefix=prefix, **how)


def wait_until_built(*workers: Any) -> None:
    ray.get([worker.__ray_call__.remote(lambda _: None) for worker in workers])


def named(*prefixes: str) -> dict[str, Any]:
    return {name: worker for name, worker in job_workers().items() if name.startswith(prefixes)}


@pytest.mark.ray
def test_a_worker_without_the_plugin_ends_the_job_by_name(bare: RayWorkerGroup) -> None:
    @ray.remote(num_cpus=0)
    class NoVerl:
        pass

    queue = NoVerl.options(name="queue").remote()
    wait_until_built(queue)
    assert find_faults(named("queue"), DRIVER, answer_seconds=30) == []
    with pytest.raises(PluginNotLiveError) as failure:
        require_plugin_everywhere()
    message = str(failure.value)
    assert message.startswith("1 of 2 workers cannot train trees"), message
    address = ray.util.get_node_ip_address()
    assert f"barePlainWorker_0:0 on {address} (pid " in message and "runs verl 0.9.1 without tree_rl" in message
    assert "VERL_USE_EXTERNAL_MODULES=tree_rl.verl_plugin" in message, "the remedy"
    ray.kill(queue)


@pytest.mark.slow
@pytest.mark.ray
def test_a_worker_of_another_version_is_named_and_one_with_the_plugin_is_not(bare: RayWorkerGroup, older: Path) -> None:
    _groups = start_group("live", {}), start_group("older", {"PYTHONPATH": str(older)})
    # Asking ends at the first fault, whoever still starts then.
    wait_until_built(*job_workers().values())
    with pytest.raises(PluginNotLiveError) as failure:
        require_plugin_everywhere()
    message = str(failure.value)
    assert message.startswith("2 of 3 workers cannot train trees"), message
    assert "olderPlainWorker_0:0 on" in message and f"has tree_rl 0.0.9, the driver {tree_rl.__version__}" in message
    assert "livePlainWorker" not in message


@pytest.mark.slow
@pytest.mark.ray
def test_silence_and_death_are_faults_and_a_slow_start_is_not(cluster: None) -> None:
    @ray.remote(num_cpus=0)
    class Actor:
        def __init__(self, start_seconds: float = 0) -> None:
            time.sleep(start_seconds)

        def hang(self) -> None:
            time.sleep(600)

        def ready(self) -> None: ...

    @ray.remote(num_cpus=0)
    class Broken:
        def __init__(self) -> None:
            raise ModuleNotFoundError("No module named 'tree_rl'")

    hung, slow, broken = Actor.remote(), Actor.remote(5), Broken.remote()
    ray.get(hung.ready.remote())
    hung.hang.remote()
    with pytest.raises(ray.exceptions.RayActorError):
        wait_until_built(broken)
    # It may start at any moment of a wait: its time to answer begins when it is first seen to run.
    assert find_faults({"slow": slow}, DRIVER, answer_seconds=4) == []
    faults = find_faults({"hung": hung, "broken": broken}, DRIVER, answer_seconds=20)
    died = "broken died: ModuleNotFoundError: No module named 'tree_rl'"
    assert faults == [died, "hung runs, but gave no answer within 20 s"]
    with pytest.raises(PluginNotLiveError, match="worker 0 without a name died"):
        require_plugin_everywhere([broken])


def test_a_process_of_another_version_refuses_to_load_the_plugin() -> None:
    plugin_presence.check_job_version({})
    plugin_presence.check_job_version({plugin_presence.JOB_VERSION: tree_rl.__version__})
    said = rf"has tree_rl {tree_rl.__version__}, the driver of its job has 0\.0\.9"
    with pytest.raises(PluginNotLiveError, match=said):
        plugin_presence.check_job_version({plugin_presence.JOB_VERSION: "0.0.9"})


def test_the_driver_hands_the_plugin_to_a_job_of_trees_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = OmegaConf.create({"trainer": {"v1": {"trainer_mode": "tree_sync"}}})
    flat = OmegaConf.create({"trainer": {"v1": {"trainer_mode": "sync"}}})
    assert main_ppo.get_ppo_ray_runtime_env(tree)["env_vars"]["VERL_USE_EXTERNAL_MODULES"] == "tree_rl.verl_plugin"
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "mine")
    runtime_env = forwarding(lambda config=None: {"env_vars": {"NCCL_DEBUG": "WARN"}})
    assert runtime_env(flat) == runtime_env() == {"env_vars": {"NCCL_DEBUG": "WARN"}}
    modules = {"NCCL_DEBUG": "WARN", "VERL_USE_EXTERNAL_MODULES": "mine,tree_rl.verl_plugin"}
    assert runtime_env(tree)["env_vars"] == {**modules, **VERSION}
    assert asks_for_trees(OmegaConf.create({"actor_rollout_ref": {"model": {"model_type": "tree_language_model"}}}))


def test_variables_of_a_submitted_job_stay_its_own() -> None:
    submitted = {"runtime_env": {"env_vars": {"VERL_USE_EXTERNAL_MODULES": "tree_rl.verl_plugin"}}}
    assert plugin_variables({"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(submitted)}) == VERSION
    own = {"VERL_USE_EXTERNAL_MODULES": "tree_rl.verl_plugin,mine"}
    assert plugin_variables(own)["VERL_USE_EXTERNAL_MODULES"] == "tree_rl.verl_plugin,mine"


@pytest.mark.slow
def test_verl_without_the_plugin_refuses_what_only_trees_have() -> None:
    program = """
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.workers.engine import EngineRegistry

look_ups = [(get_trainer_cls, "tree_sync"), (EngineRegistry.get_engine_cls, "tree_language_model", "fsdp2")]
for function, *names in look_ups:
    try:
        print(function(*names))
    except Exception as error:
        print(type(error).__name__, error)
"""
    command = [sys.executable, "-W", "ignore", "-c", program]
    environment = os.environ | WITHOUT_PLUGIN
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    trainer, engine = done.stdout.splitlines()
    assert "Error" in trainer and "tree_sync" in trainer
    assert "Error" in engine and "tree_language_model" in engine
