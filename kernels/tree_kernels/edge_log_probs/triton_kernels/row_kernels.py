"""Triton kernels that read logits once: one for softmax statistics and targets, one for the gradient of the logits.

With s = cap(z + bias) / T, m = max s, L = sum e^(s - m): log p_t = (s_t - m) - log L and
H = log L - sum e^(s - m) (s - m) / L, two terms of one sign; d log p_t / ds = onehot_t - p, dH / ds = -p (s - lse + H).
Legend: R rows of logits, V columns of the piece, U unique (row, temperature) pairs, E edges in row order.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _exp(x: tl.tensor) -> tl.tensor:
    return tl.exp2(x * LOG2_E)


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    """Accurate to a few roundings; near zero a series is used, because the quotient of exponentials would cancel."""
    decay = _exp(-2.0 * tl.abs(x))
    large = (1.0 - decay) / (1.0 + decay)
    square = x * x
    small = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315))))
    return tl.where(tl.abs(x) < 0.2, small, tl.where(x < 0, -large, large))


@triton.jit
def _capped(score: tl.tensor, softcap: tl.tensor, HAS_SOFTCAP: tl.constexpr) -> tl.tensor:
    if HAS_SOFTCAP:
        score = softcap * _tanh(score / softcap)
    return score


@triton.jit
def _dot(
    a_ptr: tl.tensor,  # [C]
    a_stride: tl.tensor,
    b_ptr: tl.tensor,  # [C]
    b_stride: tl.tensor,
    channels: tl.tensor,
    reads: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Dot product with a float32 sum; if `reads` is false, 0 without reading memory."""
    product = tl.zeros([BLOCK], tl.float32)
    for start in range(0, channels, BLOCK):
        channel = start + tl.arange(0, BLOCK).to(tl.int64)
        inside = reads & (channel < channels)
        a = tl.load(a_ptr + channel * a_stride, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + channel * b_stride, mask=inside, other=0.0).to(tl.float32)
        product += a * b
    return tl.sum(product, 0)


@triton.jit
def statistics_kernel(
    logits_ptr: tl.tensor,  # [R, V]
    row_stride: tl.tensor,
    bias_ptr: tl.tensor,  # [V]
    hidden_ptr: tl.tensor,  # [R, C], or nothing
    hidden_row_stride: tl.tensor,
    hidden_stride: tl.tensor,
    weight_ptr: tl.tensor,  # [V, C], or nothing
    weight_row_stride: tl.tensor,
    weight_stride: tl.tensor,
    row_ptr: tl.tensor,  # [U], row of logits of each pair
    inverse_temperature_ptr: tl.tensor,  # [U]
    first_edge_ptr: tl.tensor,  # [U + 1]
    target_ptr: tl.tensor,  # [E]
    order_ptr: tl.tensor,  # [E]
    lse_ptr: tl.tensor,  # [U], out
    row_entropy_ptr: tl.tensor,  # [U], out
    log_prob_ptr: tl.tensor,  # [E], out, in the caller's order like the next two
    entropy_ptr: tl.tensor,
    squared_ptr: tl.tensor,
    columns: tl.tensor,
    channels: tl.tensor,
    softcap: tl.tensor,
    HAS_BIAS: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    HAS_ROW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    SQUARED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANNEL_BLOCK: tl.constexpr,
) -> None:
    """Log-sum-exp and entropy of each pair, and the values of its edges, from one read of its row. Grid: pairs."""
    pair = tl.program_id(0).to(tl.int64)
    row = pair
    if HAS_ROW:
        row = tl.load(row_ptr + pair)
    logits_ptr += row * row_stride
    inverse_temperature = tl.load(inverse_temperature_ptr + pair)
    lane = tl.arange(0, BLOCK)
    top = -float("inf")
    # Sums stay per lane and are reduced once at the end; only the maximum is reduced in every block.
    mass = tl.zeros([BLOCK], tl.float32)
    surprise = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + lane
        inside = column < columns
        score = tl.load(logits_ptr + column, mask=inside, other=-float("inf")).to(tl.float32)
        if HAS_BIAS:
            score += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
        # Columns outside stay -inf.
        score = tl.where(inside, _capped(score, softcap, HAS_SOFTCAP), -float("inf")) * inverse_temperature
        new_top = tl.maximum(top, tl.max(score, 0))
        # If all scores so far are -inf, there is no maximum to subtract.
        anchor = tl.where(new_top == -float("inf"), 0.0, new_top)
        shrink = _exp(top - anchor)
        distance = score - anchor
        weight = _exp(distance)
        if ENTROPY:
            moved = tl.where(top == -float("inf"), 0.0, top - anchor)
            surprise = shrink * (surprise + moved * mass) + tl.where(weight > 0, weight * distance, 0.0)
        if SQUARED:
            squares = shrink * shrink * squares + weight * weight
        mass = shrink * mass + weight
        top = new_top
    total = tl.sum(mass, 0)
    log_total = tl.log(total)
    tl.store(lse_ptr + pair, top + log_total)
    entropy = log_total - tl.sum(surprise, 0) / total
    squared = tl.sum(squares, 0) / (total * total)
    if ENTROPY:
        tl.store(row_entropy_ptr + pair, entropy)
    for edge in range(tl.load(first_edge_ptr + pair), tl.load(first_edge_ptr + pair + 1)):
        target = tl.load(target_ptr + edge)
        place = tl.load(order_ptr + edge)
        # A target outside the vocabulary gives NaN instead of reading other memory.
        inside = (target >= 0) & (target < columns)
        score = tl.load(logits_ptr + target, mask=inside, other=float("nan")).to(tl.float32)
        bias = 0.0
        if HAS_BIAS:
            bias = tl.load(bias_ptr + target, mask=inside, other=0.0).to(tl.float32)
            score += bias
        distance = _capped(score, softcap, HAS_SOFTCAP) * inverse_temperature - top
        log_mass = log_total
        if HAS_FACTORS:
            # Tensor cores truncate partial sums, so the target's logit is recomputed without them. It also replaces
            # the old value in the total.
            row_of_hidden = hidden_ptr + row * hidden_row_stride
            row_of_weight = weight_ptr + target * weight_row_stride
            exact = _dot(row_of_hidden, hidden_stride, row_of_weight, weight_stride, channels, inside, CHANNEL_BLOCK)
            exact = tl.where(inside, exact + bias, float("nan"))
            exact = _capped(exact, softcap, HAS_SOFTCAP) * inverse_temperature - top
            log_mass = tl.log(total + (_exp(exact) - _exp(distance)))
            distance = exact
        tl.store(log_prob_ptr + place, distance - log_mass)
        if ENTROPY:
            tl.store(entropy_ptr + place, entropy)
        if SQUARED:
            tl.store(squared_ptr + place, squared)


@triton.jit
def gradient_kernel(
    logits_ptr: tl.tensor,  # [R, V]
    row_stride: tl.tensor,
    bias_ptr: tl.tensor,  # [V]
    first_pair_ptr: tl.tensor,  # [R + 1]
    inverse_temperature_ptr: tl.tensor,  # [U]
    lse_ptr: tl.tensor,  # [U]
    row_entropy_ptr: tl.tensor,  # [U]
    first_edge_ptr: tl.tensor,  # [U + 1]
    target_ptr: tl.tensor,  # [E]
    grad_log_prob_ptr: tl.tensor,  # [E], in row order
    grad_entropy_ptr: tl.tensor,  # [E], in row order
    gradient_ptr: tl.tensor,  # [R, V], out; may be the logits themselves
    gradient_stride: tl.tensor,
    columns: tl.tensor,
    first_column: tl.tensor,
    softcap: tl.tensor,
    HAS_BIAS: tl.constexpr,
    HAS_PAIRS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Gradient of the logits, summed over the pairs that read each row. Grid: rows times column blocks."""
    tiles = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    column = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    raw = tl.load(logits_ptr + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        raw += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    slope = 1.0
    if HAS_SOFTCAP:
        tanh = _tanh(raw / softcap)
        raw = softcap * tanh
        slope = 1.0 - tanh * tanh
    first_pair = row
    last_pair = row + 1
    if HAS_PAIRS:
        first_pair = tl.load(first_pair_ptr + row)
        last_pair = tl.load(first_pair_ptr + row + 1)
    gradient = tl.zeros([BLOCK], tl.float32)
    for pair in range(first_pair, last_pair):
        inverse_temperature = tl.load(inverse_temperature_ptr + pair)
        distance = raw * inverse_temperature - tl.load(lse_ptr + pair)
        p = _exp(distance)
        share = 0.0
        entropy_share = 0.0
        picked = tl.zeros([BLOCK], tl.float32)
        for edge in range(tl.load(first_edge_ptr + pair), tl.load(first_edge_ptr + pair + 1)):
            grad = tl.load(grad_log_prob_ptr + edge)
            share += grad
            picked += tl.where(column == tl.load(target_ptr + edge) - first_column, grad, 0.0)
            if ENTROPY:
                entropy_share += tl.load(grad_entropy_ptr + edge)
        shares = share
        if ENTROPY:
            surprise = distance + tl.load(row_entropy_ptr + pair)
            shares += entropy_share * tl.where(p > 0, surprise, 0.0)
        gradient += (picked - p * shares) * inverse_temperature
    if HAS_SOFTCAP:
        gradient *= slope
    gradient = gradient.to(gradient_ptr.dtype.element_ty)
    tl.store(gradient_ptr + row * gradient_stride + column, gradient, mask=inside)
