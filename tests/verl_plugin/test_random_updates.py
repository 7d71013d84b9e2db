"""The command that draws random updates: a few of them agree, and an update that differs is named."""

from typing import Any

import pytest
import random_updates

pytestmark = pytest.mark.slow
DRAW = ("--seconds", "0", "--seed", "3", "--setups", "2", "--updates", "3")


def test_drawn_updates_train_as_rows_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert random_updates.main(DRAW) == 0
    assert "6 updates, 0 differ;" in capsys.readouterr().out


def test_an_update_that_differs_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    train = random_updates.train_share

    def slightly_off(*given: Any) -> list[list[random_updates.Found]]:
        found = train(*given)
        for gradient in found[0][0][1].values():
            gradient *= 1 + 1e-4
        return found

    monkeypatch.setattr(random_updates, "train_share", slightly_off)
    assert random_updates.main(DRAW) == 1
    printed = capsys.readouterr().out
    assert "6 updates, 1 differ;" in printed and "DIFFERS model." in printed and "Setup(name=" in printed
