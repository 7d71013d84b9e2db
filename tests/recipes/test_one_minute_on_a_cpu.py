"""verl's command with `machine=cpu`, as the documents print it, gives a step of a tiny model within minutes."""

import re
import sys
from pathlib import Path

import pytest
from finished_run import run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from_verl.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## On a CPU")[1].split("\n## ")[0]
CPU_SECONDS = 120.0
FIGURE = re.compile(r"(?:np\.float\d+\()?-?\d[\d.e+-]*\)?")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_printed_command_trains_a_step(tmp_path: Path) -> None:
    (commands,) = re.findall(r"```bash\n(.*?)```", SECTION, re.DOTALL)
    (shown,) = re.findall(r"```\n([^`]*?)```", SECTION.split("```", 2)[2], re.DOTALL)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    prepare, train = commands.split("python -m tree_rl.train", 1)
    used = tmp_path / "cpu_seconds"
    counted = f"{sys.executable} {Path(__file__).with_name('cpu_seconds.py')} {used} step:1"
    script = f"exec 2>&1\n{prepare}\n{counted} python -m tree_rl.train{train}"
    printed = run(["bash", "-ec", script], tmp_path, TORCH_COMPILE_DISABLE="1")
    log = re.sub(r"(?:\x1b\[[\d;]*m|\(\w+ pid=\d+\))+ ?", "", printed)
    for line in filter(None, shown.splitlines()):
        for part in FIGURE.sub("0", line).split("..."):
            assert part.strip(" -") in FIGURE.sub("0", log), line
    (step,) = re.findall(r"^step:1 - .*$", log, re.MULTILINE)
    names = re.findall(r"([\w/]+):", step)[1:]
    assert names.index("timing_s/step") < min(names.index(name) for name in names if name.startswith("tree/"))
    assert float(used.read_text()) < CPU_SECONDS
