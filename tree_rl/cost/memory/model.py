"""Bytes that one forward and backward keep alive, on the device and on the host, from the model's shape.

Terms follow the code that runs: inputs of layers that wait for the backward, what one layer saves and needs while its
backward runs, the head's chunk of logits. Weights, gradients and optimizer state are counted apart. No torch here.
Tokens are those of the forest; where ranks share them, bytes are those of one rank.
Legend: n tokens of a forward, P tokens of its past, R of its tokens that the head reads.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from tree_rl.cost.cost_model import ModelShape
from tree_rl.cost.memory.saving import MemorySaving

FLOAT32 = 4
GIB = 2**30
CHUNK_TENSORS, TRITON_CHUNK_TENSORS = 4.0, 1.5
"""Float32 tensors of the size of a chunk of logits that the head's backward holds, by torch alone and by Triton."""
IN_FLIGHT = 2
"""Offloaded layers whose inputs are on the device at a time: the one that runs and the one that is on its way."""
INDEX_BYTES = 40
"""Bytes of indices per token: id, position and depth, the end of its subtree, and where the loss reads it."""
KEEP_ALL = MemorySaving()


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """Most bytes alive at a time, weights, gradients and optimizer state apart."""

    device: float
    """On the device."""
    host: float = 0.0
    """Bytes in host memory, of tensors that wait there."""


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """What a decoder's forward and backward keep alive; bytes per token unless a name says otherwise."""

    shape: ModelShape
    """Sizes of the decoder."""
    value_bytes: int = 2
    """Bytes of one activation: 2 in bf16, 4 in float32."""
    checkpointing: bool = True
    """True if layers run again in the backward, so that only their inputs wait."""
    fused: bool = False
    """True if norms and MLPs are Liger's, which save less."""
    head_norms: bool = False
    """True if queries and keys have a norm of their own."""
    logits_bytes: float = 0.0
    """Bytes of float32 logits that the head holds at a time, at most: one chunk."""
    chunk_tensors: float = CHUNK_TENSORS
    """Tensors of that size that its backward holds."""
    sums_query_gradients: bool = False
    """True if attention's backward sums the gradients of queries in float32 as well, as flash-attn-4 does."""
    attention_block: int = 0
    """Query tokens that attention takes at a time with all their keys; 0 for kernels, which take tiles."""
    offloads: bool = True
    """True if host memory is separate from the device's."""
    tiles: bool = True
    """True if the MLPs can run in tiles."""
    sequence_ranks: int = 1
    """Ranks that share a forest's tokens."""
    working_scale: float = 1.0
    """What measuring found a layer's working set to be, over what is counted here."""

    def scaled(self, working_scale: float) -> "MemoryModel":
        """The same model with another working set of a layer."""
        return replace(self, working_scale=working_scale)

    @property
    def boundary(self) -> float:
        """Hidden state between two layers."""
        return self.value_bytes * self.shape.hidden

    @property
    def keys_and_values(self) -> float:
        """Of one layer, of the rank's own heads."""
        return self._all_keys_and_values / self.sequence_ranks

    @property
    def relayed(self) -> float:
        """Keys and values of all layers."""
        return self.shape.num_attention_layers * self.keys_and_values

    @property
    def relayed_gradients(self) -> float:
        """Their gradients, which are summed in at least float32."""
        sums = 2 * max(FLOAT32, self.value_bytes) * self._key_width
        return self.shape.num_attention_layers * sums / self.sequence_ranks

    @property
    def graph(self) -> float:
        """What waits for the backward of all layers."""
        if self.checkpointing:
            return self.shape.layers * self.boundary
        own_input = self.boundary if self._keeps_norm_input else 0.0
        return self.shape.layers * (self._scaled(self._attention_saves() + self._mlp_saves) + own_input)

    @property
    def last_norm(self) -> float:
        """What the norm before the head saves, and its input."""
        return self.boundary + self._norm(self.shape.hidden)

    @property
    def inputs(self) -> float:
        """Ids and positions, and the rotary embedding, which every layer reads again."""
        return INDEX_BYTES + 2 * self.value_bytes * self.shape.head_dim / self.sequence_ranks

    def whole(self, tokens: int, head_tokens: int | None = None, saving: MemorySaving = KEEP_ALL) -> Peak:
        """Peak of a forest that runs in one forward: the last layer's backward, or the head's.

        Args:
            tokens: n. How long its paths are does not matter: attention keeps nothing that grows with visible pairs.
            head_tokens: R; None: all.
            saving: what it does to need less.
        """
        waiting = self.waiting(tokens, saving)
        working = max(self.head(tokens, head_tokens), self.layer_backward(tokens, tile_tokens=saving.tile_tokens))
        return Peak(device=waiting.device + self.inputs * tokens + working, host=waiting.host)

    def waiting(self, tokens: int, saving: MemorySaving, *, in_flight: int = IN_FLIGHT) -> Peak:
        """Where what waits for the backward of all layers lies.

        Args:
            tokens: n.
            saving: what the forest does to need less.
            in_flight: offloaded layers whose inputs are on the device; 0 of a partition that does not run.
        """
        away = min(saving.offloaded_layers, self.shape.layers) if self.checkpointing else 0
        on_device = self.graph - max(away - in_flight, 0) * self.boundary
        own = tokens / self.sequence_ranks
        return Peak(device=on_device * own, host=away * self.boundary * own)

    def layer_input(self, tokens: int) -> float:
        """Bytes of the input of one layer."""
        return self.boundary * tokens / self.sequence_ranks

    def head(self, tokens: int, head_tokens: int | None = None) -> float:
        """Bytes that the norm before the head, the head and its backward need."""
        reads = tokens if head_tokens is None else min(head_tokens, tokens)
        hidden, vocabulary = self.shape.hidden, self.shape.vocab
        of_own_reads = FLOAT32 * reads * vocabulary / self.sequence_ranks
        logits = min(self.logits_bytes, of_own_reads) * self.chunk_tensors
        gradient = FLOAT32 * hidden + (self.boundary if self.value_bytes < FLOAT32 else 0)
        of_weight = self.value_bytes * hidden * vocabulary
        own = self.last_norm * tokens + (self.boundary + gradient) * reads
        return own / self.sequence_ranks + logits + of_weight

    def head_waits(self, tokens: int, head_tokens: int | None = None) -> float:
        """What waits for the backward of the head and of the norm before it, whose output the head does not keep."""
        reads = tokens if head_tokens is None else min(head_tokens, tokens)
        return ((self.last_norm - self.boundary) * tokens + self.boundary * reads) / self.sequence_ranks

    def layer_forward(self, tokens: int, *, tile_tokens: int | None = None) -> float:
        """Bytes that one layer needs beside its input where nothing is kept: in its MLP, or in its attention."""
        own = tokens / self.sequence_ranks
        at_once = own if tile_tokens is None else min(tile_tokens, own)
        mlp = 2 * self.boundary * own + 3 * self._width_bytes * at_once
        # Queries, keys and values, as projected, normalised or turned, and as attention reads them.
        attention = (self.boundary + 3 * self.value_bytes * (self._query_width + self._key_width)) * own
        return self._scaled(max(mlp, attention))

    def layer_backward(self, tokens: int, past: int = 0, *, tile_tokens: int | None = None) -> float:
        """Bytes of one layer that runs again and then backward: its MLP's backward, or its attention's.

        Args:
            tokens: n.
            past: P.
            tile_tokens: of a tile of the MLP; None: all at once.
        """
        gradient, is_tiled = self.boundary, tile_tokens is not None
        kept = self._attention_saves(is_tiled)
        own, own_past = tokens / self.sequence_ranks, past / self.sequence_ranks
        weights: float = self._largest_weight
        if tile_tokens is None:
            mlp: float = own * (self._mlp_saves + self._mlp_gradients + gradient)
        else:
            # Norms run in tiles, too; sums over tiles are float32.
            mlp = own * (self._mlp_input(is_tiled) + 2 * gradient)
            mlp += min(tile_tokens, own) * (self._mlp_saves + self._mlp_gradients)
            weights = 3.0 * (FLOAT32 + self.value_bytes) * self.shape.hidden * self.shape.intermediate
        keys: float = max(FLOAT32, self.value_bytes) * 2 * self._key_width
        keys += self._all_keys_and_values if self.value_bytes < FLOAT32 else 0
        if self.attention_block:
            # Gradients of the block's keys and values, and its mask.
            keys += self._all_keys_and_values + self.value_bytes * min(self.attention_block, tokens)
        queries = (2 * self.value_bytes + (FLOAT32 if self.sums_query_gradients else 0)) * self._query_width
        # All tokens of the own heads are as many values as the own tokens of all heads.
        attention = own * (gradient + queries) + (own + own_past) * keys
        if self.sequence_ranks > 1:
            # What one exchange sends and receives.
            attention += own * 2 * self.value_bytes * self._query_width
        saved = kept * own + self._all_keys_and_values * own_past
        if not self.checkpointing:
            # What layers save is part of the graph.
            mlp, attention, saved = mlp - own * self._mlp_saves, attention - own * kept, 0.0
        return self._scaled(saved + max(mlp, attention, 0.0)) + weights

    def bytes_of(self, tokens: int) -> float:
        """Predicted peak of a plain whole forest of so many tokens, all of which the head reads."""
        return self.whole(tokens).device

    def tokens_of(self, device_bytes: float) -> int:
        """Most tokens of a plain whole forest within so many bytes, at least 1."""
        low, high = 1, 2
        while self.bytes_of(high) <= device_bytes:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.bytes_of(middle) <= device_bytes else (low, middle)
        return low

    def _scaled(self, working: float) -> float:
        return self.working_scale * working

    @cached_property
    def _query_width(self) -> int:
        return self.shape.heads * self.shape.head_dim

    @cached_property
    def _key_width(self) -> int:
        """Ranks of which several read one key-value head have a copy each."""
        return math.lcm(self.shape.kv_heads, self.sequence_ranks) * self.shape.head_dim

    @cached_property
    def _all_keys_and_values(self) -> float:
        """Of one layer, of all heads."""
        return 2 * self.value_bytes * self._key_width

    @cached_property
    def _keeps_norm_input(self) -> bool:
        """A norm that computes in its input's dtype, or fused, saves its input; another saves a float32 copy."""
        return self.fused or self.value_bytes >= FLOAT32

    def _norm(self, width: int, is_tiled: bool = False) -> float:
        """What a norm saves beside its input: the normalised values, and its output, which the next product saves."""
        if self.fused or is_tiled:
            return self.value_bytes * width
        copy = 0 if self._keeps_norm_input else FLOAT32
        return (copy + 2 * self.value_bytes) * width

    def _attention_saves(self, is_tiled: bool = False) -> float:
        """The first norm; queries, keys and values; the output with its log-sum-exp."""
        e, query, key = self.value_bytes, self._query_width, self._key_width
        projected: float = e * (query + key)
        if self.head_norms:
            own_input = e * (query + key) if self._keeps_norm_input else 0
            projected = own_input + self._norm(query + key)
        outputs = e * key + e * query + FLOAT32 * self.shape.heads
        # The output comes back from the exchange as another tensor.
        exchanged = e * query if self.sequence_ranks > 1 else 0
        return self._norm(self.shape.hidden, is_tiled) + projected + outputs + exchanged

    @cached_property
    def _width_bytes(self) -> float:
        return self.value_bytes * self.shape.intermediate

    @cached_property
    def _largest_weight(self) -> float:
        """Bytes of the gradient of one weight, before it is added to the others."""
        return self.boundary * self.shape.intermediate / max(self.shape.active_experts, 1)

    def _mlp_input(self, is_tiled: bool = False) -> float:
        """The second norm and the hidden states that it reads."""
        own_input = self.boundary if self._keeps_norm_input or is_tiled else 0
        return self._norm(self.shape.hidden, is_tiled) + own_input

    @cached_property
    def _mlp_saves(self) -> float:
        """The second norm; gate, activated gate, up and product, of which Liger computes one again."""
        of_experts = 2 * self.shape.active_experts * self.boundary
        return self._mlp_input() + of_experts + (3 if self.fused else 4) * self._width_bytes

    @cached_property
    def _mlp_gradients(self) -> float:
        """Gradients of gate and up, or of their product: Liger writes the others over what it saved."""
        return (1 if self.fused else 2) * self._width_bytes + self.shape.active_experts * self.boundary


def assumed_memory_model(shape: ModelShape) -> MemoryModel:
    """A model of these sizes as it usually trains: bf16, checkpointing, no Liger, flash-attn-4, a GPU of 80 GiB."""
    return MemoryModel(
        shape=shape,
        head_norms=True,
        logits_bytes=80 * GIB / 64,
        chunk_tensors=TRITON_CHUNK_TENSORS,
        sums_query_gradients=True,
        tiles=shape.active_experts == 0,
    )
