"""One rank of torchrun: its process group, its engine under verl's FSDP2, and figures of all ranks."""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from tree_rl.benchmark.against_verl.engines import build_engine, save_random_model
from tree_rl.benchmark.provenance import PACKAGES, provenance
from tree_rl.benchmark.results import Columns, read_csv, write_csv
from tree_rl.cost.model_sizes import MODEL_SIZES, ModelSize, full_name
from tree_rl.verl_plugin.options import TreeConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDE = 1024
"""Models up to this hidden size are measured with all their layers."""


def parser(description: str | None, out: str) -> argparse.ArgumentParser:
    """A command line with the options that whole updates of several GPUs have; the CSV is `out` by default."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--report", type=Path, help="print the verdicts on a CSV file and stop")
    made.add_argument("--layers", type=int, default=4, help="of models wider than 0.6b")
    made.add_argument("--sp", type=int, default=1, help="GPUs that share the tokens of a rank")
    made.add_argument("--liger", action="store_true", help="Liger's fused layers")
    made.add_argument("--attention", default="auto")
    made.add_argument("--scratch", type=Path, default=Path("/tmp"))
    made.add_argument("--commit", default=None)
    made.add_argument("--out", type=Path, default=Path(out))
    return made


def run(
    args: argparse.Namespace,
    measure: Callable[[argparse.Namespace, int, int], None],
    report: Callable[[Sequence[dict[str, str]]], str],
) -> None:
    """Measure as one rank of torchrun, which knows its number and that of all ranks; rank 0 reports on the CSV."""
    rank, world = join_ranks()
    measure(args, rank, world)
    if rank == 0:
        print(report(read_csv(args.out)), flush=True)
    torch.distributed.destroy_process_group()


def append(path: Path, row: Columns, setting: Columns) -> None:
    """Print a row, and add it to a CSV with the columns of `about`; on rank 0 alone."""
    if torch.distributed.get_rank() == 0:
        print(f"{setting['model']} {setting['gpus']} GPUs", row, flush=True)
        write_csv(path, [*read_csv(path), row | setting])


def about(args: argparse.Namespace, model: str, size: ModelSize, engine: Any) -> dict[str, object]:
    """Columns that say what ran, and where."""
    return {
        "model": full_name(model),
        "layers": size.shape.layers,
        "layer_kernels": "liger" if args.liger else "transformers",
        "gpus": torch.distributed.get_world_size(),
        "sharing": args.sp,
        "attention": engine.attention_implementation,
        **provenance(commit=args.commit, packages=(*PACKAGES, "verl")),
    }


def join_ranks() -> tuple[int, int]:
    """Join torchrun's processes; returns rank and number of ranks."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))
    else:
        torch.distributed.init_process_group("gloo")
    return rank, world


def size_of(model: str, layers: int | None, positions: int | None = None) -> ModelSize:
    """A model of the table; one wider than 0.6b with so many layers. The engine refuses rows beyond its positions."""
    size = MODEL_SIZES[model]
    config = size.config if positions is None else {**size.config, "max_position_embeddings": positions}
    return replace(size, config=config).with_layers(layers if size.shape.hidden > WIDE else None)


def saved_model(model: str, size: ModelSize, scratch: Path) -> Path:
    """Random weights on disk, made by rank 0 unless they are there; all ranks wait for them."""
    path = scratch / f"scaling_{full_name(model)}_{size.shape.layers}_{size.config['max_position_embeddings']}"
    if torch.distributed.get_rank() == 0 and not (path / "config.json").exists():
        save_random_model(size, path, torch.device(DEVICE), torch.bfloat16)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    torch.distributed.barrier()
    return path


def tree_engine(args: argparse.Namespace, path: Path, *, max_tokens: int | None = None) -> Any:
    """The tree engine under verl's FSDP2, sharded over all ranks, `args.sp` of which share tokens."""
    return build_engine(
        path,
        tree=TreeConfig(mode="tree", attention=args.attention, max_tokens=max_tokens, self_check=False),
        dtype=torch.bfloat16 if DEVICE == "cuda" else torch.float32,
        liger=args.liger,
        use_torch_compile=False,
        ulysses_sequence_parallel_size=args.sp,
    )


def synchronized() -> None:
    """All ranks at the same point, their devices idle."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    torch.distributed.barrier()


def worst(value: float) -> float:
    """The largest of all ranks."""
    tensor = torch.tensor([value], dtype=torch.float64, device=DEVICE)
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
    return float(tensor)
