"""A row of the table of refusals: key, condition, sentence, remedy."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from omegaconf import OmegaConf


class UnsupportedFeatureError(ValueError):
    """A setting, model or batch that trees do not run; the message names the config key and the remedy."""


class Of(Enum):
    """Subject of a row of the table: the node that it checks."""

    VALUES = "verl's whole config: words and numbers that no job can run with"
    FILES = "verl's whole config: paths on this machine"
    SFT = "verl's whole config of SFT or DPO"
    MODEL_FILES = "a role's `model` node: paths on this machine"
    MACHINE = "verl's whole config of a job that samples: what this machine and its files lack"
    JOB = "verl's whole config"
    POLICY = "verl's whole config, of an actor on trees"
    CRITIC = "verl's whole config, of a critic on trees"
    VERLS_TRAINER = "verl's whole config, of a tree engine under verl's own trainer"
    STRATEGY = "a role's node"
    ROLE = "a role's node, too"
    ACTOR = "the actor's node"
    MODEL = "a role's `model` node, or verl's `HFModelConfig`"
    CRITIC_MODEL = "the same of a critic"
    ENGINE = "a role's FSDP options: the node, or verl's `FSDPEngineConfig`"
    CRITIC_ENGINE = "such options of a critic"
    RANKS = "sizes of an engine's groups of ranks, and `ranks`, their number"
    CLUSTER = "`trainer.n_gpus_per_node` and `nnodes`, and `gpus`, the number on each of Ray's nodes"
    HEADS = "an engine's size of sequence parallelism, and its model's `config`"
    PACKING = "an engine's `tree` options; `leaks`: packed rows of its model see each other"
    GENERATION = "`name` of the rollout engine; `recurrent`: the model's layers carry a state"
    ADAPTERS = "a built model, adapters attached"
    BATCH_OF_TEXT = "a batch for a model whose rows are text"
    BATCH_WITH_IMAGES = "a batch for a model whose rows may have images"
    BATCH_WITHOUT_REPLAY = "a batch for an engine that repeats no routes"
    POLICY_WITHOUT_REPLAY = "the same for an actor, whose rows' routes would matter"
    UPDATE_WITH_REUSE = "an update's batch under `tree.reuse_log_probs=True`"


ABSENT = object()


def option(node: Any, key: str, default: Any = None) -> Any:
    """The value at a dotted key of a config node; `default` if a part of the key is absent."""
    if OmegaConf.is_config(node):
        return OmegaConf.select(node, key, default=default)
    *path, last = key.split(".")
    for part in path:
        node = node.get(part, None) or {}
    return node.get(last, default)


def nodes_below(node: Mapping[Any, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of all nodes of a config as plain mappings; `place` is the text before their keys."""
    for name, value in node.items():
        yield f"{place}{name}", value
        if isinstance(value, dict):
            yield from nodes_below(value, f"{place}{name}.")


def is_true(value: Any, _: Any) -> bool:
    """The condition of most rows: the option is set."""
    return bool(value)


@dataclass(frozen=True, slots=True)
class Refusal:
    """One row. Sentence and remedy are format strings: `{key}` is the whole dotted key, `{place}` the node's, `{value}`
    the key's value, `{option}` "the tree engine does not support KEY=VALUE"; a condition may add words."""

    key: str
    """Dotted key below the node, which may run if it lacks the key; empty if the condition reads the node."""
    sentence: str
    """What is wrong, and why."""
    remedy: str = "set it to False"
    """What to write instead; may be empty."""
    when: Callable[[Any, Any], Any] = is_true
    """Function of the key's value and the node: false if the node may run, else true or a mapping of words."""

    def message(self, node: Any, place: str) -> str | None:
        """The refusal of a node; None if it may run.

        `place` is the dotted key of the node in the config, empty for the whole config.
        """
        value = option(node, self.key, ABSENT) if self.key else None
        found = None if value is ABSENT else self.when(value, node)
        if not found:
            return None
        key = f"{place}.{self.key}" if place else self.key
        words = {"key": key, "place": place, "value": value, **(found if isinstance(found, dict) else {})}
        words["option"] = f"the tree engine does not support {key}={words['value']}"
        return "; ".join(part.format(**words) for part in (self.sentence, self.remedy) if part)
