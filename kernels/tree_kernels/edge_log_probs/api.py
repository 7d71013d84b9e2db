"""edge_log_probs: log p(target | source) of chosen edges only, several edges per source from one projection.

See kernels/README.md. Legend: N tokens, C hidden size, V vocabulary, E edges, R rows of logits.
"""

import torch

from tree_kernels.accumulation import accumulation_dtype
from tree_kernels.edge_log_probs.chunked import chunked_edge_log_probs
from tree_kernels.edge_log_probs.edge_rows import edge_rows
from tree_kernels.edge_log_probs.from_logits import chunked_logits_edge_log_probs
from tree_kernels.edge_log_probs.reference import reference_edge_log_probs

OP = "edge_log_probs"
IMPLEMENTATIONS = ("reference", "chunked")
CHUNK_ELEMENTS = {"cpu": 1 << 24}
DEFAULT_CHUNK_ELEMENTS = 1 << 28


def default_chunk_rows(device: torch.device, vocabulary: int) -> int:
    """Rows per chunk: 64 MiB of float32 logits on a CPU, 1 GiB elsewhere, at least 16 rows."""
    return max(16, CHUNK_ELEMENTS.get(device.type, DEFAULT_CHUNK_ELEMENTS) // max(vocabulary, 1))


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
    impl: str = "auto",
    chunk_rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-prob of each edge's target under softmax(cap(hidden[source] @ head_weight.T + bias) / temperature).

    Args:
        hidden_NC: [N, C].
        head_weight_VC: [V, C] in the dtype of `hidden_NC`.
        edge_source: integer [E] in [0, N); repeated sources share one projection.
        edge_target: integer [E] in [0, V).
        bias: [V] or None.
        temperature: one for all edges, [E], or None for 1; no gradient flows to it.
        entropy: also return the entropy of each edge's distribution.
        softcap: c in c * tanh(logit / c), before the temperature.
        impl: "auto" (chunked), "chunked" or "reference".
        chunk_rows: rows of logits alive at a time; None bounds a chunk's memory (`default_chunk_rows`).

    Returns:
        log-prob [E] and entropy [E] (None unless asked for), in float32, float64 for float64 input.

    Raises:
        ValueError: shapes, dtypes or options do not fit.
    """
    if impl not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"{OP}: expected impl in {('auto', *IMPLEMENTATIONS)}, received {impl!r}")
    hidden_NC, head_weight_VC, bias = _in_autocast_dtype(hidden_NC, head_weight_VC, bias)
    _check_edges(edge_source, edge_target, temperature, softcap, chunk_rows)
    if hidden_NC.dim() != 2 or head_weight_VC.dim() != 2 or hidden_NC.shape[1] != head_weight_VC.shape[1]:
        raise ValueError(
            f"{OP}: expected hidden [N, C] and head_weight [V, C], received {tuple(hidden_NC.shape)} and "
            f"{tuple(head_weight_VC.shape)}"
        )
    if hidden_NC.dtype != head_weight_VC.dtype:
        raise ValueError(
            f"{OP}: expected hidden and head_weight of one dtype, received {hidden_NC.dtype} and {head_weight_VC.dtype}"
        )
    if bias is not None and bias.shape != head_weight_VC.shape[:1]:
        raise ValueError(f"{OP}: expected bias [{head_weight_VC.shape[0]}], received {tuple(bias.shape)}")
    with torch.autocast(hidden_NC.device.type, enabled=False):
        if impl == "reference":
            return reference_edge_log_probs(
                hidden_NC,
                head_weight_VC,
                edge_source,
                edge_target,
                bias_V=bias,
                temperature=temperature,
                entropy=entropy,
                softcap=softcap,
            )
        size = chunk_rows or default_chunk_rows(hidden_NC.device, head_weight_VC.shape[0])
        rows = edge_rows(edge_source, edge_target, temperature, size, accumulation_dtype(hidden_NC.dtype))
        return chunked_edge_log_probs(hidden_NC, head_weight_VC, bias, rows, entropy=entropy, softcap=softcap)


def logits_edge_log_probs(
    logits_RV: torch.Tensor,
    row_of_edge: torch.Tensor,
    edge_target: torch.Tensor,
    *,
    temperature: torch.Tensor | float | None = None,
    entropy: bool = False,
    softcap: float | None = None,
    sum_pi_squared: bool = False,
    chunk_rows: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Edge log-probs from rows of logits that exist already.

    Args:
        logits_RV: [R, V].
        row_of_edge: integer [E] in [0, R).
        edge_target: integer [E] in [0, V).
        temperature: one for all edges, [E], or None for 1; no gradient flows to it.
        entropy: also return the entropy of each edge's distribution.
        softcap: c in c * tanh(logit / c), before the temperature; None if the model has capped its logits already.
        sum_pi_squared: also return the sum over the vocabulary of squared probabilities, without gradient.
        chunk_rows: rows alive in the computation dtype at a time; None bounds a chunk's memory.

    Returns:
        log-prob [E], entropy [E] or None, sum of squared probabilities [E] or None, in float32, float64 for float64
        input.

    Raises:
        ValueError: shapes or options do not fit.
    """
    _check_edges(row_of_edge, edge_target, temperature, softcap, chunk_rows)
    if logits_RV.dim() != 2 or not logits_RV.is_floating_point():
        raise ValueError(
            f"{OP}: expected floating point logits [R, V], received {logits_RV.dtype} {tuple(logits_RV.shape)}"
        )
    size = chunk_rows or default_chunk_rows(logits_RV.device, logits_RV.shape[1])
    rows = edge_rows(row_of_edge, edge_target, temperature, size, accumulation_dtype(logits_RV.dtype))
    return chunked_logits_edge_log_probs(
        logits_RV, rows, entropy=entropy, softcap=softcap, sum_pi_squared=sum_pi_squared
    )


def _in_autocast_dtype(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Under autocast, all in its dtype, as torch does for a linear layer (float64 is left alone)."""
    if not torch.is_autocast_enabled(hidden.device.type) or hidden.dtype == torch.float64:
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(hidden.device.type)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _check_edges(
    source: torch.Tensor,
    target: torch.Tensor,
    temperature: torch.Tensor | float | None,
    softcap: float | None,
    chunk_rows: int | None,
) -> None:
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
    if softcap is not None and softcap <= 0:
        raise ValueError(f"{OP}: expected softcap > 0, received {softcap}")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"{OP}: expected chunk_rows >= 1, received {chunk_rows}")
