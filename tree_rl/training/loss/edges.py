"""Which log-probs a micro-batch needs, the forward that computes them, and how they are scattered to its rows.

A token's log-prob belongs to the edge parent -> token (paper, "Derivation"): the last token of a segment predicts the
first token of each child.
Legend: F flat tokens, N unique tokens, E edges, R their distinct source tokens (one vector of logits each), B rows, W
wanted flat positions.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from tree_kernels.edge_log_probs import rows_of_edges
from tree_kernels.edge_log_probs.edge_rows import distinct
from tree_kernels.host_copy import to_device
from tree_rl.models.edge_head import EdgeRequest, edge_values
from tree_rl.models.sequence_parallel import SequenceParallel
from tree_rl.models.tree_inputs import ModelInputs, TreeInputs
from tree_rl.training.loss.edge_share import EdgeShare
from tree_rl.training.loss.outputs import LOG_PROBS, EdgeOutputs, Wanted
from tree_rl.training.micro_batch import MicroBatch
from tree_rl.training.rows import Rows
from tree_rl.tree.forest import Forest


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatReads:
    """Which flat position reads which edge."""

    flat_W: torch.Tensor
    """int64 [W] on the device, wanted flat positions, ascending."""
    edge_W: torch.Tensor
    """int64 [W] on the device, index into E of the edge that each position reads."""
    num_flat: int
    """F, tokens of all rows."""
    candidate_edge_WK: torch.Tensor | None = None
    """int64 [W, K] on the device, index into E of the edge to each candidate; None without candidates."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EdgePlan:
    """The edges whose log-probs to compute, and the flat positions that receive each."""

    source_E: np.ndarray
    """int64 [E], unique token at which the edge starts; its hidden state is projected to the vocabulary once."""
    target_E: np.ndarray
    """int64 [E], token id that the edge predicts."""
    temperature_E: np.ndarray
    """float32 [E], sampling temperature; an edge whose rows differ in temperature appears once per temperature."""
    reads: FlatReads
    share: EdgeShare | None = None
    """This rank's share of the edges; None without sequence parallelism."""

    @functools.cached_property
    def request(self) -> EdgeRequest:
        """The head's request for all edges in one forward; under sequence parallelism, for this rank's edges."""
        edges = self.source_E, self.target_E, self.temperature_E
        return request_edges(*edges, device=self.reads.flat_W.device, share=self.share)


def plan_edges(
    forest: Forest,
    wanted_F: np.ndarray,
    temperature_B: np.ndarray,
    device: torch.device | str = "cpu",
    *,
    ranks: SequenceParallel | None = None,
    candidates_FK: np.ndarray | None = None,
) -> EdgePlan:
    """Find the unique edges that start at the wanted flat positions.

    Args:
        forest: the rows of one micro-batch.
        wanted_F: bool [F]; True at f asks for the log-prob of the token after f. False at the last token of a row.
        temperature_B: float32 [B], one per row.
        device: device of the model.
        ranks: ranks that share the forest's tokens in one forward; None: this rank computes all edges.
        candidates_FK: int [F, K], tokens whose log-probs are wanted besides at each wanted position; None: none.

    Raises:
        ValueError: the last token of a row is wanted.
    """
    offsets = forest.row_index.offsets
    row_of_flat = np.repeat(np.arange(forest.num_rows), np.diff(offsets))
    last_of_row = offsets[1:] - 1
    if wanted_F[last_of_row].any():
        row = int(np.flatnonzero(wanted_F[last_of_row])[0])
        raise ValueError(f"row {row}: its last token predicts nothing, yet a log-prob is asked for there")
    flat = np.flatnonzero(wanted_F)
    child = forest.row_index.values[flat + 1].astype(np.int64)
    temperatures, temperature_index = np.unique(np.asarray(temperature_B, dtype=np.float32), return_inverse=True)
    kinds = max(len(temperatures), 1)
    kind = temperature_index[row_of_flat[flat]]
    edges, edge_of_wanted = distinct(child * kinds + kind)
    edge_child, edge_kind = np.divmod(edges, kinds)
    source_E = forest.parent[edge_child].astype(np.int64)
    target_E = forest.input_ids[edge_child].astype(np.int64)
    candidate_edge_WK = None
    if candidates_FK is not None:
        source_W, candidates_WK = source_E[edge_of_wanted], candidates_FK[flat].astype(np.int64)
        size = int(candidates_WK.max(initial=0)) + 1
        key_WK = (source_W[:, None] * size + candidates_WK) * kinds + kind[:, None]
        more, place = np.unique(key_WK, return_inverse=True)
        candidate_edge_WK = to_device(len(edges) + place.reshape(candidates_WK.shape), device)
        (more_source, more_target), more_kind = np.divmod(more // kinds, size), more % kinds
        source_E = np.concatenate([source_E, more_source])
        target_E = np.concatenate([target_E, more_target])
        edge_kind = np.concatenate([edge_kind, more_kind])
    temperature_E = temperatures[edge_kind] if len(edge_kind) else np.zeros(0, dtype=np.float32)
    share = None if ranks is None else EdgeShare.of(source_E, forest.num_unique, ranks, device)
    return EdgePlan(
        source_E=source_E,
        target_E=target_E,
        temperature_E=temperature_E,
        reads=FlatReads(
            flat_W=to_device(flat, device),
            edge_W=to_device(edge_of_wanted.astype(np.int64), device),
            num_flat=forest.num_flat,
            candidate_edge_WK=candidate_edge_WK,
        ),
        share=share,
    )


def edges_of_batch(
    rows: Rows, batch: MicroBatch, device: torch.device | str = "cpu", *, ranks: SequenceParallel | None = None
) -> EdgePlan:
    """`plan_edges` for a micro-batch of some rows of a call."""
    assert batch.forest is not None
    wanted_f, temperature_B = rows.wanted_F[batch.flat_f], rows.temperature_B[list(batch.rows)]
    candidates_fK = None if rows.candidates_FK is None else rows.candidates_FK[batch.flat_f]
    return plan_edges(batch.forest, wanted_f, temperature_B, device, ranks=ranks, candidates_FK=candidates_fK)


def request_edges(
    source_E: np.ndarray,
    target_E: np.ndarray,
    temperature_E: np.ndarray,
    *,
    device: torch.device | str,
    extras: tuple[str, ...] = (),
    share: EdgeShare | None = None,
) -> EdgeRequest:
    """Build the request to a model's head; everything that depends on the edges alone is computed here, on the CPU.

    Args:
        source_E: int64 [E], source token of each edge, as position in one forward.
        target_E: int [E], token id that each edge predicts.
        temperature_E: float32 [E].
        device: device of the model.
        extras: outputs besides log-probs, see `EdgeRequest`.
        share: requests this rank's share of the edges.
    """
    if share is not None:
        source_E, target_E, temperature_E = share.asked(source_E, target_E, temperature_E)
    kept_R, row_E = distinct(source_E)
    # Without edges the head still reads token 0: FSDP expects its gradient, and relayed keys need it in the graph.
    kept_R = kept_R if len(kept_R) else np.zeros(1, dtype=np.int64)
    is_one = len(temperature_E) > 0 and bool((temperature_E == temperature_E[0]).all())
    temperature = float(temperature_E[0]) if is_one else torch.from_numpy(temperature_E)
    return EdgeRequest(
        kept_R=to_device(kept_R, device),
        rows=rows_of_edges(torch.from_numpy(row_E), torch.from_numpy(target_E), temperature).to(device),
        extras=extras,
    )


def scatter(values_E: torch.Tensor, reads: FlatReads) -> torch.Tensor:
    """Copy per-edge values [E] to the flat positions that read them, [F]; other positions are 0.

    The gradient of an edge is the sum over all rows that read it. This alone implements the paper's weight g_t.
    """
    return values_E.new_zeros(reads.num_flat).index_put((reads.flat_W,), values_E[reads.edge_W])


def outputs_of_rows(per_edge: EdgeOutputs, reads: FlatReads) -> EdgeOutputs:
    """Outputs of edges [E] as outputs of the rows, [F]: `scatter`, and log-probs of candidates, [F, K]."""
    found = per_edge.map(lambda value_E: scatter(value_E, reads))
    if reads.candidate_edge_WK is None or per_edge.log_probs is None:
        return found
    candidate_WK = per_edge.log_probs[reads.candidate_edge_WK]
    empty_FK = candidate_WK.new_zeros(reads.num_flat, candidate_WK.shape[1])
    return replace(found, candidate_log_probs=empty_FK.index_put((reads.flat_W,), candidate_WK))


def tree_log_probs(
    model: nn.Module, inputs: ModelInputs, edges: Callable[[], EdgePlan], *, extras: Wanted = ()
) -> EdgeOutputs:
    """Log-probs, and other outputs, of all wanted edges of a forest, from one forward.

    Args:
        model: causal language model prepared by `use_tree_attention` and, to save memory, `use_edge_head`.
        inputs: the model's inputs.
        edges: calls `plan_edges` for the same forest and ranks; the CPU plans while the GPU computes the layers.
        extras: outputs besides log-probs, which may be named too: `entropy`, `sum_pi_squared`.

    Returns:
        [F] each; only tokens at which an edge starts are projected to the vocabulary.
    """
    plan = functools.cache(edges)

    def request() -> EdgeRequest:
        return replace(plan().request, extras=tuple(name for name in extras if name != LOG_PROBS))

    per_edge, share = EdgeOutputs.of_edges(edge_values(model, inputs.model_kwargs(), request)), plan().share
    return outputs_of_rows(per_edge if share is None else per_edge.map(share.gather), plan().reads)


def tree_values(model: nn.Module, forest: Forest, inputs: TreeInputs) -> EdgeOutputs:
    """Value of every flat token, [F], from one forward of a token classifier with a single label."""
    values_N = inputs.of_all(model(**inputs.model_kwargs()).logits[0, :, 0])
    return EdgeOutputs(values=values_N[to_device(forest.row_index.values.astype(np.int64), values_N.device)])


def wanted_everywhere(forest: Forest) -> np.ndarray:
    """bool [F], True at every position with a next token in its row."""
    wanted_F = np.ones(forest.num_flat, dtype=bool)
    wanted_F[forest.row_index.offsets[1:] - 1] = False
    return wanted_F


def forest_log_probs(model: nn.Module, forest: Forest, *, device: torch.device | str = "cpu") -> torch.Tensor:
    """Log-prob of every next token of every row, [F] (0 at a row's end): the shortest way to use a tree."""
    ones_B = np.ones(forest.num_rows, dtype=np.float32)
    edges = functools.partial(plan_edges, forest, wanted_everywhere(forest), ones_B, device)
    return tree_log_probs(model, TreeInputs.from_forest(forest, device), edges)[LOG_PROBS]
