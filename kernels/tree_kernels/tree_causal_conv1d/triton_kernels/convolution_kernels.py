"""Triton kernels of the convolution and its gradients. Windows are read through an index; sums have a fixed order.

Inputs are numbered as in `windows`: context first. Legend: N unique tokens, C channels, K taps.
"""

import triton
import triton.language as tl


@triton.jit
def _input(
    x_pointer: tl.tensor,
    context_pointer: tl.tensor,
    window_pointer: tl.tensor,
    token: tl.tensor,
    channel: tl.tensor,
    exists: tl.tensor,
    channels: tl.tensor,
    tap: int,
    TAPS: tl.constexpr,
) -> tl.tensor:
    """One input of each token's window, [tokens, channels] float32."""
    at = tl.load(window_pointer + token * TAPS + tap, mask=exists, other=0)
    is_channel = (channel < channels)[None, :]
    inside = (exists & (at >= TAPS - 1))[:, None] & is_channel
    row = (at - (TAPS - 1)).to(tl.int64)[:, None] * channels + channel[None, :]
    value = tl.load(x_pointer + row, mask=inside, other=0.0).to(tl.float32)
    before = (exists & (at < TAPS - 1))[:, None] & is_channel
    past = tl.load(context_pointer + at[:, None] * channels + channel[None, :], mask=before, other=0.0)
    return tl.where(before, past.to(tl.float32), value)


@triton.jit
def _sums(
    x_pointer: tl.tensor,
    context_pointer: tl.tensor,
    weight_pointer: tl.tensor,
    bias_pointer: tl.tensor,
    window_pointer: tl.tensor,
    token: tl.tensor,
    channel: tl.tensor,
    exists: tl.tensor,
    channels: tl.tensor,
    BIAS: tl.constexpr,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> tl.tensor:
    """The convolution before its activation, [tokens, channels] float32."""
    is_channel = channel < channels
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for tap in tl.static_range(TAPS):
        weight = tl.load(weight_pointer + channel * TAPS + tap, mask=is_channel, other=0.0).to(tl.float32)
        value = _input(x_pointer, context_pointer, window_pointer, token, channel, exists, channels, tap, TAPS)
        total += weight[None, :] * value
    if BIAS:
        total += tl.load(bias_pointer + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit(do_not_specialize=["num_tokens"])
def forward_kernel(
    x_pointer: tl.tensor,
    context_pointer: tl.tensor,
    weight_pointer: tl.tensor,
    bias_pointer: tl.tensor,
    window_pointer: tl.tensor,
    out_pointer: tl.tensor,
    num_tokens: tl.tensor,
    channels: tl.tensor,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Outputs [N, C]. Grid: (channel blocks, token blocks)."""
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = token < num_tokens
    out = _sums(
        x_pointer, context_pointer, weight_pointer, bias_pointer, window_pointer, token, channel, exists, channels,
        BIAS, TAPS, TOKENS, CHANNELS,
    )  # fmt: skip
    if SILU:
        out = out / (1.0 + tl.exp(-out))
    place = token.to(tl.int64)[:, None] * channels + channel[None, :]
    stored = exists[:, None] & (channel < channels)[None, :]
    tl.store(out_pointer + place, out.to(out_pointer.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["num_tokens"])
def sum_gradients_kernel(
    x_pointer: tl.tensor,
    context_pointer: tl.tensor,
    weight_pointer: tl.tensor,
    bias_pointer: tl.tensor,
    window_pointer: tl.tensor,
    d_out_pointer: tl.tensor,
    d_sum_pointer: tl.tensor,
    partial_pointer: tl.tensor,
    num_tokens: tl.tensor,
    channels: tl.tensor,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Gradients of the sums [N, C], and partial gradients of weights and bias [token blocks, K + 1, C] float32.

    Grid: (channel blocks, token blocks).
    """
    block = tl.program_id(1)
    token = block * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = token < num_tokens
    place = token.to(tl.int64)[:, None] * channels + channel[None, :]
    stored = exists[:, None] & (channel < channels)[None, :]
    d_sum = tl.load(d_out_pointer + place, mask=stored, other=0.0).to(tl.float32)
    if SILU:
        total = _sums(
            x_pointer, context_pointer, weight_pointer, bias_pointer, window_pointer, token, channel, exists, channels,
            BIAS, TAPS, TOKENS, CHANNELS,
        )  # fmt: skip
        gate = 1.0 / (1.0 + tl.exp(-total))
        d_sum = d_sum * gate * (1.0 + total * (1.0 - gate))
    tl.store(d_sum_pointer + place, d_sum.to(d_sum_pointer.dtype.element_ty), mask=stored)
    part = partial_pointer + block.to(tl.int64) * (TAPS + 1) * channels + channel
    for tap in tl.static_range(TAPS):
        value = _input(x_pointer, context_pointer, window_pointer, token, channel, exists, channels, tap, TAPS)
        tl.store(part + tap * channels, tl.sum(d_sum * value, 0), mask=channel < channels)
    tl.store(part + TAPS * channels, tl.sum(d_sum, 0), mask=channel < channels)


@triton.jit(do_not_specialize=["num_inputs"])
def input_gradients_kernel(
    weight_pointer: tl.tensor,
    d_sum_pointer: tl.tensor,
    reader_start_pointer: tl.tensor,
    reader_pointer: tl.tensor,
    d_input_pointer: tl.tensor,
    num_inputs: tl.tensor,
    channels: tl.tensor,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Gradients of context and tokens [K - 1 + N, C], summed over their readers. Grid: (channel, input blocks)."""
    at = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    exists = at < num_inputs
    is_channel = (channel < channels)[None, :]
    start = tl.load(reader_start_pointer + at, mask=exists, other=0)
    readers = tl.load(reader_start_pointer + at + 1, mask=exists, other=0) - start
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for number in range(tl.max(readers, 0)):
        reads = exists & (number < readers)
        reader = tl.load(reader_pointer + start + number, mask=reads, other=0)
        place = (reader // TAPS).to(tl.int64)[:, None] * channels + channel[None, :]
        seen = reads[:, None] & is_channel
        d_sum = tl.load(d_sum_pointer + place, mask=seen, other=0.0).to(tl.float32)
        weight = tl.load(weight_pointer + channel[None, :] * TAPS + (reader % TAPS)[:, None], mask=seen, other=0.0)
        total += d_sum * weight.to(tl.float32)
    place = at.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(d_input_pointer + place, total.to(d_input_pointer.dtype.element_ty), mask=exists[:, None] & is_channel)
