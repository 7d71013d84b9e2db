"""edge_log_probs: log p(target | source) of chosen edges; several edges of one source share one projection.

See kernels/README.md. Legend: N tokens, C hidden size, V vocabulary, E edges, R rows of logits.
"""

import torch

from tree_kernels.accumulation import in_autocast_dtype
from tree_kernels.edge_log_probs.edge_rows import EdgeRows, rows_of_edges
from tree_kernels.edge_log_probs.edge_values import EdgeOptions, EdgeValues
from tree_kernels.edge_log_probs.portable.chunked import chunked_edge_log_probs, chunked_logits_edge_log_probs
from tree_kernels.edge_log_probs.reference import reference_edge_log_probs
from tree_kernels.implementation import UnsupportedImplementation, check_implementation, implementation_to_run
from tree_kernels.triton_support import triton_unavailable_reason

OP = "edge_log_probs"
IMPLEMENTATIONS = ("reference", "chunked", "triton")
CPU_CHUNK_BYTES = 64 << 20
CUDA_CHUNK_SHARE = 64
"""A chunk of logits takes the device's memory divided by this."""


def default_chunk_rows(device: torch.device, vocabulary: int) -> int:
    """Rows per chunk: 64 MiB of float32 logits on a CPU, 1/64 of the memory of a GPU, at least 16 rows."""
    size = CPU_CHUNK_BYTES
    if device.type == "cuda":
        size = torch.cuda.get_device_properties(device).total_memory // CUDA_CHUNK_SHARE
    return max(16, size // 4 // max(vocabulary, 1))


def unavailable_reason(impl: str, *, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why `impl` cannot run on this device and dtype, or None if it can.

    Raises:
        ValueError: there is no implementation of that name.
    """
    check_implementation(impl, IMPLEMENTATIONS)
    return triton_unavailable_reason(device, dtype) if impl == "triton" else None


def chosen_implementation(*, device: torch.device, dtype: torch.dtype) -> str:
    """The implementation that `impl="auto"` runs: triton on CUDA where it can run, chunked elsewhere."""
    runs_triton = device.type == "cuda" and triton_unavailable_reason(device, dtype) is None
    return "triton" if runs_triton else "chunked"


def edge_log_probs(
    hidden_NC: torch.Tensor,
    head_weight_VC: torch.Tensor,
    edge_source: torch.Tensor,
    edge_target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: torch.Tensor | float | None = None,
    entropy: bool = False,
    softcap: float | None = None,
    sum_pi_squared: bool = False,
    impl: str = "auto",
    chunk_rows: int | None = None,
) -> EdgeValues:
    """Log-prob of each edge's target under softmax(cap(hidden[source] @ head_weight.T + bias) / temperature).

    Args:
        hidden_NC: [N, C].
        head_weight_VC: [V, C] in the dtype of `hidden_NC`.
        edge_source: integer [E] in [0, N); repeated sources share one projection.
        edge_target: integer [E] in [0, V).
        bias: [V] or None.
        temperature: a number for all edges, [E], or None for 1; gets no gradient.
        entropy: also return the entropy of each edge's distribution.
        softcap: c in c * tanh(logit / c), before the temperature.
        sum_pi_squared: also return the sum over the vocabulary of squared probabilities, without gradient.
        impl: "auto" (triton on CUDA, else chunked), "triton", "chunked" or "reference".
        chunk_rows: rows of logits alive at a time; None: `default_chunk_rows`.

    Returns:
        log-prob [E], entropy [E] or None, sum of squared probabilities [E] or None, in the accumulation dtype.

    Raises:
        ValueError: shapes, dtypes or options do not fit.
        UnsupportedImplementation: `impl` cannot run on this device or dtype.
    """
    _check_edges(edge_source, edge_target, temperature)
    if impl != "reference":
        rows = rows_of_edges(edge_source, edge_target, temperature)
        return edge_log_probs_of_rows(
            hidden_NC, head_weight_VC, rows, bias=bias, entropy=entropy, softcap=softcap,
            sum_pi_squared=sum_pi_squared, impl=impl, chunk_rows=chunk_rows,
        )  # fmt: skip
    hidden_NC, head_weight_VC = in_autocast_dtype(hidden_NC), in_autocast_dtype(head_weight_VC)
    bias = None if bias is None else in_autocast_dtype(bias)
    _check_head(hidden_NC, head_weight_VC, bias)
    options = _options(hidden_NC.device, head_weight_VC.shape[0], entropy, softcap, sum_pi_squared, chunk_rows)
    with torch.autocast(hidden_NC.device.type, enabled=False):
        return reference_edge_log_probs(hidden_NC, head_weight_VC, bias, edge_source, edge_target, temperature, options)


def edge_log_probs_of_rows(
    hidden_NC: torch.Tensor,
    head_weight_VC: torch.Tensor,
    rows: EdgeRows,
    *,
    bias: torch.Tensor | None = None,
    entropy: bool = False,
    softcap: float | None = None,
    sum_pi_squared: bool = False,
    impl: str = "auto",
    chunk_rows: int | None = None,
) -> EdgeValues:
    """`edge_log_probs` for edges whose rows are already known, which avoids a synchronisation with a GPU.

    `rows`, from `rows_of_edges`, are on the device of `hidden_NC` and include the temperature; `impl` cannot be
    "reference". All else is as in `edge_log_probs`.
    """
    hidden_NC, head_weight_VC = in_autocast_dtype(hidden_NC), in_autocast_dtype(head_weight_VC)
    bias = None if bias is None else in_autocast_dtype(bias)
    _check_head(hidden_NC, head_weight_VC, bias)
    device = hidden_NC.device
    options = _options(device, head_weight_VC.shape[0], entropy, softcap, sum_pi_squared, chunk_rows)
    if _is_triton(impl, hidden_NC, "it wants edges, not rows"):
        from tree_kernels.edge_log_probs.triton_kernels.autograd import triton_edge_log_probs as run
    else:
        run = chunked_edge_log_probs
    with torch.autocast(device.type, enabled=False):
        return run(hidden_NC, head_weight_VC, bias, rows, options)


def logits_edge_log_probs(
    logits_RV: torch.Tensor,
    row_of_edge: torch.Tensor,
    edge_target: torch.Tensor,
    *,
    temperature: torch.Tensor | float | None = None,
    entropy: bool = False,
    softcap: float | None = None,
    sum_pi_squared: bool = False,
    impl: str = "auto",
    chunk_rows: int | None = None,
) -> EdgeValues:
    """Edge log-probs from given logits; all else as in `edge_log_probs`, but `impl` cannot be "reference".

    Args:
        logits_RV: [R, V].
        row_of_edge: integer [E] in [0, R).
        edge_target: integer [E] in [0, V).
        softcap: None if the model has already capped its logits.
        chunk_rows: rows that exist in the accumulation dtype at a time ("chunked" only).
    """
    _check_edges(row_of_edge, edge_target, temperature)
    rows = rows_of_edges(row_of_edge, edge_target, temperature)
    return logits_edge_log_probs_of_rows(
        logits_RV, rows, entropy=entropy, softcap=softcap, sum_pi_squared=sum_pi_squared, impl=impl,
        chunk_rows=chunk_rows,
    )  # fmt: skip


def logits_edge_log_probs_of_rows(
    logits_RV: torch.Tensor,
    rows: EdgeRows,
    *,
    entropy: bool = False,
    softcap: float | None = None,
    sum_pi_squared: bool = False,
    impl: str = "auto",
    chunk_rows: int | None = None,
) -> EdgeValues:
    """`logits_edge_log_probs` for edges whose rows are already known, as in `edge_log_probs_of_rows`."""
    if logits_RV.dim() != 2 or not logits_RV.is_floating_point():
        raise ValueError(
            f"{OP}: expected floating point logits [R, V], received {logits_RV.dtype} {tuple(logits_RV.shape)}"
        )
    options = _options(logits_RV.device, logits_RV.shape[1], entropy, softcap, sum_pi_squared, chunk_rows)
    if _is_triton(impl, logits_RV, "logits are given"):
        from tree_kernels.edge_log_probs.triton_kernels.autograd import triton_logits_edge_log_probs as run
    else:
        run = chunked_logits_edge_log_probs
    return run(logits_RV, rows, options)


def _is_triton(impl: str, like: torch.Tensor, why_no_reference: str) -> bool:
    """Choose between the two implementations that take rows: True for triton, False for chunked."""
    if impl == "reference":
        raise UnsupportedImplementation(OP, impl, why_no_reference)
    problem = {"device": like.device, "dtype": like.dtype}
    return implementation_to_run(OP, impl, chosen_implementation, unavailable_reason, **problem) == "triton"


def _options(
    device: torch.device,
    vocabulary: int,
    entropy: bool,
    softcap: float | None,
    sum_pi_squared: bool,
    chunk_rows: int | None,
) -> EdgeOptions:
    if softcap is not None and softcap <= 0:
        raise ValueError(f"{OP}: expected softcap > 0, received {softcap}")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"{OP}: expected chunk_rows >= 1, received {chunk_rows}")
    rows = chunk_rows or default_chunk_rows(device, vocabulary)
    return EdgeOptions(entropy=entropy, softcap=softcap, sum_pi_squared=sum_pi_squared, chunk_rows=rows)


def _check_head(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{OP}: expected hidden [N, C] and head_weight [V, C], received {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"{OP}: expected hidden and head_weight of one dtype, received {hidden.dtype} and {weight.dtype}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{OP}: expected bias [{weight.shape[0]}], received {tuple(bias.shape)}")


def _check_edges(source: torch.Tensor, target: torch.Tensor, temperature: torch.Tensor | float | None) -> None:
    if source.dim() != 1 or source.shape != target.shape:
        raise ValueError(
            f"{OP}: expected one source and one target per edge [E], received {tuple(source.shape)} and "
            f"{tuple(target.shape)}"
        )
    if source.is_floating_point() or target.is_floating_point():
        raise ValueError(f"{OP}: expected integer edges, received {source.dtype} and {target.dtype}")
    if isinstance(temperature, torch.Tensor):
        if temperature.shape != source.shape:
            raise ValueError(f"{OP}: expected temperature {tuple(source.shape)}, received {tuple(temperature.shape)}")
        if temperature.requires_grad:
            raise ValueError(f"{OP}: expected a constant temperature, received one that requires grad; detach it")
    elif temperature is not None and temperature <= 0:
        raise ValueError(f"{OP}: expected temperature > 0, received {temperature}")
