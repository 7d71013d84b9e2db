"""Options of `tree-rl plan` for a cluster."""

from pathlib import Path
from typing import Annotated

import typer

MOST_GPUS = 65_536
"""Largest cluster of a prediction, which assigns rows to every GPU."""
MOST_PROMPTS = 1_000_000
"""Most groups of a predicted step, whose layout takes minutes."""
MOST_SECONDS = 1e12


class ScaleOption:
    """Options that need `--ranks`, which itself needs `--model` or `--cluster`."""

    Ranks = Annotated[
        int | None,
        typer.Option(
            "--ranks", min=1, max=MOST_GPUS, help="GPUs: predict a training step, its slowest rank, what helps."
        ),
    ]
    Sharing = Annotated[int, typer.Option("--sp", min=1, help="GPUs that share tokens (Ulysses).")]
    Shards = Annotated[int | None, typer.Option(min=1, help="GPUs that hold one copy of the weights (fsdp_size).")]
    MiniBatches = Annotated[int, typer.Option(min=1, max=MOST_PROMPTS, help="Optimizer steps of a training step.")]
    Prompts = Annotated[
        int | None, typer.Option(min=1, max=MOST_PROMPTS, help="Groups of a step, drawn from FILE. Default: each once.")
    ]
    Sweep = Annotated[
        bool,
        typer.Option(
            "--cluster",
            help="Smaller clusters, too, and what breaks first. Without --model: GPUs for rollout and for training.",
        ),
    ]
    NodeGpus = Annotated[int, typer.Option("--gpus-per-node", min=1, help="GPUs of a node.")]
    TeraFlops = Annotated[float, typer.Option("--tflops", min=1.0, help="Of one GPU in training (docs/scale.md).")]
    Network = Annotated[float, typer.Option(min=0.1, help="GB/s that a GPU receives from other nodes.")]
    Memory = Annotated[float, typer.Option("--gpu-memory", min=1.0, help="GiB of a GPU.")]
    Checkpoint = Annotated[
        Path | None, typer.Option(help="global_step_N of a run of this model: by the costs that it has measured.")
    ]
    ServerGpus = Annotated[int, typer.Option(min=1, help="GPUs of one rollout server, with --cluster and no --model.")]
    RolloutSeconds = Annotated[
        float | None, typer.Option(min=1e-3, max=MOST_SECONDS, help="GPU-seconds of a step's rollouts.")
    ]
    TrainingSeconds = Annotated[
        float | None, typer.Option(min=1e-3, max=MOST_SECONDS, help="GPU-seconds of a step's training on trees.")
    ]
    RowsSeconds = Annotated[
        float | None, typer.Option(min=1e-3, max=MOST_SECONDS, help="GPU-seconds of a step's training on rows.")
    ]
