"""The programs in docs/gateway.md and docs/agents.md run as printed."""

import builtins
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def snippet(document: str, language: str, cue: str) -> str:
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    (found,) = [code for code in re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL) if cue in code]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a user works: the tiny tokenizer and the documents' modules."""
    made = tmp_path_factory.mktemp("walk")
    assert "tiny_swe_model.py outputs/tiny" in snippet("gateway.md", "bash", "serve.py")
    with pytest.MonkeyPatch.context() as patch:
        for path in (ROOT / "recipes", ROOT / "recipes" / "swe_tasks"):
            patch.syspath_prepend(str(path))
        import tiny_swe_model

        tiny_swe_model.build_swe_tokenizer().save_pretrained(made / "outputs" / "tiny")
        for name in ("tiny_swe_model", "generate"):
            sys.modules.pop(name)
    (made / "guess.py").write_text(snippet("environments.md", "python", "class GuessEnvironment"))
    (made / "halving.py").write_text(snippet("agents.md", "python", "class HalvingAgent"))
    return made


def test_the_gateway_alone_answers_curl_and_shows_the_row(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def act_in_another_shell(_: str) -> None:
        commands = [capsys.readouterr().out, snippet("gateway.md", "bash", "curl")]
        asked.append(subprocess.run(["bash", "-c", "\n".join(commands)], capture_output=True, text=True).stdout)

    monkeypatch.chdir(folder)
    monkeypatch.setattr(builtins, "input", act_in_another_shell)
    exec(snippet("gateway.md", "python", "class Parrot"), {})
    assert '"content":"Hello, who are you?"' in asked[0], asked
    shown = capsys.readouterr().out
    assert re.match(r"\d+ of \d+ tokens trained: <\|im_start\|>user\nHi\.", shown)
    assert shown.endswith("Hello, who are you?<|im_end|>\n")


def test_an_agent_of_ones_own_plays_an_environment_of_ones_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    exec(snippet("agents.md", "python", "run_task("), {})
    first, *rows = capsys.readouterr().out.splitlines()
    status, reward = first.split()
    assert status == "completed" and 0 < float(reward) < 1
    assert "trained: <|im_start|>user" in rows[0] and "37<|im_end|>" in rows[-1]
