"""Every process of a job that runs verl runs this plugin, in the version of the driver, or the job ends and names it.

A worker without the plugin would train rows one by one, or fail far from the cause. The probe asks what a worker has
imported and imports nothing: a function of this package would bring the plugin along, and prove nothing.
"""

import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from tree_rl import __version__

PLUGIN = "tree_rl.verl_plugin"
JOB_VERSION = "TREE_RL_JOB_VERSION"
"""Environment variable in which the driver tells the job's processes its version of tree_rl."""
ANSWER_SECONDS = 45.0
"""How long a worker that has started may take to answer."""
REMEDY = (
    f"install tree_rl {__version__} on every node, or send it along (docs/cluster.md, The plugin in every process); "
    f"leave VERL_USE_EXTERNAL_PLUGINS unset or auto, or set VERL_USE_EXTERNAL_MODULES={PLUGIN}"
)

logger = logging.getLogger(__name__)


class PluginNotLiveError(RuntimeError):
    """A process that would run verl without trees, or with those of another version, in a job that asks for trees."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Presence:
    """What one worker process has imported."""

    place: str
    """Address and process id."""
    tree_rl: str | None
    """Version of the live plugin; None: it is not live."""
    verl: str | None
    """Version of verl; None: the process does not use verl."""


def check_job_version(environ: Mapping[str, str]) -> None:
    """Refuse to run in a job whose driver has another version; the plugin calls it when it loads.

    Raises:
        PluginNotLiveError: names this process, both versions and the remedy.
    """
    wanted = environ.get(JOB_VERSION, __version__)
    if wanted != __version__:
        place = f"{socket.gethostname()} (pid {os.getpid()}, python {sys.executable})"
        raise PluginNotLiveError(
            f"process on {place} has tree_rl {__version__}, the driver of its job has {wanted}; install {wanted} there"
        )


def require_plugin_everywhere(more_workers: Sequence[Any] | None = None) -> None:
    """Ask every worker of this job, named actors and those given, for its plugin, before a step is trained.

    Args:
        more_workers: Ray actor handles that may have died, and left the list of names, before this call.

    Raises:
        PluginNotLiveError: names each worker that lacks the plugin, has other versions, died or does not answer.
    """
    workers = job_workers()
    known = {worker._actor_id for worker in workers.values()}
    unnamed = [worker for worker in more_workers or () if worker._actor_id not in known]
    workers |= {f"worker {number} without a name": worker for number, worker in enumerate(unnamed)}
    driver = _probe()(None)
    faults = find_faults(workers, driver, answer_seconds=ANSWER_SECONDS)
    if faults:
        raise PluginNotLiveError(
            f"{len(faults)} of {len(workers)} workers cannot train trees:\n  " + "\n  ".join(faults) + f"\n{REMEDY}"
        )
    logger.info("tree_rl %s is live in %d workers", __version__, len(workers))


def job_workers() -> dict[str, Any]:
    """Named actors of this job, by name; verl names all of its workers and servers."""
    job = ray.get_runtime_context().get_job_id()
    actors = {name: ray.get_actor(name) for name in ray.util.list_named_actors()}
    return {name: actor for name, actor in actors.items() if actor._actor_id.job_id.hex() == job}


def find_faults(
    workers: Mapping[str, Any], driver: tuple[str, str | None, str | None], *, answer_seconds: float
) -> list[str]:
    """Describe every worker that is not as the driver is.

    Args:
        workers: Ray actor handles by name.
        driver: what `_probe` finds in this process.
        answer_seconds: for workers that run; one that still starts is waited for, as verl would.
    """
    names = {worker.__ray_call__.remote(_probe()): name for name, worker in workers.items()}
    waiting, faults = list(names), []
    while waiting:
        answered, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=answer_seconds)
        for answer in answered:
            try:
                fault = judge(as_presence(ray.get(answer)), as_presence(driver))
            except ray.exceptions.RayError as error:
                fault = f"died: {str(error).strip().splitlines()[-1]}"
            if fault is not None:
                faults.append(f"{names[answer]} {fault}")
        silent = [answer for answer in waiting if _has_started(workers[names[answer]])]
        faults += [f"{names[answer]} runs, but gave no answer within {answer_seconds:.0f} s" for answer in silent]
        waiting = [answer for answer in waiting if answer not in silent]
        if faults:
            break
        if waiting:
            logger.warning("still starting: %s", ", ".join(sorted(names[answer] for answer in waiting)))
    return sorted(faults)


def as_presence(found: tuple[str, str | None, str | None]) -> Presence:
    """Read a probe's answer."""
    place, tree_rl, verl = found
    return Presence(place=place, tree_rl=tree_rl, verl=verl)


def judge(worker: Presence, driver: Presence) -> str | None:
    """What is wrong with a worker, None if nothing; one that does not use verl needs no plugin."""
    if worker.verl is None:
        return None
    if worker.tree_rl is None:
        return f"on {worker.place} runs verl {worker.verl} without tree_rl"
    for package, got, wanted in (("tree_rl", worker.tree_rl, driver.tree_rl), ("verl", worker.verl, driver.verl)):
        if got != wanted:
            return f"on {worker.place} has {package} {got}, the driver {wanted}"
    return None


def _probe() -> Callable[[Any], tuple[str, str | None, str | None]]:
    """A function that finds address, tree_rl and verl of a process; as a local one it travels by value."""

    def look(_worker: Any) -> tuple[str, str | None, str | None]:
        import os
        import sys

        import ray

        place = f"{ray.util.get_node_ip_address()} (pid {os.getpid()})"
        live = "tree_rl.verl_plugin" in sys.modules
        verl = sys.modules["verl"].__version__ if "verl" in sys.modules else None
        return place, sys.modules["tree_rl"].__version__ if live else None, verl

    return look


def _has_started(worker: Any) -> bool:
    """Whether Ray has built the actor: before, its process may still be importing, and after, it owes an answer."""
    return bool(ray._private.state.actors(worker._actor_id.hex()).get("State") == "ALIVE")
