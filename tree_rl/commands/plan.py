"""`tree-rl plan`: how rows would run on one or many GPUs. Imports neither torch nor verl."""

from pathlib import Path
from typing import Annotated

import typer

from tree_rl.commands.row_options import (
    MOST_GPUS,
    GroupBy,
    Groups,
    Json,
    Model,
    RowsOption,
    Tokenizer,
    read_file,
    refuse_unused,
)
from tree_rl.cost.cluster.hardware import Cluster
from tree_rl.cost.memory.choice import Chooser
from tree_rl.cost.memory.model import GIB, assumed_memory_model
from tree_rl.inspection.chat_rows import RowsPer
from tree_rl.inspection.files import InputError
from tree_rl.inspection.files.terminal import one_line_errors, say
from tree_rl.inspection.model_shape import read_model_shape
from tree_rl.inspection.run_plan import plan_run
from tree_rl.inspection.scale.gpu_split import format_split, propose_split
from tree_rl.inspection.scale.predict_scale import ScaleSettings, format_scale, predict_scale
from tree_rl.inspection.text import format_run_plan
from tree_rl.inspection.verdict.as_json import divided, planned, scaled

MOST_PROMPTS = 1_000_000
"""Most groups of a predicted step, whose layout takes minutes."""
MOST_SECONDS = 1e12
OF_SPLITS = ("server_gpus", "rollout_seconds", "training_seconds", "rows_seconds")
"""Options of `--ranks --cluster` without `--model`."""
OF_STEPS = ("shards", "mini_batches", "prompts", "gpus_per_node", "tflops", "network", "gpu_memory", "checkpoint")
"""Options of `--ranks` with `--model`."""


def plan_file(
    context: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(help="Rows, as in `tree-rl inspect`. With --cluster and no --model: a run's metrics.jsonl."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, max=2**31 - 1, help="Most unique tokens of one forward (tree.max_tokens).")
    ] = None,
    tokenizer: Tokenizer = None,
    rows_per: RowsOption = RowsPer.TRIAL,
    group_by: GroupBy = None,
    model: Model = None,
    groups: Groups = 20,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_GPUS, help="GPUs: predict a training step, its slowest rank, what helps."),
    ] = None,
    sp: Annotated[int, typer.Option(min=1, help="GPUs that share tokens (Ulysses).")] = 1,
    shards: Annotated[
        int | None, typer.Option(min=1, help="GPUs that hold one copy of the weights (fsdp_size).")
    ] = None,
    mini_batches: Annotated[int, typer.Option(min=1, max=MOST_PROMPTS, help="Optimizer steps of a training step.")] = 1,
    prompts: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_PROMPTS, help="Groups of a step, drawn from FILE. Default: each once."),
    ] = None,
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster",
            help="Smaller clusters, too, and what breaks first. Without --model: GPUs for rollout and for training.",
        ),
    ] = False,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs of a node.")] = 8,
    tflops: Annotated[float, typer.Option(min=1.0, help="Of one GPU in training (docs/scale.md).")] = Cluster.flops
    / 1e12,
    network: Annotated[
        float, typer.Option(min=0.1, help="GB/s that a GPU receives from other nodes.")
    ] = Cluster.network / 1e9,
    gpu_memory: Annotated[float, typer.Option(min=1.0, help="GiB of a GPU.")] = Cluster.memory / GIB,
    checkpoint: Annotated[
        Path | None, typer.Option(help="global_step_N of a run of this model: by the costs that it has measured.")
    ] = None,
    server_gpus: Annotated[
        int, typer.Option(min=1, help="GPUs of one rollout server, with --cluster and no --model.")
    ] = 1,
    rollout_seconds: Annotated[
        float | None, typer.Option(min=1e-3, max=MOST_SECONDS, help="GPU-seconds of a step's rollouts.")
    ] = None,
    training_seconds: Annotated[
        float | None, typer.Option(min=1e-3, max=MOST_SECONDS, help="GPU-seconds of a step's training on trees.")
    ] = None,
    rows_seconds: Annotated[
        float | None, typer.Option(min=1e-3, max=MOST_SECONDS, help="GPU-seconds of a step's training on rows.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show how each group of rows in FILE would run: whole or in partitions, and without trees.

    With --model: how groups beyond the budget would run on a GPU, and the memory that takes. With --ranks: what a
    training step takes on that many GPUs. With --ranks --cluster and no --model: GPUs for rollout and for training.
    """
    with one_line_errors():
        if ranks is None:
            refuse_unused(context, "--ranks", "sp", "cluster", *OF_STEPS, *OF_SPLITS)
        elif model is not None:
            refuse_unused(context, "--cluster and no --model", *OF_SPLITS)
        elif cluster:
            refuse_unused(context, "--model", "max_tokens", *OF_STEPS)
        if ranks is not None and cluster and model is None:
            given = {"rollout": rollout_seconds, "trees": training_seconds, "rows": rows_seconds}
            splits, sources = propose_split(file, given, ranks, server_gpus=server_gpus, sharing=sp)
            say(divided(splits, sources) if as_json else format_split(splits, sources))
            return
        if file is None or max_tokens is None:
            raise InputError(
                "plan: expected FILE and --max-tokens; only --ranks --cluster without --model needs neither"
            )
        rows = read_file(file, tokenizer, rows_per, group_by, model).rows
        if ranks is not None:
            rates = {"flops": tflops * 1e12, "network": network * 1e9, "memory": gpu_memory * GIB}
            hardware = Cluster(gpus=ranks, gpus_per_node=gpus_per_node, **rates)
            settings = ScaleSettings(hardware, sp, shards, mini_batches, prompts, max_tokens, checkpoint)
            steps, said = predict_scale(rows, model, settings, sweep=cluster)
            say(scaled(steps, said) if as_json else format_scale(steps, said))
            return
        chooser = None if model is None else Chooser(model=assumed_memory_model(read_model_shape(model)))
        plan = plan_run(rows, max_tokens, chooser)
        say(planned(plan) if as_json else format_run_plan(plan, at_most=groups))
