"""The rollout server process of `rollout.name=hf`: implements verl's server methods with the decode engine.

Requests are coroutines. One thread runs the engine's steps, so the server still answers control messages.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import TokenOutput

from tree_rl.models.flat_attention import needs_eager
from tree_rl.models.images import IMAGE_READERS, reads_images
from tree_rl.models.text_forward import use_language_model
from tree_rl.verl_plugin import compat
from tree_rl.verl_plugin.embedded_rollout.decode import MAX_SLOTS, DecodeEngine, Request
from tree_rl.verl_plugin.embedded_rollout.grouped_attention import GROUPED_SDPA
from tree_rl.verl_plugin.embedded_rollout.hf_options import HFRolloutOptions
from tree_rl.verl_plugin.embedded_rollout.prompt_images import PromptImages
from tree_rl.verl_plugin.embedded_rollout.sampling import parse_sampling
from tree_rl.verl_plugin.embedded_rollout.weight_buckets import load


class HFServer:
    """Token-in, token-out generation for verl's `LLMServerClient`.

    Args:
        replica_rank: index of this server, part of its seed.
        num_threads: CPU threads of the model.
        weights_follow: True if the trainer sends weights before the first request, so that none are read from disk.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model_config: HFModelConfig,
        *,
        replica_rank: int,
        num_threads: int,
        weights_follow: bool,
    ) -> None:
        torch.set_num_threads(num_threads)
        config, model_config = compat.omega_conf_to_dataclass(config), compat.omega_conf_to_dataclass(model_config)
        self.config = config
        self.global_steps: int | None = None
        options = HFRolloutOptions.from_rollout(config)
        model = build_model(config, model_config, weights_follow=weights_follow)
        self.processor: Any = model_config.processor
        self.eos_token_ids = end_token_ids(model, model_config.tokenizer)
        self.engine = DecodeEngine(
            model,
            capacity_tokens=config.max_model_len or config.prompt_length + config.response_length,
            kv_cache_bytes=options.kv_cache_bytes,
            max_running=min(config.max_num_seqs, MAX_SLOTS),
            max_batched_tokens=config.max_num_batched_tokens,
            seed=config.seed + replica_rank,
        )
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode")
        self._futures: dict[int, asyncio.Future[None]] = {}
        self._driver: asyncio.Task[None] | None = None
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._reject = False

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> TokenOutput:
        """Continue a prompt. The arguments are verl's; `sampling_params` has vLLM's names.

        Returns:
            Tokens, their log-probs if requested, `stop_reason` "completed" or "aborted", and in `extra_fields` the
            weight version `global_steps`, `num_cached_tokens` and `finish_reason` (stop, length, abort).

        Raises:
            ValueError: bad prompt or sampling parameters.
            NotImplementedError: video or audio input, or images for a model that reads text.
        """
        if video_data or audio_data:
            raise NotImplementedError("rollout.name=hf generates from text and images, received video or audio data")
        params = {"ignore_eos": self.config.ignore_eos, **sampling_params}
        room = max(self.engine.capacity_tokens - len(prompt_ids), 1)
        sampling = parse_sampling(
            params,
            default_max_tokens=min(self.config.response_length, room),
            limit_tokens=room,
            eos_token_ids=self.eos_token_ids,
            logprobs_mode=self.config.logprobs_mode,
        )
        images = None
        if image_data:
            images = await self._in_thread(self._read_images, list(prompt_ids), image_data, mm_processor_kwargs)
        # Nothing awaits between this check and the request, so that an abort misses none.
        while not self._is_open.is_set():
            if self._reject:
                version = {"global_steps": self.global_steps}
                return TokenOutput(token_ids=[], log_probs=None, stop_reason="aborted", extra_fields=version)
            await self._is_open.wait()
        request = self.engine.request(prompt_ids, sampling, images)
        await self._finished(request)
        return TokenOutput(
            token_ids=request.token_ids,
            log_probs=request.log_probs if sampling_params.get("logprobs", False) else None,
            stop_reason="aborted" if request.finish_reason == "abort" else "completed",
            num_preempted=0,
            extra_fields={
                "global_steps": self.global_steps,
                "num_cached_tokens": request.cached_tokens,
                "finish_reason": request.finish_reason,
            },
        )

    def _read_images(self, prompt_ids: list[int], images: list[Any], options: dict[str, Any] | None) -> PromptImages:
        """Patches as verl's agent loop computes them for the trainer."""
        if not reads_images(self.engine.model):
            raise NotImplementedError("rollout.name=hf: the model reads text alone, received images")
        found = compat.build_multimodal_processor_inputs(
            self.processor, text=[self.processor.image_token * len(images)], images=images, mm_processor_kwargs=options
        )
        return PromptImages.of(self.engine.model, prompt_ids, found["pixel_values"], found["image_grid_thw"])

    async def load_weights(self, bucket: np.ndarray) -> None:
        await self._in_thread(load, self.engine.model, bucket)

    async def finish_weights(self, global_steps: int | None) -> None:
        """Drop prefixes computed with the old weights, and set the new version."""
        await self._in_thread(self.engine.forget_prefixes)
        if global_steps is not None:
            self.global_steps = global_steps

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """End all requests with their tokens so far; later ones wait for `resume_generation`, or are rejected."""
        self._reject = reject_request
        self._is_open.clear()
        aborted = await self._in_thread(self.engine.abort_all)
        self._resolve(aborted)
        return {"aborted_count": len(aborted), "request_ids": []}

    async def resume_generation(self) -> None:
        self._reject = False
        self._is_open.set()

    async def clear_kv_cache(self) -> None:
        await self._in_thread(self.engine.forget_prefixes)

    async def sleep(self, *_args: Any, **_kwargs: Any) -> None:
        await self._in_thread(self.engine.release)

    release_kv_cache = sleep

    async def wake_up(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing: memory is allocated on first use."""

    resume_kv_cache = start_profile = stop_profile = wake_up

    async def _finished(self, request: Request) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures[id(request)] = future
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())
            self._driver.add_done_callback(self._report_failure)
        await future

    async def _drive(self) -> None:
        while not self.engine.is_idle:
            self._resolve(await self._in_thread(self.engine.step))

    def _report_failure(self, driver: asyncio.Task[None]) -> None:
        """If an error stopped the engine, raise it in every waiting request."""
        error = asyncio.CancelledError() if driver.cancelled() else driver.exception()
        if error is None:
            return
        self.engine.abort_all()
        for future in self._futures.values():
            future.set_exception(error)
        self._futures.clear()

    def _resolve(self, finished: list[Request]) -> None:
        for request in finished:
            self._futures.pop(id(request)).set_result(None)

    async def _in_thread(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)


def build_model(config: RolloutConfig, model_config: HFModelConfig, *, weights_follow: bool) -> PreTrainedModel:
    """Build the rollout's copy of the model, with random weights if the trainer sends the real ones.

    Attention is SDPA, or eager if `override_config.attn_implementation=eager` or if SDPA does not support the model.
    """
    hf_config: PretrainedConfig = AutoConfig.from_pretrained(
        model_config.local_hf_config_path, trust_remote_code=model_config.trust_remote_code
    )
    asked = dict(model_config.override_config).get("attn_implementation")
    dtype = getattr(torch, {"half": "float16", "float": "float32"}.get(config.dtype, config.dtype))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    attention: Any = "eager" if asked == "eager" or needs_eager(hf_config) else GROUPED_SDPA
    if attention == GROUPED_SDPA and hf_config.model_type in IMAGE_READERS:
        attention = {"": "sdpa", "text_config": GROUPED_SDPA, "vision_config": "sdpa"}
    options = {
        "dtype": dtype,
        "attn_implementation": attention,
        "trust_remote_code": model_config.trust_remote_code,
    }
    # The trainer's model class, so that weights have the same names.
    auto_class = compat.get_hf_auto_model_class(hf_config)
    model: PreTrainedModel
    if weights_follow:
        model = auto_class.from_config(hf_config, **options)
    else:
        model = auto_class.from_pretrained(model_config.local_path, config=hf_config, **options)
    use_language_model(model)
    return model.to(device)


def end_token_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Return every token that ends a response: the generation config's, the model config's and the tokenizer's."""
    configs = (model.generation_config, model.config.get_text_config(), tokenizer)
    found = [getattr(config, "eos_token_id", None) for config in configs]
    flat = [ids if isinstance(ids, list) else [ids] for ids in found]
    return frozenset(token for ids in flat for token in ids if token is not None)
