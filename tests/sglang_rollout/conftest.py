from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from sglang_harness import ROLLOUT_OVERRIDES, environment
from verl_server import serve
from vllm_harness import save_model


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A model on disk, its tokenizer, and verl's client of the SGLang that serves it."""
    pytest.importorskip("sglang", reason="scripts/test_sglang.sh has SGLang")
    from gateway_harness import build_tokenizer

    tokenizer = build_tokenizer()
    model = save_model(tmp_path_factory.mktemp("model"), tokenizer)
    with serve(model, tokenizer, *ROLLOUT_OVERRIDES, environment=environment()) as everything:
        yield everything
