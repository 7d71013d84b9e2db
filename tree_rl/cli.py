"""Check the installation, inspect rows, plan a run, time updates, compile kernels.

`inspect` and `plan` import neither torch nor verl; `bench` and `precompile` import torch, `doctor` everything.
"""

import importlib.util
import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tree_rl.inspection.chat_rows import RowsPer
from tree_rl.inspection.drawing import Picture, draw_group
from tree_rl.inspection.files import InputError
from tree_rl.inspection.files.shown import shown, shown_path
from tree_rl.inspection.files.terminal import (
    fail,
    flush_output,
    one_line_errors,
    print_anything,
    print_mistake,
    say,
)
from tree_rl.inspection.files.writing import require_writable_folder, write_whole
from tree_rl.inspection.model_shape import QWEN2_5_7B, read_model_shape
from tree_rl.inspection.report import report_groups, total_of
from tree_rl.inspection.row import Row
from tree_rl.inspection.row_file import read_row_file
from tree_rl.inspection.run_plan import plan_run
from tree_rl.inspection.scale.hardware import GIB, Cluster
from tree_rl.inspection.scale.options import ScaleOption
from tree_rl.inspection.scale.report import ScaleSettings, report_scale
from tree_rl.inspection.text import format_report, format_run_plan
from tree_rl.training.memory.choice import Chooser
from tree_rl.training.memory.model import assumed_memory_model

if TYPE_CHECKING:
    from tree_rl.benchmark.options import BenchOptions
    from tree_rl.verl_plugin.checks.doctor import Finding

HEAD_SIZES, QUERY_HEADS_PER_KEY_HEAD, DTYPES = [64, 128], [1, 2, 4, 5, 8], ["bfloat16"]
"""What `precompile` compiles for by default: the Qwen3 and Llama 3 families."""

CLICK_ERROR: type[typer.BadParameter] = typer.BadParameter.__mro__[2]
"""Base of all mistakes in a command line; typer exports it under no name."""

app = typer.Typer(help="Train LLM agents on prefix trees instead of rows.", no_args_is_help=True, add_completion=False)

File = Annotated[Path, typer.Argument(help="A parquet, jsonl or json file with token ids or chat messages.")]
Tokenizer = Annotated[Path | None, typer.Option(help="Hugging Face tokenizer folder; needed for chat messages.")]
RowsOption = Annotated[RowsPer, typer.Option("--rows", help="Chat messages: one row per trajectory or per model call.")]
GroupBy = Annotated[str | None, typer.Option(help="Column of the group. Default: uid, group, group_id or task_id.")]
Model = Annotated[Path | None, typer.Option(help="config.json of the model; sets FLOP bound and vocabulary size.")]
Groups = Annotated[int, typer.Option(help="Groups to list.", min=0)]
Draw = Annotated[
    tuple[Picture, Path] | None, typer.Option(help="Draw one group: svg FILE or text FILE; - prints to the terminal.")
]
DrawGroup = Annotated[
    str | None, typer.Option("--draw-group", help="Group to draw. Default: the one with the most tokens.")
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most unique tokens of one forward (tree.max_tokens).")]


class DoctorOption:
    """Options of `doctor`, which no other command has."""

    NoRay = Annotated[bool, typer.Option("--no-ray", help="Skip the check inside a Ray worker.")]
    Cluster = Annotated[
        bool, typer.Option("--cluster", help="Compare every node of a running cluster with this process.")
    ]
    Nodes = Annotated[int | None, typer.Option(min=1, help="Nodes that the cluster must have.")]
    Address = Annotated[str | None, typer.Option(help="HOST:PORT of the head. Default: RAY_ADDRESS, or this machine.")]
    WaitSeconds = Annotated[float, typer.Option(min=0, help="How long to wait for the nodes.")]


class BenchOption:
    """Options of `bench`, which no other command has."""

    Model = Annotated[
        str, typer.Option(help="Random weights of these sizes: tiny, 0.6b, 8b, 32b, qwen3-30b-a3b, qwen3.5-4b.")
    ]
    Layers = Annotated[int | None, typer.Option(min=1, help="Decoder layers. Default: as many as the model has.")]
    Por = Annotated[list[float] | None, typer.Option(help="Overlap to draw, or to look for in --data. Repeatable.")]
    Data = Annotated[Path | None, typer.Option(help="A file of recorded rows, instead of drawn ones.")]
    NumRows = Annotated[int, typer.Option(min=1, help="Rows in each group.")]
    RowTokens = Annotated[int, typer.Option(min=2, help="Tokens in each row.")]
    Groups = Annotated[int, typer.Option(min=1, help="Groups in a batch.")]
    Trained = Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of tokens with a loss in drawn rows.")]
    Against = Annotated[
        str,
        typer.Option(
            help="packed: the same rows end to end, with the best kernels. "
            "verl: verl's engine, set up as in its scripts."
        ),
    ]
    Dtype = Annotated[
        str | None, typer.Option(help="bfloat16 (default on a GPU), float16 or float32 (default on a CPU).")
    ]
    MaxTokens = Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most tokens of one forward, on both sides. Default 262144; with --against verl, "
            "the limit of verl's scripts.",
        ),
    ]
    Repeats = Annotated[int, typer.Option(min=1, help="Timed updates of each side.")]
    Steps = Annotated[int, typer.Option(min=0, help="Compare the losses of this many steps instead of times.")]
    LearningRate = Annotated[
        float, typer.Option(min=0.0, help="Learning rate of --steps. Fine-tuning uses 1e-6 to 1e-5.")
    ]
    TreeAttention = Annotated[str, typer.Option(help="Implementation of tree attention.")]
    PackedAttention = Annotated[str, typer.Option(help="Attention of rows: fa4, cudnn, fa2, flash, flex or sdpa.")]
    ProjectAll = Annotated[bool, typer.Option("--project-all", help="Packed rows project untrained tokens, too.")]
    Checkpointing = Annotated[bool, typer.Option(help="Recompute every layer in the backward.")]
    Liger = Annotated[
        bool | None,
        typer.Option(help="Liger's fused layers on both sides. Default: on a GPU where liger-kernel is installed."),
    ]
    Trace = Annotated[bool, typer.Option("--trace", help="Profile one update of each side.")]
    Out = Annotated[Path | None, typer.Option(help="Folder for the CSV and the figure.")]
    Commit = Annotated[str | None, typer.Option(help="Commit to write beside the figures; default: of the package.")]


class PrecompileOption:
    """Options of `precompile`, which no other command has."""

    Cache = Annotated[Path, typer.Option(help="Folder for the compiled kernels.")]
    HeadSizes = Annotated[list[int], typer.Option("--head-size", help="64, 128 or 256. Repeatable.")]
    Gqa = Annotated[list[int], typer.Option("--gqa", min=1, help="Query heads per key head. Repeatable.")]
    Dtypes = Annotated[list[str], typer.Option("--dtype", help="bfloat16 or float16. Repeatable.")]
    Window = Annotated[bool, typer.Option("--window", help="Also compile for sliding windows.")]
    Arch = Annotated[str, typer.Option(help="GPU to compile for.")]


@app.command("inspect")
def inspect_file(
    file: File,
    tokenizer: Tokenizer = None,
    rows_per: RowsOption = RowsPer.TRIAL,
    group_by: GroupBy = None,
    model: Model = None,
    groups: Groups = 20,
    draw: Draw = None,
    draw_group_named: DrawGroup = None,
) -> None:
    """Show trees, overlap, bounds on the speed-up and causes of branching of the rows in FILE."""
    with one_line_errors():
        shape = QWEN2_5_7B if model is None else read_model_shape(model)
        rows = _read(file, tokenizer, rows_per, group_by, model)
        reports = report_groups(rows)
        say(format_report(reports, total_of(reports), shape, at_most=groups))
        assumed = "Qwen2.5-7B; --model names another" if model is None else shown_path(model)
        say(f"\nFLOP bound: flat over tree operations, attention and head included ({assumed}).")
        if draw is not None:
            picture = draw_group(rows, draw_group_named, draw[0], tokenizer)
            _write(picture, draw[1])


@app.command("plan")
def plan_file(
    file: File,
    max_tokens: MaxTokens,
    tokenizer: Tokenizer = None,
    rows_per: RowsOption = RowsPer.TRIAL,
    group_by: GroupBy = None,
    model: Model = None,
    groups: Groups = 20,
    ranks: ScaleOption.Ranks = None,
    sp: ScaleOption.Sharing = 1,
    shards: ScaleOption.Shards = None,
    mini_batches: ScaleOption.MiniBatches = 1,
    prompts: ScaleOption.Prompts = None,
    cluster: ScaleOption.Sweep = False,
    gpus_per_node: ScaleOption.NodeGpus = 8,
    tflops: ScaleOption.TeraFlops = Cluster.flops / 1e12,
    network: ScaleOption.Network = Cluster.network / 1e9,
    gpu_memory: ScaleOption.Memory = Cluster.memory / GIB,
    checkpoint: ScaleOption.Checkpoint = None,
) -> None:
    """Show how each group of rows in FILE would run: whole or in partitions, and without trees.

    With --model: how groups beyond the budget would run on a GPU, and the memory that takes. With --ranks: what a
    training step takes on that many GPUs.
    """
    with one_line_errors():
        rows = _read(file, tokenizer, rows_per, group_by, model)
        if ranks is not None:
            hardware = Cluster.of(ranks, gpus_per_node, tflops=tflops, network=network, memory=gpu_memory)
            settings = ScaleSettings(hardware, sp, shards, mini_batches, prompts, max_tokens, checkpoint)
            say(report_scale(rows, model, settings, sweep=cluster))
            return
        chooser = None if model is None else Chooser(model=assumed_memory_model(read_model_shape(model)))
        say(format_run_plan(plan_run(rows, max_tokens, chooser), at_most=groups))


@app.command("doctor")
def check_installation(
    no_ray: DoctorOption.NoRay = False,
    cluster: DoctorOption.Cluster = False,
    nodes: DoctorOption.Nodes = None,
    address: DoctorOption.Address = None,
    wait_seconds: DoctorOption.WaitSeconds = 60.0,
) -> None:
    """Check versions, plugin, devices, kernels, and one tree against its rows. Exit code 1 if a check fails.

    With --cluster: compare versions, code and plugin on every node of a running Ray cluster with this process.
    """
    if cluster:
        with one_line_errors():
            _report(_examine_cluster(address, nodes, wait_seconds))
        return
    if nodes is not None or address is not None:
        fail("--nodes and --address need --cluster")
    # torch, verl and ray: twenty seconds that inspect and plan do not pay.
    from tree_rl.verl_plugin.checks.doctor import diagnose

    with one_line_errors():
        _report(diagnose(start_ray=not no_ray))


@app.command("precompile")
def precompile_kernels(
    cache: PrecompileOption.Cache,
    head_sizes: PrecompileOption.HeadSizes = HEAD_SIZES,
    gqa: PrecompileOption.Gqa = QUERY_HEADS_PER_KEY_HEAD,
    dtypes: PrecompileOption.Dtypes = DTYPES,
    window: PrecompileOption.Window = False,
    arch: PrecompileOption.Arch = "sm_90a",
) -> None:
    """Compile flash-attn-4's tree attention ahead of time; needs the extra fa4, and no GPU."""
    # torch: seconds that inspect and plan do not pay.
    from tree_kernels.tree_attention.fa4.precompile import PrecompileError, precompile, runtime_environment

    with one_line_errors():
        require_writable_folder(cache, "--cache")
        try:
            compiled = precompile(
                head_sizes=head_sizes,
                query_heads_per_key_head=gqa,
                dtypes=dtypes,
                windows=(False, True) if window else (False,),
                arch=arch,
                cache=cache,
                report=say,
            )
        except PrecompileError as error:
            raise InputError(f"precompile: {error}") from error
        say(f"\n{compiled} kernels compiled. Set in every process that trains, with this Python and these packages:")
        for name, value in runtime_environment(cache).items():
            say(f"  export {name}={shlex.quote(value)}")


@app.command("bench")
def bench_update(
    model: BenchOption.Model = "0.6b",
    layers: BenchOption.Layers = None,
    por: BenchOption.Por = None,
    data: BenchOption.Data = None,
    tokenizer: Tokenizer = None,
    rows_per: RowsOption = RowsPer.TRIAL,
    group_by: GroupBy = None,
    num_rows: BenchOption.NumRows = 16,
    row_tokens: BenchOption.RowTokens = 16_384,
    groups: BenchOption.Groups = 1,
    trained_share: BenchOption.Trained = 0.3,
    max_tokens: BenchOption.MaxTokens = None,
    against: BenchOption.Against = "packed",
    dtype: BenchOption.Dtype = None,
    repeats: BenchOption.Repeats = 3,
    steps: BenchOption.Steps = 0,
    learning_rate: BenchOption.LearningRate = 1e-4,
    tree_attention: BenchOption.TreeAttention = "auto",
    packed_attention: BenchOption.PackedAttention = "auto",
    project_all: BenchOption.ProjectAll = False,
    checkpointing: BenchOption.Checkpointing = True,
    liger: BenchOption.Liger = None,
    trace: BenchOption.Trace = False,
    out: BenchOption.Out = None,
    commit: BenchOption.Commit = None,
) -> None:
    """Time whole PPO updates: trees against the same rows, packed without padding or run by stock verl.

    First both gradients must agree with those of the rows in higher precision.
    """
    # torch and transformers: some seconds that inspect and plan do not pay.
    from tree_kernels.implementation import UnsupportedImplementation
    from tree_rl.benchmark.against_packed.packed_updates import run_against_packed
    from tree_rl.benchmark.gradient_gate import GateError
    from tree_rl.benchmark.options import BenchOptions, ModelChoice, Workload

    with one_line_errors():
        options = BenchOptions(
            workload=Workload(
                pors=tuple(por or (0.0, 0.2, 0.35, 0.5, 0.65, 0.8, 0.92)),
                recording=None if data is None else _read(data, tokenizer, rows_per, group_by, None),
                name="agents" if data is None else data.stem,
                num_rows=num_rows,
                row_tokens=row_tokens,
                num_groups=groups,
                trained_share=trained_share,
            ),
            model=ModelChoice(name=model, layers=layers, dtype=dtype, checkpointing=checkpointing, liger=liger),
            max_tokens=max_tokens,
            repeats=repeats,
            steps=steps,
            learning_rate=learning_rate,
            tree_attention=tree_attention,
            packed_attention=packed_attention,
            project_all=project_all,
            trace=trace,
            out=out,
            commit=commit,
        )
        if against not in ("packed", "verl"):
            raise InputError(f"--against {shown(against)}: expected packed or verl")
        if out is not None:
            require_writable_folder(out, "--out")
        try:
            run_against_packed(options, say) if against == "packed" else _run_against_verl(options)
        except GateError as error:
            fail(str(error), code=1)
        except UnsupportedImplementation as error:
            raise InputError(f"--tree-attention, --packed-attention: {error}") from error


def _run_against_verl(options: "BenchOptions") -> None:
    """Import what needs verl, if it is there."""
    if importlib.util.find_spec("verl") is None:
        raise InputError('--against verl: verl is not installed; pip install "verl>=0.9.1,<0.10"')
    from tree_rl.benchmark.against_verl.verl_updates import run_against_verl

    run_against_verl(options, say)


def main() -> None:
    """Entry point of the console script."""
    print_anything()
    try:
        with one_line_errors():
            status = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except (typer.Exit, CLICK_ERROR) as error:
        if isinstance(error, CLICK_ERROR):
            print_mistake(f"{error.format_message()} (--help tells what is expected)")
        status = error.exit_code
    except typer.Abort:
        status = 1
    flush_output()
    sys.exit(status)


def _examine_cluster(address: str | None, nodes: int | None, wait_seconds: float) -> Iterator["Finding"]:
    # ray and verl: seconds that other commands do not pay.
    from tree_rl.verl_plugin.checks.cluster_check import (
        ClusterError,
        compare_nodes,
        examine_cluster,
        judge_cluster,
    )
    from tree_rl.verl_plugin.checks.fresh_process import examine_here

    try:
        found = examine_cluster(address=address, nodes=nodes, wait_seconds=wait_seconds)
    except ClusterError as error:
        fail(f"doctor: {error}", code=1)
    here = examine_here()
    say(compare_nodes(found.nodes, here) + "\n")
    say(f"dashboard  {found.dashboard}\nlogs       {found.logs} on every node\n")
    return judge_cluster(found.nodes, here)


def _report(findings: Iterable["Finding"]) -> None:
    """Print findings as they come; exit code 1 if any failed."""
    failed = []
    for finding in findings:
        say(f"{finding.subject:<26}  {finding.status:<6}  {finding.detail}")
        if finding.status == "failed":
            failed.append(finding.subject)
    if failed:
        fail(f"{len(failed)} failed: {', '.join(failed)}", code=1)
    say("\nReady.")


def _read(file: Path, tokenizer: Path | None, rows_per: RowsPer, group_by: str | None, model: Path | None) -> list[Row]:
    vocab_size = None if model is None else read_model_shape(model).vocab
    return read_row_file(file, tokenizer=tokenizer, rows_per=rows_per, group_by=group_by, vocab_size=vocab_size)


def _write(picture: str, target: Path) -> None:
    if str(target) in ("-", "/dev/stdout"):
        say("\n" + picture)
        return
    write_whole(target, (picture + "\n").encode("utf-8"))
    say(f"Drawing written to {shown_path(target)}")
