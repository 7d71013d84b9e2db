"""Every test repeats: property tests draw the same examples everywhere. With `-n 2` two workers share the files."""

import asyncio
import contextlib
import inspect
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from liger_in_interpreter import interpret_liger

if not torch.cuda.is_available():
    # As the kernels' own tests do, which may run in this process: Triton reads it when it is imported.
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["LIGER_FUSED_MOE_AUTOTUNE"] = "0"

settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable")

EXAMPLES = Path(__file__).parents[1] / "examples"
RAY = "ray"
"""Marker, and group of tests that never run at the same time: two clusters would share ports and memory."""


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger's kernels run on this CPU."""
    interpret_liger(monkeypatch)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that users of sandboxes can read: pytest's own are shut whenever another pytest starts."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        yield Path(made)


@pytest.fixture
def tree_rl(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Run the console script's entry point; returns exit code, standard output, standard error."""

    from tree_rl import cli

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tree-rl", *map(str, arguments)])
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), out.getvalue(), err.getvalue()

    return run


@pytest.fixture(scope="session")
def qwen_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer folder with the Qwen vocabulary."""
    folder = tmp_path_factory.mktemp("qwen_tokenizer")
    subprocess.run([sys.executable, str(EXAMPLES / "write_qwen_tokenizer.py"), str(folder)], check=True, timeout=120)
    return folder


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine function runs in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes name no test: packed ones hold the second they were made in, and workers must find the same names."""
    return argname if isinstance(val, bytes) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On several workers Ray's tests are the first: nothing shall wait for them at the end."""
    if config.getoption("loadgroup", False):
        items.sort(key=lambda item: item.get_closest_marker(RAY) is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker takes whole files, so that each builds its fixtures once, and all files with tests of Ray together."""
    from xdist.scheduler import LoadGroupScheduling

    @cache
    def starts_ray(file: str) -> bool:
        # The controller knows tests by name alone, and xdist's groups do not reach it from pytest 9.2's workers.
        return f"mark.{RAY}" in (config.rootpath / file).read_text(encoding="utf-8")

    class Files(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return RAY if starts_ray(file) else file

    return Files(config, log) if config.getoption("dist") == "loadgroup" else None
