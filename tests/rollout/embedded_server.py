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


def build_server(model_path: Path, **settings: Any) -> tuple[HFModelConfig, HFServer]:
    """A server with the model's own weights, and verl's description of the model, which `settings` change."""
    rollout = RolloutConfig(
        name="hf", tensor_model_parallel_size=1, prompt_length=200, response_length=100, dtype="float32"
    )
    model = HFModelConfig(path=str(model_path), override_config={"attn_implementation": "sdpa"}, **settings)
    return model, HFServer(rollout, model, replica_rank=0, num_threads=1, weights_follow=False)
