"""The wheel of an sdist works from an empty folder with the packages that it asks for, bare or with an extra."""

import os
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Callable
from functools import cache
from importlib.metadata import Distribution, distribution, distributions, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from record_files import write

from tree_rl.cost.model_sizes import MODEL_SIZES
from tree_rl.extras import INSTALLED_BY

ROOT = Path(__file__).parents[2]
MAIN = ("-c", "from tree_rl.cli import main; main()")
SHIPPED = ("constraints", "examples", "recipes", "scripts/cluster", "scripts/ray_token.sh")
AGENTS = "from tree_rl.rollout.agents.agents_by_name import build"
Build = Callable[[str], Path]
BARE_MIB = 400
"""Most that a bare installation takes."""


def slow(*values: str) -> object:
    """A case of the slow tier."""
    return pytest.param(*values, marks=pytest.mark.slow)


def tracked(*names: str) -> set[str]:
    listed = subprocess.run(["git", "ls-files", *names], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name for name in listed.splitlines() if (ROOT / name).is_file()}


def build(kind: str, source: Path, target: Path) -> Path:
    """As `python -m build` does, with this environment's setuptools."""
    target.mkdir()
    call = f"from setuptools import build_meta as b; b.build_{kind}({str(target)!r})"
    done = subprocess.run([sys.executable, "-c", call], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tracked files alone, as in a clean clone."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", checkout, tmp_path_factory.mktemp("sdist") / "built")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the sdist: what the sdist lacks, the wheel lacks."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        # Python 3.11 has the filter from 3.11.4 on.
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (source,) = folder.iterdir()
    return build("wheel", source, folder / "built")


@pytest.fixture(scope="module")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def environment_with(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Builds an environment of the wheel with an extra, "" for none, and gives its Python; needs no network.

    It holds the unpacked wheel, and links to those packages of this environment that the wheel's metadata asks for.
    """

    @cache
    def build_environment(extra: str) -> Path:
        folder = tmp_path_factory.mktemp("environment")
        venv.create(folder, symlinks=True)
        (site,) = folder.glob("lib/python*/site-packages")
        for package in packages_for(unpacked, extra):
            for name in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
                if not (site / name).exists():
                    (site / name).symlink_to(Path(str(package.locate_file(name))))
        return folder / "bin/python"

    return build_environment


@cache
def packages_for(unpacked: Path, extra: str) -> list[Distribution]:
    """What tree_rl with an extra is made of: the unpacked wheel, and installed packages."""
    (ours,) = distributions(path=[str(unpacked)])
    found: dict[tuple[str, str], Distribution] = {}
    left = [("tree-rl", ""), ("tree-rl", extra)]
    while left:
        name, wanted = left.pop()
        if (name, wanted) in found:
            continue
        found[name, wanted] = ours if name == "tree-rl" else distribution(name)
        for needed in map(Requirement, found[name, wanted].requires or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": wanted}):
                left += [(canonicalize_name(needed.name), one) for one in ("", *needed.extras)]
    return list(found.values())


def call(python: Path, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """In `folder`, without what this process has on its paths."""
    environment = {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(folder), "COLUMNS": "200"}
    environment |= {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [str(python), *command],
        cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip


def children_seconds() -> float:
    """Processor time of the programs that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


ROWS = [{"uid": "a", "input_ids": [1, 2, last]} for last in (3, 4)]


def test_a_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    code = {name.removeprefix("kernels/") for name in tracked("tree_rl", "kernels/tree_kernels")}
    shipped = {f"tree_rl/shipped/{name}" for name in tracked(*SHIPPED)}
    packaged = {name for name in names if ".dist-info/" not in name}
    assert packaged == {name for name in code if not name.endswith(".md") or "/static/" in name} | shipped


def test_commands_run_with_the_base_alone(environment_with: Build, tmp_path: Path) -> None:
    python = environment_with("")
    written = call(python, tmp_path, *MAIN, "recipes", "here")
    assert (written.returncode, written.stderr) == (0, "")
    files = {str(path.relative_to(tmp_path / "here")) for path in (tmp_path / "here").rglob("*") if path.is_file()}
    assert files == tracked(*SHIPPED)
    again = call(python, tmp_path, *MAIN, "recipes", "here")
    assert again.returncode == 2 and "recipes here: expected a new or empty folder" in again.stderr
    write(tmp_path / "rows.jsonl", ROWS)
    write(tmp_path / "config.json", MODEL_SIZES["0.6b"].config)
    for command, expected in (
        (("inspect", "rows.jsonl"), "0.333"),
        (("plan", "rows.jsonl", "--max-tokens", "2"), "partitioned"),
        (("inspect", "rows.jsonl", "--model", "config.json"), "trees are faster"),
        (("view", "rows.jsonl", "--html", "page.html", "--max-tokens", "2"), "Page of"),
    ):
        done = call(python, tmp_path, *MAIN, *command)
        assert done.returncode == 0 and expected in done.stdout, f"{command}\n{done.stdout}\n{done.stderr}"
    assert "<canvas" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("command", "needed_by", "module", "extra"),
    [
        ((*MAIN, "bench"), "tree-rl: bench", "torch", "train"),
        ((*MAIN, "precompile", "--cache", "a"), "tree-rl: precompile", "torch", "train"),
        ((*MAIN, "doctor"), "tree-rl: doctor", "verl", "verl"),
        (("-c", "import tree_rl.training"), "tree_rl.training", "torch", "train"),
        (("-c", "import tree_rl.models.attention"), "tree_rl.models", "torch", "train"),
        (("-c", "import tree_rl.verl_plugin"), "tree_rl.verl_plugin", "verl", "verl"),
        (("-m", "tree_rl.train"), "tree_rl: tree_rl.verl_plugin", "verl", "verl"),
        (("-m", "tree_rl.train", "dpo"), "tree_rl: tree_rl.verl_plugin", "verl", "verl"),
        (("-m", "tree_rl.sft"), "tree_rl: tree_rl.verl_plugin", "verl", "verl"),
        (("-c", "import tree_rl.rollout.gateway.gateway"), "the gateway", "starlette", "gateway"),
        (("-c", "import tree_rl.run_report.charts"), "the report", "matplotlib", "report"),
        (("-c", f"{AGENTS}; build('mini_swe', {{}}, 'swe', {{}})"), "agent 'mini_swe'", "minisweagent", "agents"),
    ],
)
def test_a_missing_extra_is_named_in_one_line(
    command: tuple[str, ...], needed_by: str, module: str, extra: str, environment_with: Build, tmp_path: Path
) -> None:
    done = call(environment_with(""), tmp_path, *command)
    said = done.stderr.splitlines()[-1].removeprefix("tree_rl.extras.MissingExtraError: ")
    assert done.returncode
    assert done.stderr.count("\n") == 1 or "-c" in command, done.stderr
    assert said == f"{needed_by} needs {module}, which is not installed; pip install 'tree_rl[{extra}]'"


@pytest.mark.parametrize(
    ("extra", "code"),
    [
        slow("train", "import tree_rl.training, tree_rl.models, tree_rl.tree.partition.solver"),
        slow("verl", "import sys, verl; assert 'tree_rl.verl_plugin' in sys.modules; import verl.workers.engine"),
        ("gateway", "import tree_rl.rollout.gateway.gateway, transformers"),
        slow("agents", "import tree_rl.rollout.agents.mini_swe, tree_rl.rollout.sandbox.swe_rex_sandbox"),
        ("report", "import tree_rl.run_report.charts"),
    ],
)
def test_extras_install_what_their_parts_import(extra: str, code: str, environment_with: Build, tmp_path: Path) -> None:
    done = call(environment_with(extra), tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr[-2000:]


def test_an_extra_brings_the_modules_that_messages_promise(unpacked: Path) -> None:
    providers = packages_distributions()
    bare = {package.name for package in packages_for(unpacked, "")}
    for module, package in INSTALLED_BY.items():
        assert module not in providers or not set(providers[module]) & bare, module
        extra = re.fullmatch(r"tree_rl\[(.*)\]", package)
        if extra and module in providers:
            assert set(providers[module]) & {found.name for found in packages_for(unpacked, extra[1])}, module


PINNED = {"torch", "vllm", "verl", "transformers"}


@pytest.mark.parametrize(
    ("extras", "files", "least"),
    [
        (("gpu", "vllm"), ("gpu.txt",), PINNED),
        (("gpu", "vllm", "fa4"), ("gpu.txt", "fa4-vllm.txt"), PINNED | {"flash-attn-4"}),
        (("gpu", "vllm-next", "fa4"), ("vllm-next.txt",), PINNED | {"flash-attn-4"}),
    ],
    ids=("gpu", "with vLLM, on Hopper", "next"),
)
def test_pins_fit_the_extras(extras: tuple[str, ...], files: tuple[str, ...], least: set[str], unpacked: Path) -> None:
    """Files of constraints that are used together pin what they must."""
    lines = "\n".join((unpacked / "tree_rl/shipped/constraints" / name).read_text() for name in files).splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    (ours,) = distributions(path=[str(unpacked)])
    asked = [Requirement(text) for text in ours.requires or ()]
    wanted, seen = {*extras}, set[str]()
    while wanted - seen:
        extra = (wanted - seen).pop()
        seen.add(extra)
        for one in asked:
            if one.marker is not None and one.marker.evaluate({"extra": extra}):
                if canonicalize_name(one.name) == "tree-rl":
                    wanted |= one.extras
                elif one.name in pins:
                    least = least - {one.name}
                    assert one.specifier.contains(pins[one.name]), f"{extra}: {one}, pinned to {pins[one.name]}"
    # verl[vllm] brings vLLM itself.
    assert least <= ({"vllm"} if "vllm" in seen else set())


@pytest.mark.parametrize("name", ("tree_training_in_60_lines", slow("trl_style_trainer")))
def test_examples_train_without_verl(name: str, environment_with: Build, tmp_path: Path) -> None:
    python = environment_with("train")
    absent = "import importlib.util as i; assert not any(map(i.find_spec, ('verl', 'ray', 'tensordict', 'hydra')))"
    assert call(python, tmp_path, "-c", absent).returncode == 0
    (example,) = python.parents[1].glob(f"lib/python*/site-packages/tree_rl/shipped/examples/{name}.py")
    done = call(python, tmp_path, str(example))
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    if name == "trl_style_trainer":
        for words in map(str.split, lines):
            assert float(words[words.index("reward") + 1]) < 0.9 < float(words[words.index("steps,") + 1])
    else:
        whole, partitioned = lines
        assert whole.startswith("whole: 26 tokens of rows as 12 unique ones in 1 forward(s)")
        assert partitioned.startswith("partitions of 4 tokens: 26 tokens of rows as 12 unique ones in 4 forward(s)")
        assert all(float(line.split()[-1]) < 1e-5 for line in lines)


@pytest.mark.slow
def test_a_bare_installation_is_small_and_judges_a_file_within_a_minute(wheel: Path, tmp_path: Path) -> None:
    """Installed by pip from its index, without a link to this environment.

    The minute counts the processor's time, which other processes and the network do not change.
    """
    pip = [sys.executable, "-I", "-m", "pip", "--quiet"]
    # Packages on PYTHONPATH would count as installed.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    probe = [*pip, "download", "--no-deps", "--retries", "0", "-d", tmp_path, "shellingham"]
    if subprocess.run(probe, capture_output=True, check=False, timeout=120).returncode:
        pytest.skip("pip reaches no index of packages")
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv/bin/python"
    install = [*pip, "--python", python, "install", "-c", ROOT / "constraints/cpu.txt", wheel]
    write(tmp_path / "rows.parquet", ROWS)
    before = children_seconds()
    subprocess.run(install, check=True, cwd=tmp_path, env=environment)
    command = str(python.with_name("tree-rl"))
    inspected = call(python, tmp_path, command, "inspect", "rows.parquet")
    assert children_seconds() - before < 60
    assert inspected.returncode == 0 and "0.333" in inspected.stdout, inspected.stderr
    assert "\nVerdict: trees help. Expected: updates " in inspected.stdout
    viewed = call(python, tmp_path, command, "view", "rows.parquet", "--html", "page.html")
    assert viewed.returncode == 0 and (tmp_path / "page.html").stat().st_size, viewed.stderr
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    assert not [module for module in INSTALLED_BY if (site / module).exists()]
    size = sum(file.lstat().st_size for file in (tmp_path / "venv").rglob("*") if not file.is_symlink())
    assert size < BARE_MIB * 2**20


def test_messages_name_only_files_of_the_wheel() -> None:
    """A file of the repository in a text of the package is one that `tree-rl recipes` writes."""
    named = re.compile(r"(?<![\w./])((?:scripts|examples|recipes|constraints)/[\w./]*\w)")
    written = tracked(*SHIPPED)
    folders = {str(parent) for name in written for parent in Path(name).parents}
    unknown = {
        f"{path}: {found}"
        for path in sorted(tracked("tree_rl"))
        if path.endswith(".py")
        for found in named.findall((ROOT / path).read_text(encoding="utf-8"))
        if found not in written | folders and "grpo_trainer" not in found  # verl's own example
    }
    assert not unknown


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_clean_environment_trains(wheel: Path, tmp_path: Path) -> None:
    """Two gigabytes and some minutes: the wheel alone in a new environment, outside the checkout."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv/bin/python"
    # -I: a repository on PYTHONPATH would pass for the installed package.
    install = [python, "-I", "-m", "pip", "install", "-q", "-c", ROOT / "constraints/cpu.txt"]
    subprocess.run([*install, f"{wheel}[verl,agents,report]"], check=True, cwd=tmp_path)
    environment = {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(tmp_path), "VERL_PLATFORM": "cpu"}
    train = "cd here && STEPS=1 bash recipes/grpo/run_qwen3_fsdp2.sh"
    for command in ("tree-rl recipes here", "tree-rl doctor --no-ray", train):
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
