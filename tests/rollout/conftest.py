import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvicorn
from gateway_harness import CHATML, TinyModel, build_model, build_tokenizer
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session", autouse=True)
def quick_servers() -> Iterator[None]:
    """Hundreds of gateways close here, and uvicorn asks ten times a second whether it shall."""

    async def main_loop(self: uvicorn.Server) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(0.005)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uvicorn.Server, "main_loop", main_loop)
        yield


@pytest.fixture(scope="session")
def tiny() -> SimpleNamespace:
    """A tokenizer, a model, and a backend factory over both."""
    tokenizer: PreTrainedTokenizerFast = build_tokenizer()
    model = build_model(tokenizer)

    def backend(answers: dict[str, str | Sequence[int]] | None = None) -> TinyModel:
        return TinyModel(model, tokenizer, None if answers is None else by_last_message(answers))

    def scripted(*turns: str) -> TinyModel:
        """A model that writes these turns, whatever it is asked."""
        left = iter(turns)
        return TinyModel(model, tokenizer, lambda prompt: next(left))

    return SimpleNamespace(tokenizer=tokenizer, model=model, backend=backend, scripted=scripted)


@pytest.fixture
def temporary(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files of this test alone, also of processes that it starts."""
    monkeypatch.setenv("TMPDIR", str(open_folder))
    monkeypatch.setattr(tempfile, "tempdir", str(open_folder))
    return open_folder


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory, tiny: SimpleNamespace) -> Path:
    """The model and its tokenizer on disk, as an embedded server loads them."""
    path = tmp_path_factory.mktemp("model")
    tiny.model.save_pretrained(path)
    tiny.tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def chatml() -> PreTrainedTokenizerFast:
    """A tokenizer whose template writes every message as it is."""
    return build_tokenizer(CHATML)


def by_last_message(answers: dict[str, str | Sequence[int]]):
    """A script that looks for its cues in the last message of the prompt, and fails on one without a cue."""

    def script(prompt: str) -> str | Sequence[int]:
        last = prompt.rsplit("<|im_start|>user", 1)[-1]
        found = [answer for cue, answer in answers.items() if cue in last]
        assert len(found) == 1, f"expected one cue of {list(answers)} in {last!r}"
        return found[0]

    return script
