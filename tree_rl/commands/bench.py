"""`tree-rl bench`: times updates of trees against updates of rows. Imports torch, and verl for `--against verl`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tree_rl.commands.row_options import GroupBy, RowsOption, Tokenizer, read_file, refuse_beside, refuse_unused
from tree_rl.cost.model_sizes import known_name
from tree_rl.extras import require_modules
from tree_rl.inspection.chat_rows import RowsPer
from tree_rl.inspection.files import InputError
from tree_rl.inspection.files.quoting import quoted
from tree_rl.inspection.files.terminal import fail, one_line_errors, say
from tree_rl.inspection.files.writing import require_writable_folder

if TYPE_CHECKING:
    from tree_rl.benchmark.bench_options import BenchOptions

PORS = (0.0, 0.2, 0.35, 0.5, 0.65, 0.8, 0.92)
"""Default overlaps, as far as the rows of a group allow."""


def bench_update(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Option(
            help="Random weights of these sizes: tiny, 0.6b, 8b, 32b, qwen3-30b-a3b, qwen3.5-4b, deepseek-v2-lite, "
            "glm-4.7-flash, nemotron-h-8b."
        ),
    ] = "0.6b",
    layers: Annotated[
        int | None, typer.Option(min=1, help="Decoder layers. Default: as many as the model has.")
    ] = None,
    por: Annotated[
        list[float] | None, typer.Option(help="Overlap to draw, or to look for in --data. Repeatable.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="A file of recorded rows, instead of drawn ones.")] = None,
    tokenizer: Tokenizer = None,
    rows_per: RowsOption = RowsPer.TRIAL,
    group_by: GroupBy = None,
    num_rows: Annotated[int, typer.Option(min=1, help="Rows in each group.")] = 16,
    row_tokens: Annotated[int, typer.Option(min=2, help="Tokens in each row.")] = 16_384,
    groups: Annotated[int, typer.Option(min=1, help="Groups in a batch.")] = 1,
    trained_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of tokens with a loss in drawn rows.")
    ] = 0.3,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most tokens of one forward, on both sides. Default 262144; with --against verl, "
            "the limit of verl's scripts.",
        ),
    ] = None,
    against: Annotated[
        str,
        typer.Option(
            help="packed: the same rows end to end, with the best kernels. "
            "verl: verl's engine, set up as in its scripts."
        ),
    ] = "packed",
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16 (default on a GPU), float16 or float32 (default on a CPU).")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed updates of each side.")] = 3,
    steps: Annotated[int, typer.Option(min=0, help="Compare the losses of this many steps instead of times.")] = 0,
    learning_rate: Annotated[
        float, typer.Option(min=0.0, help="Learning rate of --steps. Fine-tuning uses 1e-6 to 1e-5.")
    ] = 1e-4,
    tree_attention: Annotated[str, typer.Option(help="Implementation of tree attention.")] = "auto",
    packed_attention: Annotated[
        str, typer.Option(help="Attention of rows: fa4, cudnn, fa2, flash, flex or sdpa.")
    ] = "auto",
    checkpointing: Annotated[bool, typer.Option(help="Recompute every layer in the backward.")] = True,
    liger: Annotated[
        bool | None,
        typer.Option(help="Liger's fused layers on both sides. Default: on a GPU where liger-kernel has them."),
    ] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Profile one update of each side.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the CSV and the figure.")] = None,
    commit: Annotated[
        str | None, typer.Option(help="Commit to write beside the figures; default: of the package.")
    ] = None,
) -> None:
    """Time whole PPO updates: trees against the same rows, packed without padding or run by stock verl.

    First both gradients must agree with those of the rows in higher precision.
    """
    require_modules("bench", "torch", "transformers", "matplotlib")
    # torch and transformers take seconds to import; inspect and plan do not need them.
    from tree_kernels.implementation import UnsupportedImplementation
    from tree_rl.benchmark.against_packed.packed_updates import run_against_packed
    from tree_rl.benchmark.bench_options import BenchOptions
    from tree_rl.benchmark.gradient_errors import GateError

    with one_line_errors():
        if data is None:
            refuse_unused(context, "--data", "tokenizer", "rows_per", "group_by")
        else:
            refuse_beside(context, "--data", "trained_share")
        if not steps:
            refuse_unused(context, "--steps", "learning_rate")
        possible = [one for one in PORS if data is not None or not one or one < 1 - 1 / num_rows]
        options = BenchOptions(
            pors=tuple(por or possible),
            recording=None if data is None else read_file(data, tokenizer, rows_per, group_by, None).rows,
            rows_name="agents" if data is None else data.stem,
            num_rows=num_rows,
            row_tokens=row_tokens,
            num_groups=groups,
            trained_share=trained_share,
            model=known_name(model) or model,
            layers=layers,
            precision=dtype,
            checkpointing=checkpointing,
            liger=liger,
            max_tokens=max_tokens,
            repeats=repeats,
            steps=steps,
            learning_rate=learning_rate,
            tree_attention=tree_attention,
            packed_attention=packed_attention,
            trace=trace,
            out=out,
            commit=commit,
        )
        if against not in ("packed", "verl"):
            raise InputError(f"--against {quoted(against)}: expected packed or verl")
        if out is not None:
            require_writable_folder(out, "--out")
        try:
            run_against_packed(options, say) if against == "packed" else _run_against_verl(options)
        except GateError as error:
            fail(str(error), code=1)
        except UnsupportedImplementation as error:
            raise InputError(f"--tree-attention, --packed-attention: {error}") from error


def _run_against_verl(options: "BenchOptions") -> None:
    """Run the comparison that imports verl."""
    require_modules("--against verl", "verl")
    from tree_rl.benchmark.against_verl.verl_updates import run_against_verl

    run_against_verl(options, say)
