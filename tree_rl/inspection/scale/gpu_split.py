"""`tree-rl plan --cluster` without rows: proposes GPUs for rollout and training from measured times of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from tree_rl.cost.cluster.split import Split, StepLoad, fastest_split, seconds_in_turns
from tree_rl.inspection.files import InputError
from tree_rl.inspection.files.run_log import RunLog, read_run
from tree_rl.inspection.text import format_table
from tree_rl.inspection.verdict.update_share import SHORTENED, STEP, TREES

ROLLOUT, WEIGHTS, CHECKPOINT = "timing_s/gen", "timing_s/update_weights", "timing_s/save_checkpoint"
TOKENS, THROUGHPUT = "perf/total_num_tokens", "perf/throughput"
METRICS = "tree/metrics_seconds"
SAVING, STALENESS = "tree/realised_saving", "training/off_policy/trajectory_staleness/max"
NEEDED = (STEP, ROLLOUT, TOKENS, THROUGHPUT)
HEADER = (
    *("run", "rollout GPUs", "training GPUs", "step s", "rollout idle", "training idle", "GPU-seconds", "in turns s"),
)


def propose_split(
    run: Path | None, given: Mapping[str, float | None], gpus: int, *, server_gpus: int, sharing: int
) -> tuple[dict[str, Split], list[str]]:
    """The fastest split with trees and without ("trees", "rows"; a part without times is left out), and its sources.

    Args:
        run: the log of a run whose rollouts and updates take turns, or its folder.
        given: GPU-seconds of a step in place of measured ones: of "rollout", of training on "trees", on "rows".

    Raises:
        InputError: a time is missing, the run is asynchronous, or there are too few GPUs.
    """
    loads, said = ({}, []) if run is None else _measured(read_run(run))
    measured = next(iter(loads.values()), StepLoad(rollout=0.0, training=0.0))
    rollout = given["rollout"] or measured.rollout
    trainings = {name: load.training for name, load in loads.items()}
    trainings |= {name: seconds for name in ("trees", "rows") if (seconds := given[name])}
    if not rollout or not trainings:
        raise InputError(
            "--cluster without --model: expected the log of a run, or --rollout-seconds with --training-seconds or "
            "--rows-seconds"
        )
    try:
        splits = {
            name: fastest_split(
                replace(measured, rollout=rollout, training=training),
                gpus,
                server_gpus=server_gpus,
                sharing=sharing,
            )
            for name, training in sorted(trainings.items(), reverse=True)
        }
    except ValueError as error:
        raise InputError(f"--ranks {error}") from error
    if len(splits) == 2:
        ratio = splits["rows"].gpu_seconds / splits["trees"].gpu_seconds
        said.append(f"Without trees a step takes {ratio:.2f} times the GPU-seconds.")
    return splits, said


def format_split(splits: Mapping[str, Split], said: Sequence[str]) -> str:
    """The result of `propose_split` as text."""
    lines = [
        (
            name,
            str(split.rollout_gpus),
            str(split.training_gpus),
            f"{split.step:.2f}",
            f"{split.rollout_idle:.0%}",
            f"{split.training_idle:.0%}",
            f"{split.gpu_seconds:.1f}",
            f"{seconds_in_turns(split.load, split.rollout_gpus + split.training_gpus):.2f}",
        )
        for name, split in splits.items()
    ]
    return "\n".join([format_table(HEADER, lines), "", *said]).rstrip()


def _measured(run: RunLog) -> tuple[dict[str, StepLoad], list[str]]:
    """The loads of a run, medians over its steps without the first, which compiles."""
    if any(value for value in run.column(STALENESS)):
        raise InputError(f"{run.name}: expected a run whose rollouts and updates take turns, found an asynchronous one")
    steps = [step for step in run.metrics if all(step.get(name, 0.0) > 0 for name in NEEDED)]
    steps = steps[1:] or steps
    if not steps:
        raise InputError(f"{run.name}: expected steps with {', '.join(NEEDED)}; found none")
    gpus = round(median(step[TOKENS] / step[THROUGHPUT] / step[STEP] for step in steps))
    waits = (ROLLOUT, WEIGHTS, METRICS)
    rollout, weights, metrics = (median(step.get(name, 0.0) for step in steps) for name in waits)
    apart = (ROLLOUT, WEIGHTS, CHECKPOINT)
    training = median(step[STEP] - sum(step.get(name, 0.0) for name in apart) for step in steps)
    load = StepLoad(rollout=gpus * rollout, training=gpus * training, weights=weights, metrics=metrics)
    said = [
        f"{run.name} (steps: {len(steps)}, GPUs: {gpus}): {load.rollout:.1f} GPU-seconds of rollouts, "
        f"{load.training:.1f} of training, {weights:.2f} s for weights, {metrics:.2f} for metrics."
    ]
    if not run.has(TREES):
        return {"rows": load}, said
    # A step that computed nothing does not tell what its rows would take.
    saved_seconds = [_saved(step) for step in steps if step.get(SAVING, 0.0) < 1]
    if not saved_seconds:
        return {"trees": load}, said
    saved = gpus * median(saved_seconds)
    said.append(
        "Rows: passes over rows take longer by the tokens that trees saved; --rows-seconds tells a measured time."
    )
    return {"trees": load, "rows": replace(load, training=load.training + saved)}, said


def _saved(step: Mapping[str, float]) -> float:
    """Seconds that the same passes would take longer without trees, if time goes by tokens."""
    passes, saving = sum(step.get(name, 0.0) for name in SHORTENED), step.get(SAVING, 0.0)
    return passes * saving / (1 - saving)
