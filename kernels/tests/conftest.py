"""Uninitialised memory is poisoned with NaN, so that a kernel that reads what it never wrote is caught."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
            made = make(*args, **kwargs)
            return made.fill_(float("nan")) if made.is_floating_point() else made.fill_(-(2**7))

        return poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
    yield
