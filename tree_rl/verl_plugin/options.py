"""The `tree:` block of an engine config, and the model types that choose the tree engines."""

from dataclasses import dataclass, field
from typing import Any

from verl.base_config import BaseConfig
from verl.workers.config import FSDPEngineConfig

from tree_kernels.tree_attention import IMPLEMENTATIONS

TREE_LANGUAGE_MODEL = "tree_language_model"
"""`model_type` of the actor."""
TREE_VALUE_MODEL = "tree_value_model"
"""`model_type` of the critic."""
MODES = ("auto", "tree", "flat")
SCOPES = ("uid", "rank")
AUTO = "auto"
PATH_WEIGHTINGS = ("verl", "sep_avg", "token_unique")


@dataclass
class TreeConfig(BaseConfig):
    """How rows become trees inside the engine.

    Raises:
        ValueError: a value is not one of the choices; names the key.
    """

    mode: str = "auto"
    """auto: tree or flat per group, by cost; tree: always; flat: stock verl."""

    max_tokens: int | str | None = None
    """Unique tokens per forward; a tree beyond it runs in partitions. None takes verl's own budget
    (ppo_max_token_len_per_gpu and its siblings); auto sizes it to the GPU's memory after the first update."""

    scope: str = "uid"
    """uid: rows share prefixes inside one prompt's group, which stays whole; rank: among all rows of the rank."""

    path_weighting: str = "verl"
    """verl: verl's weights of rows; sep_avg: each of a tree's K rows weighs 1/K (paper, eq. 1); token_unique: each
    unique token weighs one, however many rows train it."""

    attention: str = AUTO
    """Implementation of tree attention: auto takes the fastest one that runs here; fa4, triton, flex, sdpa and
    reference run or are refused. With verl's full_determinism auto takes a deterministic one."""

    router_aux_loss_coef: float | None = None
    """Mixture of Experts: factor on transformers' router auxiliary loss over all rows of an update, on all ranks; 0
    only reports the experts' load. None: neither, as in verl's FSDP engine. A number makes all groups run as trees."""

    self_check: bool = True
    """Before the first batch, compare the log-probs (values) of one group as a tree with those of stock verl."""

    offload: bool = False
    """Keep keys and values that wait for other partitions in pinned host memory. Slower; for trees whose longest path
    of partitions does not fit the GPU."""

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
        coef = self.router_aux_loss_coef
        if coef is not None and (self.mode == "flat" or not coef >= 0):
            raise ValueError(
                f"tree.router_aux_loss_coef={coef!r} with tree.mode={self.mode}: expected a number of at least 0 and "
                "mode auto or tree; set it to null, as stock verl's FSDP engine has no router auxiliary loss"
            )
        tokens = self.max_tokens
        is_count = isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 1
        if not (tokens is None or tokens == AUTO or is_count):
            raise ValueError(f"tree.max_tokens={tokens!r}: expected a positive number of tokens, auto or null")


@dataclass
class TreeFSDPEngineConfig(FSDPEngineConfig):
    """verl's FSDP options plus the `tree:` block.

    Select it with `fsdp_config._target_=tree_rl.verl_plugin.options.TreeFSDPEngineConfig`. Without it the tree engine
    uses the defaults of `TreeConfig`.
    """

    strategy: str = "fsdp2"
    """The tree engine runs on FSDP2."""

    tree: Any = field(default_factory=TreeConfig)
    """A `TreeConfig` or a mapping with its keys."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Hydra passes nested nodes without a _target_ as mappings.
        object.__setattr__(self, "tree", as_tree_config(self.tree))


def as_tree_config(value: Any) -> TreeConfig:
    """Turn the `tree:` node of a config into a checked `TreeConfig`.

    Raises:
        ValueError: an unknown key or value, named.
    """
    if isinstance(value, TreeConfig):
        return value
    known = TreeConfig.__dataclass_fields__
    given = {key: entry for key, entry in dict(value or {}).items() if key != "_target_"}
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"tree.{unknown[0]}: no such option; known are {', '.join(sorted(set(known) - {'_target_'}))}")
    return TreeConfig(**given)
