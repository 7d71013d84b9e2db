"""Examines a new Python process: versions, a fingerprint of the sources, and whether verl loads the plugin.

verl hides errors of a plugin's import; this probe reports them. It imports nothing of tree_rl, so only verl's plugin
discovery can load it.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from tree_rl.verl_plugin.compat import import_statement
from tree_rl.verl_plugin.options import TREE_LANGUAGE_MODEL, TREE_VALUE_MODEL

COMPARED = ("tree_rl", "verl", "torch", "ray", "transformers", "vllm", "TransferQueue")
REGISTERED = (TREE_LANGUAGE_MODEL, TREE_VALUE_MODEL, "tree_sync")
"""Names of engines and trainers that only the plugin registers with verl."""
POLICY = "VERL_USE_EXTERNAL_PLUGINS"
PROBE_SECONDS = 240
Answer = tuple[int, str, str]
"""Exit code, standard output and standard error of the probe."""

PROBE = f"""
import hashlib, json, os, platform
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path


def installed(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def fingerprint(package):
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(list(found.submodule_search_locations)[0])
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + b"\\0" + file.read_bytes())
    return digest.hexdigest()[:8]


facts = {{"python": platform.python_version(), "policy": os.environ.get({POLICY!r}), "cause": None}}
facts["versions"] = {{package: installed(package) for package in {COMPARED!r}}}
facts["code"] = {{package: fingerprint(package) for package in ("tree_rl", "tree_kernels")}}
facts["missing"] = sorted({REGISTERED!r})
try:
    {import_statement("TRAINER_REGISTRY")}
    {import_statement("EngineRegistry")}
    facts["missing"] = sorted({{*{REGISTERED!r}}} - {{*EngineRegistry._engines, *TRAINER_REGISTRY}})
    if facts["missing"]:
        found = [entry for entry in entry_points(group="verl.plugins") if entry.name == "tree_rl"]
        if not found:
            raise RuntimeError("no entry point verl.plugins:tree_rl; pip install tree_rl, PYTHONPATH is not enough")
        found[0].load()
except Exception as error:
    facts["cause"] = f"{{type(error).__name__}}: {{error}}"
print(json.dumps(facts))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The installation that one process sees."""

    versions: dict[str, str]
    """Version or fingerprint by subject, "absent" if there is none. Every process reports the same subjects."""
    missing: tuple[str, ...]
    """Names that the plugin should have registered with verl but did not."""
    cause: str | None
    """Why names are missing; None if the probe does not know."""


def examine_here() -> Environment:
    """The environment of a new process of this Python; errors as in `read_environment`."""
    return read_environment(probe_task()())


def probe_task() -> Callable[[], Answer]:
    """A function that runs the probe in a new process of the machine that calls it."""
    # A nested function is pickled by value. To unpickle a module's function, the node would import tree_rl: that fails
    # without tree_rl, and would load the plugin even if verl does not.
    code, seconds = PROBE, PROBE_SECONDS

    def probe() -> Answer:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        return done.returncode, done.stdout, done.stderr

    return probe


def read_environment(answer: Answer) -> Environment:
    """Read the probe's output; raises a RuntimeError with the last line of a failed probe."""
    code, printed, complaint = answer
    if code:
        raise RuntimeError(last_line(complaint))
    facts = json.loads(printed.splitlines()[-1])
    versions = {"python": facts["python"], **facts["versions"]}
    versions |= {f"{package} code": digest for package, digest in facts["code"].items()}
    policy = f"{POLICY}={facts['policy']}" if facts["policy"] else None
    return Environment(
        versions={subject: found or "absent" for subject, found in versions.items()},
        missing=tuple(facts["missing"]),
        cause=": ".join(part for part in (policy, facts["cause"]) if part) or None,
    )


def last_line(text: str) -> str:
    """The last line of a message."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no message"
