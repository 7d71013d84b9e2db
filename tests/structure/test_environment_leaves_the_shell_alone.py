"""`source scripts/environment.sh` in bash and zsh: it activates, changes no option of the shell and never closes it."""

import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
SHELLS = [
    pytest.param([name, *quiet], id=name, marks=pytest.mark.skipif(shutil.which(name) is None, reason=f"no {name}"))
    for name, quiet in (("bash", ["--norc"]), ("zsh", ["-f"]))
]
LOOK = 'echo "at:$(command -v python) safe:${PYTHONSAFEPATH-} token:${RAY_AUTH_MODE-}"'


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts in a folder whose name needs quotes, and an environment elsewhere that counts as ready."""
    root = tmp_path_factory.mktemp("a checkout")
    shutil.copytree(SCRIPTS, root / "scripts", ignore=shutil.ignore_patterns("cluster"))
    (root / "constraints").mkdir()
    (root / "constraints" / "cpu.txt").write_text("torch==1\n")
    (root / "pyproject.toml").write_text("[project]\n")
    environment = environment_of(root)
    venv.create(environment, symlinks=True)
    both = (root / "pyproject.toml").read_bytes() + (root / "constraints" / "cpu.txt").read_bytes()
    total = subprocess.run(["cksum"], input=both, capture_output=True, check=True).stdout.decode().strip()
    (environment / "tree_rl.stamp").write_text(f"{total} {root}\n")
    return root


def environment_of(checkout: Path) -> Path:
    """Its path needs no quotes."""
    return checkout.parent / "environment"


def run(shell: list[str], checkout: Path, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    own = {"HOME": str(checkout), "PYTHON": sys.executable, "TREE_RL_VENV": str(environment_of(checkout))}
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", **own, **variables}
    return subprocess.run([*shell, "-c", script], cwd=checkout, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("options", ["set +eu", "set -euo pipefail", "set -o pipefail; set -f"])
def test_options_are_what_they_were(shell: list[str], options: str, checkout: Path) -> None:
    script = f"{options}\nset -o >before\nsource scripts/environment.sh\nset -o >after\n{LOOK}"
    ended = run(shell, checkout, script)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"at:{environment_of(checkout)}/bin/python safe:1 token:token\n"
    assert (checkout / "before").read_text() == (checkout / "after").read_text()


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("place", ["no constraints", "", "/nowhere/a'b", "/nowhere/a$b", "/nowhere/a(b)"])
def test_a_failure_is_a_status_not_an_exit(shell: list[str], place: str, checkout: Path) -> None:
    """Ray starts workers by a shell to which it does not quote the path of Python."""
    given = {"TREE_RL_VENV": place}
    said = [f"Ray cannot start workers from {place or checkout / '.venv'}: its path", "Set TREE_RL_VENV to"]
    if place == "no constraints":
        given, said = {"TREE_RL_CONSTRAINTS": "/nowhere/cpu.txt"}, ["/nowhere/cpu.txt"]
    ended = run(shell, checkout, 'source scripts/environment.sh; echo "status $?"', **given)
    assert ended.stdout == "status 1\n" and all(words in ended.stderr for words in said), ended.stderr


def test_arguments_of_a_second_installation_reach_pip_whole(checkout: Path) -> None:
    (checkout / "scripts" / "create_environment.sh").rename(checkout / "scripts" / "kept.sh")
    try:
        (checkout / "scripts" / "create_environment.sh").write_text('printf "<%s>" "$TREE_RL_SIZE" "$@"\n')
        script = 'set -eu; tree_rl_size="4 GB"; tree_rl_second_install=(--no-deps -r "a file"); '
        ended = run(["bash", "--norc"], checkout, f"{script}source scripts/environment.sh")
    finally:
        (checkout / "scripts" / "kept.sh").rename(checkout / "scripts" / "create_environment.sh")
    assert ended.stdout == "<4 GB><--no-deps><-r><a file>"


NO_UV = pytest.mark.skipif(shutil.which("uv", path="/usr/bin:/bin") is not None, reason="uv is there for everybody")


@pytest.mark.parametrize("installer", ("uv", pytest.param("pip", marks=NO_UV)))
def test_uv_installs_where_it_is_there_with_the_settings_of_pip(installer: str, checkout: Path, tmp_path: Path) -> None:
    """Both are stand-ins that write what they are asked for."""
    for name in ("bin", "pip"):
        (tmp_path / name).mkdir()
    (tmp_path / "pip" / "__main__.py").write_text(
        "import sys\n"
        "settings = [\"global.index-url='file:///mirror'\", \"global.find-links='/wheels\\\\n/more'\"]\n"
        "if sys.argv[1] == 'config':\n"
        "    print(*settings, sep='\\n')\n"
        "else:\n"
        "    open('asked', 'w').write('|'.join(sys.argv[1:]))\n"
    )
    if installer == "uv":
        (tmp_path / "bin" / "uv").write_text('#!/bin/sh\nIFS="|"; echo "$*|$UV_DEFAULT_INDEX|$UV_FIND_LINKS" >asked\n')
        (tmp_path / "bin" / "uv").chmod(0o755)
    venv.create(tmp_path / "made", symlinks=True)
    given = {"TREE_RL_VENV": str(tmp_path / "made"), "PYTHONPATH": str(tmp_path)}
    given["PATH"] = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    ended = run(["bash", "--norc"], checkout, "source scripts/environment.sh", **given)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    what = f"-c|{checkout}/constraints/cpu.txt|-e|{checkout}[dev,docs]"
    assert (checkout / "asked").read_text().strip() == (
        f"pip|install|--python|{tmp_path}/made/bin/python|--compile-bytecode|{what}|file:///mirror|/wheels,/more"
        if installer == "uv"
        else f"install|--compile|--disable-pip-version-check|{what}"
    )
