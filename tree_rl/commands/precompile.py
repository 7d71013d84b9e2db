"""`tree-rl precompile`: compiles flash-attn-4's kernels ahead of time. Imports torch."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from tree_rl.extras import require_modules
from tree_rl.inspection.files import InputError
from tree_rl.inspection.files.terminal import one_line_errors, say
from tree_rl.inspection.files.writing import require_writable_folder
from tree_rl.tree.report.counted import counted

HEAD_SIZES, QUERY_HEADS_PER_KEY_HEAD, DTYPES = [64, 128], [1, 2, 4, 5, 8], ["bfloat16"]
"""Defaults of `precompile`: the Qwen3 and Llama 3 families."""


def precompile_kernels(
    cache: Annotated[Path, typer.Option(help="Folder for the compiled kernels.")],
    head_sizes: Annotated[list[int], typer.Option("--head-size", help="64, 128 or 256. Repeatable.")] = HEAD_SIZES,
    gqa: Annotated[
        list[int], typer.Option("--gqa", min=1, help="Query heads per key head. Repeatable.")
    ] = QUERY_HEADS_PER_KEY_HEAD,
    dtypes: Annotated[list[str], typer.Option("--dtype", help="bfloat16 or float16. Repeatable.")] = DTYPES,
    window: Annotated[bool, typer.Option("--window", help="Also compile for sliding windows.")] = False,
    arch: Annotated[str, typer.Option(help="GPU to compile for.")] = "sm_90a",
) -> None:
    """Compile flash-attn-4's tree attention ahead of time; needs the extra fa4, and no GPU."""
    require_modules("precompile", "torch", "transformers")
    # torch takes seconds to import; inspect and plan do not need it.
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
        done = counted(compiled, "kernel")
        say(f"\n{done} compiled. Set in every process that trains, with this Python and these packages:")
        for name, value in runtime_environment(cache).items():
            say(f"  export {name}={shlex.quote(value)}")
