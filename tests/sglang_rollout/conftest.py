import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from sglang_harness import environment, start_server
from vllm_harness import save_model


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A model on disk, its tokenizer, and verl's client of the SGLang that serves it."""
    pytest.importorskip("sglang", reason="scripts/test_sglang.sh has SGLang")
    import ray
    from gateway_harness import build_tokenizer

    tokenizer = build_tokenizer()
    model = save_model(tmp_path_factory.mktemp("model"), tokenizer)
    before = dict(os.environ)
    os.environ.update(environment())
    ray.init(num_cpus=8, num_gpus=1, include_dashboard=False, log_to_driver=True)
    try:
        manager = start_server(model)
        yield SimpleNamespace(model=model, tokenizer=tokenizer, client=manager.get_client(), manager=manager)
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)
