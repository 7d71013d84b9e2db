"""Charts of a report: the metrics of each, what is normal, and how to get metrics that are missing."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One chart."""

    title: str
    about: str
    """Normal values, in one or two sentences."""
    lines: Sequence[tuple[str, str]]
    """(metric, name in the legend); metrics that a run lacks are not drawn."""
    missing: str
    """Text for a run without any of the metrics: why, or how to get them."""
    prefix: str = ""
    """Replaces `lines` by all metrics with this prefix that are not always 0."""
    is_log: bool = False
    """True for a logarithmic axis."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """Normal values of a metric."""

    metric: str
    name: str
    low: float
    high: float
    says: str
    """The band in words."""
    over: str | None = None
    """Metric by which the first one is divided."""


BANDS = (
    Band(metric="actor/ppo_kl", name="KL to the policy before the update", low=-0.1, high=0.1, says="within 0.1 of 0"),
    Band(
        metric="tree/imbalance",
        over="tree/imbalance_bound",
        name="slowest rank over the best possible",
        low=0,
        high=1.1,
        says="up to 1.1",
    ),
    Band(metric="tree/session/ended_completed", name="sessions completed", low=0.5, high=1, says="over half"),
    Band(metric="tree/session/drift_branches", name="branches by drift per session", low=0, high=0.1, says="up to 0.1"),
    Band(
        metric="tree/session/drift_edited",
        name="edited per session: turns of the model that the client changed",
        low=0,
        high=inf,
        says="depends on the agent",
    ),
    Band(metric="tree/self_check_error", name="self-check", low=0, high=1, says="1e-5 in float32, 1 in bf16"),
)
"""Bands by which a user can tell whether a value is normal."""

TIMES = (
    ("timing_s/gen", "rollouts"),
    ("timing_s/reward", "reward"),
    ("timing_s/old_log_prob", "old log-probs"),
    ("timing_s/ref", "reference"),
    ("timing_s/values", "values"),
    ("timing_s/adv", "advantages"),
    ("timing_s/update_critic", "critic's update"),
    ("timing_s/update_actor", "actor's update"),
    ("timing_s/update_weights", "weights to the rollout"),
    ("timing_s/save_checkpoint", "checkpoint"),
)
"""Parts of a step that do not overlap; the remaining time of `timing_s/step` is shown as the rest."""
VALIDATION = "timing_s/testing"
"""Follows a step and is no part of `timing_s/step`."""
MEMORY = ("actor/perf/max_memory_allocated_gb", "perf/max_memory_allocated_gb")
"""Most memory of a GPU, in reinforcement learning and in SFT."""

SECTIONS = (
    Section(
        title="Reward",
        about="Mean over sessions; a session counts once, however many rows it has.",
        lines=(("tree/session_score/mean", "sessions"), ("critic/score/mean", "rows")),
        missing="An SFT run has none.",
    ),
    Section(
        title="Loss",
        about="Of the actor, and of the critic where there is one.",
        lines=(
            ("actor/pg_loss", "actor, policy gradient"),
            ("critic/vf_loss", "critic"),
            ("train/loss", "SFT, training"),
            ("val/loss", "SFT, validation"),
        ),
        missing="The run's log has no loss.",
    ),
    Section(
        title="KL",
        about="To the policy before the update (ppo_kl), and to the reference policy where the loss has it.",
        lines=(("actor/ppo_kl", "before the update"), ("actor/kl_loss", "reference")),
        missing="actor_rollout_ref.actor.use_kl_loss=true compares with a reference policy.",
    ),
    Section(
        title="Overlap",
        about="POR: the share of the rows' tokens that repeat a prefix. Saved: what the update really left out; it is "
        "less where a group is split over ranks or runs as rows.",
        lines=(("tree/por", "POR"), ("tree/realised_saving", "saved")),
        missing="The run has no trees: trainer.v1.trainer_mode=tree_sync.",
    ),
    Section(
        title="Memory",
        about="Most memory of a GPU that torch held, in GiB; on a CPU the process's. Predicted: without weights and "
        "optimizer.",
        lines=(
            (MEMORY[0], "allocated"),
            ("actor/tree/predicted_peak_gib", "predicted"),
            (MEMORY[1], "allocated"),
        ),
        missing="The run's log has no memory.",
    ),
    Section(
        title="Balance of ranks",
        about="Predicted time of the slowest rank over the mean; 1 is even. At best: the costliest row decides.",
        lines=(("tree/imbalance", "slowest rank"), ("tree/imbalance_bound", "at best")),
        missing="The run has no trees.",
    ),
    Section(
        title="How sessions ended",
        about="Shares of the sessions. completed: the agent ended by itself.",
        lines=(),
        prefix="tree/session/ended_",
        missing="Agents in environments report it (docs/agents.md).",
    ),
    Section(
        title="Drift",
        about="Turns per session that came back otherwise than the model wrote them, by cause. Edited: the client "
        "changed a turn; rewritten, reasoning dropped: the template did. Avoided and returned turns cost no row.",
        lines=(),
        prefix="tree/session/drift_",
        missing="Nothing drifted, or no gateway recorded the sessions.",
    ),
    Section(
        title="Self-check",
        about="Largest difference of log-probs between tree and rows before the first batch. Normal: below 1e-5 in "
        "float32, below 1 in bf16.",
        lines=(("tree/self_check_error", "largest difference"),),
        missing="tree.self_check=true compares.",
        is_log=True,
    ),
)
