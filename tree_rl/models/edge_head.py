"""A language-model head that returns the log-probs of requested edges and never stores the [R, V] logits.

A context variable carries the request. The head computes inside its own forward, where FSDP2 has gathered its weight.
It returns the result as the model's `logits`, so that FSDP2's hooks see it.
Legend: N tokens of the forward, R tokens whose hidden states are projected, C hidden size, V vocabulary.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tree_kernels.edge_log_probs import EdgeRows, EdgeValues, edge_log_probs_of_rows, logits_edge_log_probs_of_rows
from tree_rl.models.logits_rule import LogitsRule, find_logits_rule


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EdgeRequest:
    """The wanted edges of one forward, on the device; can be reused for another forward over the same tokens."""

    kept_R: torch.Tensor
    """int64 [R], at least one: indices in the forward of the tokens whose hidden states the head reads."""
    rows: EdgeRows
    """The wanted edges; their sources are indices into R."""
    extras: tuple[str, ...] = ()
    """Outputs besides log-probs: `entropy`, `sum_pi_squared`, as `tree_kernels.edge_log_probs` names them."""

    @property
    def extra_flags(self) -> dict[str, Any]:
        """`extras` as keyword arguments of the kernels."""
        return dict.fromkeys(self.extras, True)


@dataclass(kw_only=True, slots=True)
class _Call:
    """The state of one forward with a request."""

    request: Callable[[], EdgeRequest]
    """Plans the request when it is first called."""
    selects: bool
    """True if the head gets all hidden states and selects those that it reads."""
    is_answered: bool = False


EVERY_TOKEN = 0
"""Value of transformers' `logits_to_keep` with which the head gets a view of all hidden states."""

# A context variable is visible only in the thread that sets it.
_CALL: ContextVar[_Call | None] = ContextVar("edge_call", default=None)


def edge_values(
    model: Callable[..., Any], model_kwargs: dict[str, object], request: Callable[[], EdgeRequest]
) -> EdgeValues:
    """Log-probs of the wanted edges from one forward.

    Args:
        model: causal language model, wrapped or not. A head prepared by `use_edge_head` returns the values itself.
            Any other head computes the logits [R, V] of the tokens at which edges start.
        model_kwargs: arguments of the model's forward.
        request: plans the wanted edges. An `EdgeHead` calls it; on a GPU the layers below are still computing then.

    Returns:
        One value per edge, in the order of the request.

    Raises:
        RuntimeError: a wrapper between the head and the caller changed the head's output, or replaced its forward.
    """
    head_of = getattr(model, "get_output_embeddings", None)
    call = _Call(request=cache(request), selects=head_of is not None and isinstance(head_of(), EdgeHead))
    token = _CALL.set(call)
    try:
        keep = EVERY_TOKEN if call.selects else call.request().kept_R
        answer = model(**model_kwargs, logits_to_keep=keep).logits
    finally:
        _CALL.reset(token)
    if isinstance(answer, _AbsorbingValues):
        return answer.values
    if isinstance(answer, EdgeValues):
        return answer
    if call.selects and not call.is_answered:
        raise RuntimeError(
            "the head was not asked for edge log-probs: something replaced its forward after use_edge_head. Replace it "
            "before use_edge_head, which then keeps computing logits"
        )
    if call.is_answered or not isinstance(answer, torch.Tensor):
        raise RuntimeError(
            f"the head answered with edge log-probs, but the model returned {type(answer).__name__}: something after "
            "the head changes its output. Wrap the model before use_edge_head, which then keeps computing logits"
        )
    edges = call.request()
    return logits_edge_log_probs_of_rows(answer.squeeze(0), edges.rows, **edges.extra_flags)


def use_edge_head(model: PreTrainedModel) -> str | None:
    """Let the head of `model` answer edge requests; calls without a request still return logits.

    Call it after adapters are attached and before the model is sharded.

    Args:
        model: causal language model; if it is wrapped, the innermost one.

    Returns:
        None, or the reason why this model computes logits for requests as well.
    """
    head: Any = model.get_output_embeddings()
    if isinstance(head, EdgeHead):
        return None
    if type(head) is not nn.Linear or type(head.weight) is not nn.Parameter:
        return f"its head is a {type(head).__name__} with a {type(head.weight).__name__}, not a plain torch.nn.Linear"
    if "forward" in vars(head):
        return f"something replaced its head's forward by {vars(head)['forward']}"
    rule = find_logits_rule(model)
    if isinstance(rule, str):
        return rule
    head.__class__ = EdgeHead
    assert isinstance(head, EdgeHead)
    head.rule = rule
    return None


class EdgeHead(nn.Linear):
    """A `torch.nn.Linear` whose forward answers the active request, if any."""

    rule: LogitsRule

    def forward(self, hidden_1RC: torch.Tensor) -> Any:
        """Logits [1, R, V], or edge values if a request is active; then the input may have all N tokens."""
        call = _CALL.get()
        if call is None:
            return super().forward(hidden_1RC)
        if call.is_answered:
            raise RuntimeError("the head ran twice in one forward: this model cannot answer edge requests")
        request, rule = call.request(), self.rule
        if call.selects:
            hidden_1RC = hidden_1RC.index_select(1, request.kept_R)
        if hidden_1RC.shape[:-1] != (1, len(request.kept_R)):
            raise ValueError(
                f"expected the hidden states of {len(request.kept_R)} tokens, received {tuple(hidden_1RC.shape)}; the "
                "model ignores logits_to_keep"
            )
        if isinstance(self.weight, DTensor):
            raise TypeError("expected a gathered head weight, received a DTensor; tensor parallelism is not supported")
        call.is_answered = True
        rows = request.rows
        if rule.factor != 1.0:
            rows = replace(rows, row_temperature=rows.row_temperature / rule.factor)
        values = edge_log_probs_of_rows(
            hidden_1RC.squeeze(0),
            self.weight,
            rows,
            bias=self.bias,
            softcap=rule.softcap,
            **request.extra_flags,
        )
        if not rule.computes:
            return values
        # Autocast may choose the dtype.
        no_logits = nn.functional.linear(hidden_1RC.detach()[:, :0], self.weight.detach())
        return _AbsorbingValues(values, no_logits.dtype)


class _AbsorbingValues(NamedTuple):
    """Edge values that already include the model's scaling or capping of logits, so that the model's own has no effect.

    Operations return new tensors where they do for logits. FSDP2 gathers weights in the order in which gradients reach
    the outputs of model and head, and this order must be the same on ranks that run a forest, rows or a dummy.
    """

    values: EdgeValues
    logits_dtype: torch.dtype
    """The dtype that the logits of this head would have had without a request."""

    def __mul__(self, factor: Any) -> "_AbsorbingValues":
        return self._passed_on()

    def __truediv__(self, divisor: Any) -> "_AbsorbingValues":
        return self._passed_on()

    def float(self) -> "_AbsorbingValues":
        """Models that cast their logits (Nemotron-H) get the values, which are float32 already."""
        return self if self.logits_dtype is torch.float32 else self._passed_on()

    def contiguous(self) -> "_AbsorbingValues":
        """Models that want their logits contiguous (OPT), which they are already, get the values."""
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> "_AbsorbingValues":
        if function is not torch.tanh:
            raise TypeError(f"expected a model that only scales or caps its logits, received {function}")
        return args[0]._passed_on()

    def _passed_on(self) -> "_AbsorbingValues":
        extras = (None if value is None else value.clone() for value in self.values[1:])
        return self._replace(values=EdgeValues(self.values.log_prob.clone(), *extras))
