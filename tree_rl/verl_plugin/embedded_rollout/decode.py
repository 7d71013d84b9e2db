"""Continuous batching for a Hugging Face model: the embedded rollout engine, without verl and Ray.

Requests join and leave between steps. The n running requests occupy the first n slots of the cache, which a step reads
as one view; finished sequences stay in later slots as prefixes for new prompts.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from tree_rl.models.images import reads_images
from tree_rl.tree.forest.order import shared_prefix
from tree_rl.verl_plugin.embedded_rollout.prompt_images import ImageFeatures, PromptImages
from tree_rl.verl_plugin.embedded_rollout.sampling import Sampling, sample
from tree_rl.verl_plugin.embedded_rollout.slot_cache import SlotCache, num_slots_within
from tree_rl.verl_plugin.embedded_rollout.slot_forward import NewTokens, forward_logits

MAX_SLOTS = 256
PADDING_FACTOR = 1.5


@dataclass(kw_only=True, slots=True)
class Request:
    """One running generation; `token_ids` and `log_probs` grow."""

    prompt_ids: list[int]
    """[P] tokens to continue."""
    keyed_ids: np.ndarray
    """int64 [P], the prompt with keys of images instead of their tokens; the cache compares these."""
    images: PromptImages | None = None
    """Images of the prompt; None without any."""
    sampling: Sampling
    generator: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    """Generated tokens, including the stop token."""
    log_probs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    """stop, length or abort; None while running."""
    cached_tokens: int = 0
    """Number of prompt tokens whose keys and values were reused."""


class DecodeEngine:
    """Generates for many requests at once. Not thread-safe: one caller at a time.

    Args:
        model: a causal language model with ordinary or sliding-window attention.
        capacity_tokens: limit of prompt plus response of one request.
        kv_cache_bytes: memory for keys and values.
        max_running: limit of requests decoded together.
        max_batched_tokens: limit of padded prompt tokens of one forward; a longer prompt runs alone.
        seed: seed of the generator for requests without a seed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        capacity_tokens: int,
        kv_cache_bytes: int = 2 << 30,
        max_running: int = MAX_SLOTS,
        max_batched_tokens: int = 8192,
        seed: int = 0,
    ) -> None:
        self.model = model.eval()
        config = model.config.get_text_config()
        dtype = next(model.parameters()).dtype
        fitting = num_slots_within(kv_cache_bytes, config, capacity_tokens=capacity_tokens, dtype=dtype)
        slots = min(fitting, MAX_SLOTS)
        self.cache = SlotCache(num_slots=slots, capacity_tokens=capacity_tokens)
        self.capacity_tokens = capacity_tokens
        self.max_running = min(max_running, slots)
        self.max_batched_tokens = max_batched_tokens
        self.features = ImageFeatures(model)
        config = model.config
        self._media = [config.image_token_id, config.video_token_id] if reads_images(model) else []
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._shared_generator = torch.Generator().manual_seed(seed)
        self._clock = 0

    def request(self, prompt_ids: Sequence[int], sampling: Sampling, images: PromptImages | None = None) -> Request:
        """Queue a generation; it starts at the next step.

        Raises a ValueError if a prompt is empty, has ids outside the vocabulary, leaves no room in the context or has
        image tokens without images.
        """
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        if not len(prompt_ids):
            raise ValueError("empty prompt: expected at least one token id")
        if min(prompt_ids) < 0 or max(prompt_ids) >= vocabulary:
            raise ValueError(
                f"prompt has token id {min(prompt_ids) if min(prompt_ids) < 0 else max(prompt_ids)}: expected ids in "
                f"[0, {vocabulary}); do tokenizer and model belong together?"
            )
        if len(prompt_ids) >= self.capacity_tokens:
            raise ValueError(
                f"prompt of {len(prompt_ids)} tokens leaves no room in a context of {self.capacity_tokens}; raise "
                "rollout.max_model_len (default prompt_length + response_length) or shorten the prompt"
            )
        if images is None and any(token in self._media for token in prompt_ids):
            raise ValueError("prompt has tokens of images or videos, but no images; pass image_data")
        generator = self._shared_generator
        if sampling.seed is not None:
            generator = torch.Generator().manual_seed(sampling.seed)
        ids = list(prompt_ids)
        keyed_ids = np.asarray(ids) if images is None else images.keyed(ids)
        request = Request(prompt_ids=ids, keyed_ids=keyed_ids, images=images, sampling=sampling, generator=generator)
        self.waiting.append(request)
        return request

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    @torch.no_grad()
    def step(self) -> list[Request]:
        """Start waiting requests, generate one token for each running one and return those that finished."""
        self._clock += 1
        finished: list[Request] = []
        while self.waiting and len(self.running) < self.max_running:
            first = len(self.running)
            suffixes = [self._start(request) for request in self._next_batch()]
            finished += self._extend(slice(first, len(self.running)), suffixes)
        if self.running:
            finished += self._extend(slice(0, len(self.running)), [_last(request) for request in self.running])
        return finished

    def abort_all(self) -> list[Request]:
        """End all requests with their tokens so far, and return them."""
        aborted = [*self.running, *self.waiting]
        for request in aborted:
            request.finish_reason = "abort"
        self.running.clear()
        self.waiting.clear()
        return aborted

    def forget_prefixes(self) -> None:
        """Drop the reusable prefixes because the weights changed. Running requests keep theirs."""
        self.cache.forget(len(self.running))
        self.features.forget()

    def release(self) -> None:
        if self.is_idle:
            self.cache.release()
            self.features.forget()

    def _next_batch(self) -> list[Request]:
        """Take waiting requests, in order, for one padded forward.

        A request that shares a longer prefix with another request of the batch than with the cache waits for the next
        batch, when the cache holds that prefix.
        """
        batch: list[Request] = []
        suffixes: list[int] = []
        prompts: list[np.ndarray] = []
        left: list[Request] = []
        room = self.max_running - len(self.running)
        while self.waiting and len(batch) < room:
            request = self.waiting.popleft()
            prompt = request.keyed_ids
            _, cached = self.cache.longest_prefix(prompt)
            suffix = len(prompt) - cached
            width = max([suffix, *suffixes])
            padded = width * (len(batch) + 1)
            fits = not batch or (
                padded <= self.max_batched_tokens and padded <= PADDING_FACTOR * (sum(suffixes) + suffix) + 64
            )
            if fits and not any(shared_prefix(prompt, other) > cached + 16 for other in prompts):
                batch.append(request)
                suffixes.append(suffix)
                prompts.append(prompt)
            else:
                left.append(request)
        self.waiting.extendleft(reversed(left))
        return batch

    def _start(self, request: Request) -> NewTokens:
        """Put the longest cached prefix of the request's prompt into the next slot; return the rest of the prompt."""
        target = len(self.running)
        source, shared = self.cache.longest_prefix(request.keyed_ids)
        continues = source >= target and shared == self.cache.length_S[source]
        # A prompt that continues a finished sequence takes its slot, other prompts the least recently used one.
        victim = source if continues else target + int(self.cache.last_used_S[target:].argmin())
        self.cache.swap(victim, target)
        source = {victim: target, target: victim}.get(source, source)
        self.cache.copy_prefix(source, target, shared)
        request.cached_tokens = shared
        self.running.append(request)
        new = NewTokens(ids=request.prompt_ids[shared:], keyed_ids=request.keyed_ids[shared:])
        if request.images is not None:
            new.position_3Q = request.images.positions(shared)
            new.images = self.features.of_tokens(request.images, shared)
        return new

    def _extend(self, rows: slice, new: list[NewTokens]) -> list[Request]:
        """Run new tokens of some running requests, sample their next tokens and remove those that are done."""
        logits_RV = forward_logits(self.model, self.cache, rows, new)
        requests = self.running[rows]
        tokens, log_probs = sample(
            logits_RV,
            [request.sampling for request in requests],
            [request.generator for request in requests],
            never=self._media,
        )
        for offset, request in enumerate(requests):
            self.cache.append_token_ids(rows.start + offset, new[offset].keyed_ids)
            self.cache.last_used_S[rows.start + offset] = self._clock
            request.token_ids.append(tokens[offset])
            request.log_probs.append(log_probs[offset])
            if tokens[offset] in request.sampling.stop_token_ids:
                request.finish_reason = "stop"
            elif len(request.token_ids) >= request.sampling.max_tokens:
                request.finish_reason = "length"
        finished = [slot for slot in range(rows.start, rows.stop) if self.running[slot].finish_reason]
        return [self._retire(slot) for slot in reversed(finished)]

    def _retire(self, slot: int) -> Request:
        last = len(self.running) - 1
        self.cache.swap(slot, last)
        request, self.running[slot] = self.running[slot], self.running[last]
        self.running.pop()
        return request


def _last(request: Request) -> NewTokens:
    """The last generated token of a running request."""
    new = NewTokens(ids=request.token_ids[-1:], keyed_ids=np.array(request.token_ids[-1:]))
    if request.images is not None:
        new.position_3Q = request.images.position_behind(len(request.token_ids) - 1)
    return new
