"""Mixture-of-Experts routers over one forest: routes to replay, routes taken, the auxiliary loss.

Every unique token runs once and counts g_t times. Under sequence parallelism a rank's routers see its slice of the
tokens; the experts that ran are gathered, the auxiliary loss stays that of the slice.
Legend: N unique tokens, n of a partition, s of a rank's slice, B rows, L Mixture-of-Experts layers, E experts of a
layer, K experts per token.
"""

from collections.abc import Sequence

import numpy as np
import torch

from tree_rl.models.routers.load_balance import balance_loss, expert_load
from tree_rl.models.routers.merge_routes import NATIVE
from tree_rl.models.routers.trace import RouterTrace
from tree_rl.models.sequence_parallel import SequenceParallel
from tree_rl.tree.forest import Forest


class ForestRouting:
    """Routes and auxiliary loss of a forest, whole or in partitions; the model must have `RouterHooks`."""

    def __init__(
        self,
        forest: Forest,
        device: torch.device | str = "cpu",
        *,
        routes: np.ndarray | None = None,
        weight_LE: torch.Tensor | None = None,
        ranks: SequenceParallel | None = None,
    ) -> None:
        """Start a forest.

        Args:
            forest: the rows; if routes are replayed, merged by `number_routes`.
            device: device of the model.
            routes: integer [N, decoder layers, K] to replay, from `routes_of_unique_tokens`; None lets routers choose.
            weight_LE: `balance_weight` over all rows of the auxiliary loss; None for no such loss.
            ranks: ranks that share the forest's tokens; None if this rank runs all of them.
        """
        self.forest = forest
        self.weight_LE = weight_LE
        self._ranks = ranks
        self._routes = None if routes is None else torch.from_numpy(np.ascontiguousarray(routes)).to(device)
        self._count_N = torch.from_numpy(forest.path_count.astype(np.int64)).to(device)
        self._chosen_NLK: torch.Tensor | None = None
        self.share = torch.zeros((), dtype=torch.float64, device=device)
        """This rank's share of the auxiliary loss so far, without graph."""

    def open(self, tokens: torch.Tensor | None = None) -> RouterTrace:
        """The trace for a forward over the given tokens (int64 [n]), or over all tokens."""
        return RouterTrace(None if self._routes is None else self._own(self._routes, tokens, filler=NATIVE))

    def close(self, trace: RouterTrace, tokens: torch.Tensor | None = None) -> torch.Tensor | None:
        """After a forward: keep its routes and return this rank's share of the auxiliary loss, None without one.

        Args:
            trace: the trace from `open`, after the forward.
            tokens: as given to `open`.
        """
        chosen_nLK = self._of_all_ranks(trace.chosen(), self.forest.num_unique if tokens is None else len(tokens))
        if tokens is None:
            self._chosen_NLK = chosen_nLK
        else:
            if self._chosen_NLK is None:
                self._chosen_NLK = chosen_nLK.new_empty((self.forest.num_unique, *chosen_nLK.shape[1:]))
            self._chosen_NLK[tokens] = chosen_nLK
        logits = trace.take_logits()
        # A partitioned run may first compute values without gradients; the auxiliary loss counts once.
        if self.weight_LE is None or not torch.is_grad_enabled():
            return None
        share = balance_loss(logits, self._own(self._count_N, tokens, filler=0), self.weight_LE)
        self.share += share.detach()
        return share

    def _own(self, of_token_N: torch.Tensor, tokens: torch.Tensor | None, *, filler: int) -> torch.Tensor:
        """This rank's slice [s, ...] of the given tokens' values (all tokens if None); padding tokens get `filler`."""
        given = of_token_N if tokens is None else of_token_N[tokens]
        if self._ranks is None:
            return given
        missing = given.new_full((-len(given) % self._ranks.size, *given.shape[1:]), filler)
        return self._ranks.own_slice(torch.cat([given, missing]))

    def _of_all_ranks(self, chosen_sLK: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Experts that ran, gathered from all ranks' slices, without padding tokens."""
        if self._ranks is None:
            return chosen_sLK
        # Neither NCCL nor gloo supports int16.
        gathered = self._ranks.gather_tokens(chosen_sLK.view(torch.uint8)).view(chosen_sLK.dtype)
        return gathered[:num_tokens]

    @property
    def chosen(self) -> torch.Tensor:
        """Experts that ran, int16 [N, L, K], once every token ran."""
        assert self._chosen_NLK is not None
        return self._chosen_NLK

    def routes_of_rows(self, layers: Sequence[int], num_layers: int) -> torch.Tensor:
        """Experts that ran, int16 [F, num_layers, K], row by row, for replay in a later forward.

        Args:
            layers: indices of the decoder layers with experts.
            num_layers: all decoder layers; those without experts get NATIVE.
        """
        chosen_NLK = self.chosen
        routes_NLK = chosen_NLK.new_full((len(chosen_NLK), num_layers, chosen_NLK.shape[-1]), NATIVE)
        routes_NLK[:, list(layers)] = chosen_NLK
        return routes_NLK[torch.from_numpy(self.forest.row_index.values.astype(np.int64)).to(chosen_NLK.device)]

    def load(self, num_experts: int) -> torch.Tensor:
        """Logical tokens of all rows per expert, float64 [L, E]."""
        return expert_load(self.chosen, self._count_N, num_experts)

    def load_of_rows(self, num_experts: int) -> torch.Tensor:
        """Tokens of each row per expert, float64 [B, L, E] on the host: the sum over the segments on the row's path."""
        forest, chosen_NLK = self.forest, self.chosen
        num_layers = chosen_NLK.shape[1]
        # Number (segment, layer) pairs consecutively, so that one bincount covers them all.
        layer_NL = torch.from_numpy(forest.segment_of_token)[:, None] * num_layers + torch.arange(num_layers)
        flat_index = layer_NL.to(chosen_NLK.device)[..., None] * num_experts + chosen_NLK
        size = forest.num_segments * num_layers * num_experts
        load_SLE = torch.bincount(flat_index.flatten(), minlength=size).view(-1, num_layers, num_experts).cpu().numpy()
        for segment, parent in enumerate(forest.segments.parent.tolist()):
            if parent >= 0:
                load_SLE[segment] += load_SLE[parent]
        last_token = forest.row_index.values[forest.row_index.offsets[1:] - 1]
        return torch.from_numpy(load_SLE[forest.segment_of_token[last_token]]).double()
