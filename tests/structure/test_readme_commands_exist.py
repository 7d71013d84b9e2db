"""What README.md and the documents tell a reader to type or open is there."""

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from tree_rl.verl_plugin.launch.tree_arguments import accept_model_type

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    sorted(path for path in ROOT.glob("*.md"))
    + sorted(ROOT.glob("docs/**/*.md"))
    + sorted(ROOT.glob("examples/**/*.md"))
)
OVERRIDE = re.compile(r"(?<![\w.])(\+?(?:trainer|actor_rollout_ref|critic)(?:\.\w+)+=\w+)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text(encoding="utf-8"))
    assert not [link for link in links if not (document.parent / link).exists()]


def test_scripts_of_the_readme_exist() -> None:
    named = re.findall(
        r"\b(?:bash|source|python) ((?:scripts|examples)/\S+)", (ROOT / "README.md").read_text(encoding="utf-8")
    )
    assert len(named) >= 3
    assert not [name for name in named if not (ROOT / name).is_file()]


@pytest.mark.parametrize("document", ["README.md", "docs/configuration.md", "docs/faq.md"])
def test_overrides_fit_into_stock_verl(document: str) -> None:
    overrides = sorted(set(OVERRIDE.findall((ROOT / document).read_text(encoding="utf-8"))))
    accept_model_type(overrides)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    assert config.trainer.v1.trainer_mode in ("tree_sync", "sync")
