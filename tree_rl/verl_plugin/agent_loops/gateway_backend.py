"""Connects the recording gateway to verl's LLM servers (vLLM, SGLang, the embedded engine)."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ray.exceptions import RayError, RayTaskError

from tree_rl.rollout.gateway.backend import BackendError, FinishReason, Generation
from tree_rl.verl_plugin.agent_loops.session_images import SessionImages

SEED_NAMES: Mapping[str, str] = {"sglang": "sampling_seed"}
"""Name of a request's seed by `rollout.name`, if it is not `seed`. SGLang refuses unknown names."""


class VerlBackend:
    """Adapts verl's client to the gateway's interface.

    verl cannot cancel a request: if an agent disconnects, the server still finishes its answer, and we drop it.

    Args:
        client: verl's `LLMServerClient`.
        end_token_ids: special tokens, with which an answer ends if the model ended it.
        server: verl's `rollout.name`.
        images: images of the sessions, whose numbers prompts have; None for text.
    """

    def __init__(
        self,
        client: Any,
        *,
        end_token_ids: frozenset[int],
        server: str = "vllm",
        images: SessionImages | None = None,
    ) -> None:
        self._client = client
        self._images = images
        self._end_token_ids = end_token_ids
        self._server = server
        self._seed_name = SEED_NAMES.get(server, "seed")

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, Any], session: str
    ) -> Generation:
        named = {self._seed_name if name == "seed" else name: value for name, value in sampling.items()}
        if "json_schema" in named:
            named |= await self._json_constraint(named.pop("json_schema"))
        ids, seen = list(prompt_ids), dict[str, Any]()
        if self._images is not None:
            ids, images = self._images.split(prompt_ids)
            seen = {"image_data": images, "mm_processor_kwargs": self._images.options} if images else {}
        try:
            # The router sends all calls of an id to one server, which has their prefix cached.
            output = await self._client.generate(
                request_id=session,
                prompt_ids=ids,
                sampling_params={**named, "max_tokens": max_tokens},
                **seen,
            )
        except RayTaskError as error:
            # The agent gets the server's message without Ray's traceback.
            if isinstance(error.cause, ValueError):
                raise ValueError(str(error.cause)) from error
            raise BackendError(f"model server: {error}", status=500) from error
        except RayError as error:
            raise BackendError(f"model server: {error}", status=500) from error
        token_ids = tuple(output.token_ids)
        # vLLM reports no log-probs for an answer that was aborted before its first token.
        log_probs = output.log_probs if token_ids else ()
        return Generation(
            token_ids=token_ids,
            log_probs=None if log_probs is None else tuple(log_probs),
            finish_reason=self._finish_reason(output, token_ids),
            min_version=output.extra_fields.get("min_global_steps"),
            max_version=output.extra_fields.get("max_global_steps"),
            cached_tokens=output.extra_fields.get("num_cached_tokens"),
            routes=None if output.routed_experts is None else np.asarray(output.routed_experts),
        )

    async def _json_constraint(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """The sampling parameters with which a server samples only JSON of a schema."""
        if self._server == "vllm":
            # The import takes seconds, so only sessions that need it import it.
            return {"structured_outputs": await asyncio.to_thread(_structured_outputs, schema)}
        return {"json_schema": json.dumps(schema)}

    def _finish_reason(self, output: Any, token_ids: tuple[int, ...]) -> FinishReason:
        """The finish reason by the last token, because verl reports both stop and length as completed."""
        if output.stop_reason in ("aborted", "abort"):
            return "abort"
        return "stop" if token_ids and token_ids[-1] in self._end_token_ids else "length"


def _structured_outputs(schema: Mapping[str, Any]) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(json=dict(schema))
