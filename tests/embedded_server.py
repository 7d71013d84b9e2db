"""The embedded engine in this process, and verl's client of it."""

from pathlib import Path
from typing import Any

from verl.workers.config import HFModelConfig, RolloutConfig

from tree_rl.verl_plugin.embedded_rollout.server import HFServer


class Client:
    """verl's client without Ray: what `LLMServerClient.generate` adds to a server's answer."""

    def __init__(self, server: HFServer) -> None:
        self.server = server

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **media: Any
    ) -> Any:
        output = await self.server.generate(prompt_ids, sampling_params, request_id, **media)
        for key in ("min_global_steps", "max_global_steps"):
            output.extra_fields.setdefault(key, output.extra_fields.get("global_steps"))
        return output


def describe(model_path: Path | str, **settings: Any) -> HFModelConfig:
    """verl's description of a model."""
    return HFModelConfig(path=str(model_path), override_config={"attn_implementation": "sdpa"}, **settings)


def build_server(model: HFModelConfig, *, rank: int = 0, **rollout: Any) -> HFServer:
    """A server with the model's own weights."""
    usual = {"tensor_model_parallel_size": 1, "prompt_length": 200, "response_length": 100, "dtype": "float32"}
    config = RolloutConfig(name="hf", **{**usual, **rollout})
    return HFServer(config, model, replica_rank=rank, num_threads=1, weights_follow=False)
