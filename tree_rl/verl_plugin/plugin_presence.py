"""Ends a job if one of its processes runs verl without this plugin or with another version, and names the process.

Such a worker would train rows one by one, or fail far from the cause. The probe reads what a worker has imported. It
must not import this package itself, because that would load the plugin.
"""

import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from tree_rl import __version__

PLUGIN = "tree_rl.verl_plugin"
JOB_VERSION = "TREE_RL_JOB_VERSION"
"""Environment variable with the driver's version of tree_rl."""
ANSWER_SECONDS = 45.0
"""Longest wait for the answer of a worker that has started."""
REMEDY = (
    f"install tree_rl {__version__} on every node, or send it along (docs/cluster.md, The plugin in every process); "
    f"leave VERL_USE_EXTERNAL_PLUGINS unset or auto, or set VERL_USE_EXTERNAL_MODULES={PLUGIN}"
)
Presence = tuple[str, str | None, str | None]
"""(address and process id, version of the loaded plugin, version of verl) of a process; None for what is not loaded."""

logger = logging.getLogger(__name__)


class PluginNotLiveError(RuntimeError):
    """A process of a job on trees has no plugin, or another version of it."""


def check_job_version(environ: Mapping[str, str]) -> None:
    """Raise a PluginNotLiveError if the job's driver has another version."""
    wanted = environ.get(JOB_VERSION, __version__)
    if wanted != __version__:
        place = f"{socket.gethostname()} (pid {os.getpid()}, python {sys.executable})"
        raise PluginNotLiveError(
            f"process on {place} has tree_rl {__version__}, the driver of its job has {wanted}; install {wanted} there"
        )


def require_plugin_everywhere(more_workers: Sequence[Any] | None = None) -> None:
    """Check the plugin in the named actors of this job and in `more_workers`; Ray does not list dead named actors.

    Raises a PluginNotLiveError that names each worker which lacks the plugin, has other versions, died or is silent.
    """
    workers = job_workers()
    known = {worker._actor_id for worker in workers.values()}
    unnamed = [worker for worker in more_workers or () if worker._actor_id not in known]
    workers |= {f"worker {number} without a name": worker for number, worker in enumerate(unnamed)}
    faults = find_faults(workers, _probe()(None), answer_seconds=ANSWER_SECONDS)
    if faults:
        raise PluginNotLiveError(
            f"{len(faults)} of {len(workers)} workers cannot train trees:\n  " + "\n  ".join(faults) + f"\n{REMEDY}"
        )
    logger.info("tree_rl %s is live in %d workers", __version__, len(workers))


def job_workers() -> dict[str, Any]:
    """Actors of this job by name; verl names all of its workers and servers."""
    job = ray.get_runtime_context().get_job_id()
    actors = {name: ray.get_actor(name) for name in ray.util.list_named_actors()}
    return {name: actor for name, actor in actors.items() if actor._actor_id.job_id.hex() == job}


def find_faults(workers: Mapping[str, Any], driver: Presence, *, answer_seconds: float) -> list[str]:
    """Describe every worker, given as Ray handle by name, that differs from the driver.

    `answer_seconds` limits the wait for workers that run; a worker that still starts has no limit.
    """
    names = {worker.__ray_call__.remote(_probe()): name for name, worker in workers.items()}
    waiting = list(names)
    running = _started(waiting, names, workers)
    faults: list[str] = []
    while waiting and not faults:
        answered, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=answer_seconds)
        for answer in answered:
            try:
                fault = _difference(ray.get(answer), driver)
            except ray.exceptions.RayError as error:
                fault = f"died: {str(error).strip().splitlines()[-1]}"
            if fault is not None:
                faults.append(f"{names[answer]} {fault}")
        silent = [names[answer] for answer in waiting if answer in running]
        faults += [f"{name} runs, but gave no answer within {answer_seconds:.0f} s" for name in silent]
        running = _started(waiting, names, workers)
        if waiting and not faults:
            logger.warning("still starting: %s", ", ".join(sorted(names[answer] for answer in waiting)))
    return sorted(faults)


def _difference(worker: Presence, driver: Presence) -> str | None:
    """What is wrong with a worker; None if it has the driver's versions or does not use verl."""
    place, tree_rl, verl = worker
    if verl is None:
        return None
    if tree_rl is None:
        return f"on {place} runs verl {verl} without tree_rl"
    for package, found, wanted in zip(("tree_rl", "verl"), worker[1:], driver[1:], strict=True):
        if found != wanted:
            return f"on {place} has {package} {found}, the driver {wanted}"
    return None


def _probe() -> Callable[[Any], Presence]:
    """A function that describes the process in which it runs; nested, so that it is pickled by value."""

    def look(_worker: Any) -> Presence:
        import os
        import sys

        import ray

        place = f"{ray.util.get_node_ip_address()} (pid {os.getpid()})"
        live = "tree_rl.verl_plugin" in sys.modules
        verl = sys.modules["verl"].__version__ if "verl" in sys.modules else None
        return place, sys.modules["tree_rl"].__version__ if live else None, verl

    return look


def _started(waiting: Sequence[Any], names: Mapping[Any, str], workers: Mapping[str, Any]) -> set[Any]:
    """Answers of actors that Ray has built; before that, a process may still be importing."""
    handles = {answer: workers[names[answer]] for answer in waiting}
    state = ray._private.state.actors
    return {answer for answer, worker in handles.items() if state(worker._actor_id.hex()).get("State") == "ALIVE"}
