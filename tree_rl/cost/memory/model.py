"""Predicts the memory of one forward and backward, on the device and on the host, from the model's shape.

The terms: layer inputs kept for the backward, the working set of one layer during its backward, and the head's chunk
of logits. Weights, gradients and optimizer state are not included. Tokens are those of the forest; if ranks share
them, bytes are per rank.
Legend: n tokens of a forward, P tokens of its past, R of its tokens that the head reads.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property

from tree_rl.cost.cost_model import ModelShape

FLOAT32 = 4
GIB = 2**30
CHUNK_TENSORS, TRITON_CHUNK_TENSORS = 4.0, 1.5
"""Float32 tensors as large as a chunk of logits that the head's backward holds: with plain torch, with Triton."""
IN_FLIGHT = 2
"""Offloaded layers whose inputs are on the device at a time: one that runs and one that is being copied."""
MOST_TOKENS = 1 << 40
"""More than any device holds."""
INDEX_BYTES = 40
"""Bytes of indices per token: id, position, depth, subtree end, and the loss's indices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemorySaving:
    """Chosen per micro-batch by the memory model; the default keeps everything on the device."""

    offloaded_layers: int = 0
    """Number of decoder layers, from the first, whose checkpointed inputs are kept in host memory."""
    tile_tokens: int | None = None
    """Tokens per tile of each layer's MLP; None runs the MLP over all tokens at once."""
    relays_on_host: bool = False
    """True keeps the keys, values and states for child partitions in host memory."""


KEEP_ALL = MemorySaving()


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """Most bytes alive at a time, without weights, gradients and optimizer state."""

    device: float
    host: float = 0.0
    """Bytes of offloaded tensors in host memory."""


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """Memory that a decoder's forward and backward need; properties are bytes per token, methods return bytes."""

    shape: ModelShape
    value_bytes: int = 2
    """Bytes of one activation: 2 in bf16, 4 in float32."""
    checkpointing: bool = True
    """True if layers are recomputed in the backward, so that only their inputs are kept."""
    fused: bool = False
    """True with Liger's norms and MLPs, which save fewer tensors."""
    head_norms: bool = False
    """True if queries and keys are normalised."""
    logits_bytes: float = 0.0
    """Most bytes of a chunk of float32 logits in the head."""
    chunk_tensors: float = CHUNK_TENSORS
    """Tensors as large as a chunk of logits that the head's backward holds."""
    sums_query_gradients: bool = False
    """True if attention's backward accumulates query gradients in float32, as flash-attn-4 does."""
    attention_block: int = 0
    """Query tokens per block of portable attention, which takes all their keys at once; 0 for fused kernels."""
    offloads: bool = True
    """True if host memory is separate from the device's."""
    tiles: bool = True
    """True if the MLPs can run in tiles."""
    sequence_ranks: int = 1
    """Ranks that share a forest's tokens."""
    working_scale: float = 1.0
    """Measured working set of a layer over the predicted one."""

    def scaled(self, working_scale: float) -> "MemoryModel":
        """Copy with another `working_scale`."""
        return replace(self, working_scale=working_scale)

    @property
    def boundary(self) -> float:
        """Hidden state between two layers."""
        return self.value_bytes * self.shape.hidden

    @property
    def keys_and_values(self) -> float:
        """Keys and values of one layer, for this rank's heads."""
        return self._all_keys_and_values / self.sequence_ranks

    @property
    def relayed(self) -> float:
        """Keys and values of all layers."""
        return self.shape.num_attention_layers * self.keys_and_values

    @property
    def relayed_gradients(self) -> float:
        """Gradients of the keys and values of all layers, accumulated in at least float32."""
        sums = max(FLOAT32, self.value_bytes) * (self._key_width + self._value_width)
        return self.shape.num_attention_layers * sums / self.sequence_ranks

    @property
    def graph(self) -> float:
        """Tensors of all layers that are kept for the backward."""
        if self.checkpointing:
            return self.shape.layers * self.boundary
        own_input = self.boundary if self._keeps_norm_input else 0.0
        return self.shape.layers * (self._scaled(self._attention_saves() + self._mlp_saves) + own_input)

    @property
    def last_norm(self) -> float:
        """Input and saved tensors of the norm before the head."""
        return self.boundary + self._norm(self.shape.hidden)

    @property
    def inputs(self) -> float:
        """Ids, positions, and the rotary embedding that every layer reads."""
        return INDEX_BYTES + 2 * self.value_bytes * self.shape.head_dim / self.sequence_ranks

    def whole(self, tokens: int, head_tokens: int | None = None, saving: MemorySaving = KEEP_ALL) -> Peak:
        """Peak of a forest that runs in one forward; it occurs in the backward of the last layer or of the head.

        Args:
            tokens: n. Path lengths do not matter: attention keeps nothing that grows with visible pairs.
            head_tokens: R; None: all.
            saving: offloading and tiling.
        """
        waiting = self.waiting(tokens, saving)
        working = max(self.head(tokens, head_tokens), self.layer_backward(tokens, tile_tokens=saving.tile_tokens))
        return Peak(device=waiting.device + self.inputs * tokens + working, host=waiting.host)

    def waiting(self, tokens: int, saving: MemorySaving, *, in_flight: int = IN_FLIGHT) -> Peak:
        """Bytes of all layers kept for the backward, on the device and on the host.

        Args:
            tokens: n.
            saving: offloading and tiling.
            in_flight: offloaded layers whose inputs are on the device; 0 for a partition that is not running.
        """
        away = min(saving.offloaded_layers, self.shape.layers) if self.checkpointing else 0
        on_device = self.graph - max(away - in_flight, 0) * self.boundary
        own = tokens / self.sequence_ranks
        return Peak(device=on_device * own, host=away * self.boundary * own)

    def layer_input(self, tokens: int) -> float:
        """Bytes of the input of one layer."""
        return self.boundary * tokens / self.sequence_ranks

    def head(self, tokens: int, head_tokens: int | None = None) -> float:
        """Bytes that the head, its backward and the norm before it need."""
        reads = tokens if head_tokens is None else min(head_tokens, tokens)
        hidden, vocabulary = self.shape.hidden, self.shape.vocab
        all_logits = FLOAT32 * reads * vocabulary / self.sequence_ranks
        logits = min(self.logits_bytes, all_logits) * self.chunk_tensors
        gradient = FLOAT32 * hidden + (self.boundary if self.value_bytes < FLOAT32 else 0)
        weight = self.value_bytes * hidden * vocabulary
        states = self.last_norm * tokens + (self.boundary + gradient) * reads
        return states / self.sequence_ranks + logits + weight

    def head_waits(self, tokens: int, head_tokens: int) -> float:
        """Bytes kept for the backward of the head and of the norm before it; the norm's output is not kept."""
        reads = min(head_tokens, tokens)
        return ((self.last_norm - self.boundary) * tokens + self.boundary * reads) / self.sequence_ranks

    def layer_forward(self, tokens: int, *, tile_tokens: int | None) -> float:
        """Bytes that one layer's forward needs, besides its input, if nothing is kept: in its MLP or its attention."""
        own = tokens / self.sequence_ranks
        at_once = own if tile_tokens is None else min(tile_tokens, own)
        mlp = 2 * self.boundary * own + 3 * self._width_bytes * at_once
        # Three copies of queries, keys and values: projected, normalised or rotated, and as attention reads them.
        attention = (self.boundary + 3 * self.value_bytes * (self._query_width + self._key_width)) * own
        return self._scaled(max(mlp, attention))

    def layer_backward(self, tokens: int, past: int = 0, *, tile_tokens: int | None) -> float:
        """Peak bytes of one layer's recomputation and backward, in its MLP or its attention.

        Args:
            tokens: n.
            past: P.
            tile_tokens: tokens of a tile of the MLP; None: all at once.
        """
        gradient, is_tiled = self.boundary, tile_tokens is not None
        kept = self._attention_saves(is_tiled)
        own, own_past = tokens / self.sequence_ranks, past / self.sequence_ranks
        weights: float = self._largest_weight
        if tile_tokens is None:
            mlp: float = own * (self._mlp_saves + self._mlp_gradients + gradient)
        else:
            # Norms run in tiles too; sums over tiles are float32.
            mlp = own * (self._mlp_input(is_tiled) + 2 * gradient)
            mlp += min(tile_tokens, own) * (self._mlp_saves + self._mlp_gradients)
            weights = 3.0 * (FLOAT32 + self.value_bytes) * self.shape.hidden * self.shape.intermediate
        keys: float = max(FLOAT32, self.value_bytes) * (self._key_width + self._value_width)
        keys += self._all_keys_and_values if self.value_bytes < FLOAT32 else 0
        if self.attention_block:
            # Key and value gradients of one block, and its mask.
            keys += self._all_keys_and_values + self.value_bytes * min(self.attention_block, tokens)
        queries = (2 * self.value_bytes + (FLOAT32 if self.sums_query_gradients else 0)) * self._query_width
        # All tokens for 1 / S of the heads are as many values as 1 / S of the tokens for all heads.
        attention = own * (gradient + queries) + (own + own_past) * keys
        if self.sequence_ranks > 1:
            # Send and receive buffers of one exchange.
            attention += own * 2 * self.value_bytes * self._query_width
        saved = kept * own + self._all_keys_and_values * own_past
        if not self.checkpointing:
            # `graph` already counts what layers save.
            mlp, attention, saved = mlp - own * self._mlp_saves, attention - own * kept, 0.0
        return self._scaled(saved + max(mlp, attention, 0.0)) + weights

    def bytes_of(self, tokens: int) -> float:
        """Predicted device peak of a forest that runs whole, without offloading or tiles; the head reads all tokens."""
        return self.whole(tokens).device

    def tokens_of(self, device_bytes: float) -> int:
        """Inverse of `bytes_of`: most tokens within `device_bytes`, at least 1."""
        return max(1, bisect_right(range(MOST_TOKENS), device_bytes, key=self.bytes_of) - 1)

    def _scaled(self, working: float) -> float:
        return self.working_scale * working

    @cached_property
    def _query_width(self) -> int:
        return self.shape.heads * self.shape.head_dim

    @cached_property
    def _key_width(self) -> int:
        """Ranks that share a key-value head have a copy each."""
        return math.lcm(self.shape.kv_heads, self.sequence_ranks) * self.shape.head_dim

    @cached_property
    def _value_width(self) -> int:
        return self._key_width // self.shape.head_dim * self.shape.value_size

    @cached_property
    def _output_width(self) -> int:
        return self.shape.heads * self.shape.value_size

    @cached_property
    def _all_keys_and_values(self) -> float:
        """Keys and values of one layer, for all heads."""
        return self.value_bytes * (self._key_width + self._value_width)

    @cached_property
    def _keeps_norm_input(self) -> bool:
        """A fused norm, or one that computes in its input's dtype, saves its input; others save a float32 copy."""
        return self.fused or self.value_bytes >= FLOAT32

    def _norm(self, width: int, is_tiled: bool = False) -> float:
        """Tensors saved by a norm besides its input: normalised values, and the output, saved by the next product."""
        if self.fused or is_tiled:
            return self.value_bytes * width
        copy = 0 if self._keeps_norm_input else FLOAT32
        return (copy + 2 * self.value_bytes) * width

    def _attention_saves(self, is_tiled: bool = False) -> float:
        """Saved tensors: the first norm's; queries, keys and values; the output and its log-sum-exp."""
        e, query, key = self.value_bytes, self._query_width, self._key_width
        projected: float = e * (query + key)
        if self.head_norms:
            own_input = e * (query + key) if self._keeps_norm_input else 0
            projected = own_input + self._norm(query + key)
        outputs = e * (self._value_width + self._output_width) + FLOAT32 * self.shape.heads
        # The exchange returns the output as a new tensor.
        exchanged = e * self._output_width if self.sequence_ranks > 1 else 0
        return self._norm(self.shape.hidden, is_tiled) + projected + self._latent_saves + outputs + exchanged

    @cached_property
    def _latent_saves(self) -> float:
        """Saved tensors of latent attention: latent vectors, their norms, the projection that holds the values."""
        latent = self.shape.latent
        if latent is None:
            return 0.0
        projected = latent.key_value + latent.rotary + self.shape.heads * (self.shape.head_dim - latent.rotary)
        norms = self._norm(latent.key_value)
        if latent.query is not None:
            projected, norms = projected + latent.query, norms + self._norm(latent.query)
        return self.value_bytes * projected + norms

    @cached_property
    def _width_bytes(self) -> float:
        return self.value_bytes * self.shape.intermediate

    @cached_property
    def _largest_weight(self) -> float:
        """Bytes of the largest weight's gradient, before it is accumulated."""
        return self.boundary * self.shape.intermediate / max(self.shape.active_experts, 1)

    def _mlp_input(self, is_tiled: bool = False) -> float:
        """Saved tensors and input of the second norm."""
        own_input = self.boundary if self._keeps_norm_input or is_tiled else 0
        return self._norm(self.shape.hidden, is_tiled) + own_input

    @cached_property
    def _mlp_saves(self) -> float:
        """Saved tensors: the second norm's; gate, activated gate, up and product. Liger recomputes one of the four."""
        of_experts = 2 * self.shape.active_experts * self.boundary
        return self._mlp_input() + of_experts + (3 if self.fused else 4) * self._width_bytes

    @cached_property
    def _mlp_gradients(self) -> float:
        """Gradients of gate and up; Liger needs only that of the product and writes the others over saved tensors."""
        return (1 if self.fused else 2) * self._width_bytes + self.shape.active_experts * self.boundary


def assumed_memory_model(shape: ModelShape) -> MemoryModel:
    """Memory model for the usual setup: bf16, checkpointing, no Liger, flash-attn-4, an 80 GiB GPU."""
    return MemoryModel(
        shape=shape,
        head_norms=shape.latent is None,
        logits_bytes=80 * GIB / 64,
        chunk_tensors=TRITON_CHUNK_TENSORS,
        sums_query_gradients=True,
        tiles=shape.active_experts == 0,
    )
