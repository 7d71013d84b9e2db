"""The options of a step over trees; verl reads them from the `tree:` block of an engine's config."""

from dataclasses import dataclass
from math import inf

from tree_kernels.tree_attention import IMPLEMENTATIONS

MODES = ("auto", "tree", "flat")
SCOPES = ("uid", "rank")
AUTO = "auto"
GIVEN_WEIGHTINGS = ("session", "custom")
"""Path weightings that may need more than the rows' tokens and groups; they only apply to training."""
PATH_WEIGHTINGS = ("verl", "sep_avg", "token_unique", *GIVEN_WEIGHTINGS)


@dataclass
class TreeOptions:
    """How rows become trees.

    Raises:
        ValueError: a value is not one of the choices; the message names the key.
    """

    mode: str = "auto"
    """`auto`: a tree or single rows for each group, whichever costs less. `tree`: always a tree. `flat`: stock verl."""

    max_tokens: int | str | None = None
    """Most unique tokens of one forward; a larger group runs in a way that needs less memory. None takes the trainer's
    budget (verl: `ppo_max_token_len_per_gpu` and its siblings). `auto` fits it to the GPU's memory after the first
    update."""

    scope: str = "uid"
    """`uid`: rows share prefixes within their group, which stays in one micro-batch. `rank`: among all rows of the
    rank."""

    path_weighting: str = "verl"
    """`verl`: the loss weights rows as always. `sep_avg`: rows of a tree weigh 1 / K (paper, eq. 1). `token_unique`: a
    unique token weighs one, however many rows train it. `session`: a session weighs one, however many rows it left.
    `custom`: rows weigh what `custom_weights` names."""

    custom_weights: str = "row_weight"
    """For `path_weighting=custom`: an entry of the rows, in SFT a column of the data; with a dot a function of a
    prompt's `CreditTree`."""

    attention: str = AUTO
    """Implementation of tree attention; in a plain loop, an argument of `use_tree_attention`. `auto` takes the fastest
    that is installed and supported, with verl's `full_determinism` a deterministic one. A name (fa4, triton, flex,
    sdpa, reference) is used, or fails if it cannot run."""

    router_aux_loss_coef: float | None = None
    """For Mixture-of-Experts models: factor on transformers' router auxiliary loss over all rows of an update, on all
    ranks; every group then runs as a tree. 0 only reports the load of experts. None: neither, as in stock verl on
    FSDP."""

    self_check: bool = True
    """Before the first batch, compare a few rows as a tree with the same rows without one."""

    offload: bool | str = AUTO
    """Keeps layer inputs, and tensors that wait for other partitions, in pinned host memory. `auto`: if a group beyond
    `max_tokens` then runs faster. True: always the tensors that wait for other partitions. False: never."""

    def __post_init__(self) -> None:
        choices_of = {
            "mode": MODES,
            "scope": SCOPES,
            "path_weighting": PATH_WEIGHTINGS,
            "attention": (AUTO, *IMPLEMENTATIONS),
        }
        for key, choices in choices_of.items():
            value = getattr(self, key)
            if value not in choices:
                raise ValueError(f"tree.{key}={value!r}: expected one of {', '.join(choices)}")
        if self.mode == "flat" and self.path_weighting in GIVEN_WEIGHTINGS:
            raise ValueError(
                f"tree.path_weighting={self.path_weighting} with tree.mode=flat: rows then run as in stock verl, which "
                "weights them as always; set mode auto or tree"
            )
        if not isinstance(self.custom_weights, str):
            raise ValueError(f"tree.custom_weights={self.custom_weights!r}: expected a text")
        if self.offload not in (AUTO, True, False):
            raise ValueError(f"tree.offload={self.offload!r}: expected one of auto, true, false")
        coef: object = self.router_aux_loss_coef
        is_rate = isinstance(coef, int | float) and not isinstance(coef, bool) and 0 <= coef < inf
        if coef is not None and (self.mode == "flat" or not is_rate):
            raise ValueError(
                f"tree.router_aux_loss_coef={coef!r} with tree.mode={self.mode}: expected a finite number of at least "
                "0 and mode auto or tree; set it to null, as stock verl's FSDP engine has no router auxiliary loss"
            )
        tokens = self.max_tokens
        is_count = isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 1
        if not (tokens is None or tokens == AUTO or is_count):
            raise ValueError(f"tree.max_tokens={tokens!r}: expected a positive integer, auto or null")
