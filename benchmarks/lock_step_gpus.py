"""Ranks with unequal trees on several GPUs: partitions in lock-step against the same trees whole.

torchrun --nproc-per-node 4 benchmarks/lock_step_gpus.py --model 0.6b --out docs/benchmarks
"""

import argparse
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from tensordict import TensorDict
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
from verl.workers.utils.losses import sft_loss

from tree_rl.benchmark.against_verl.engines import BFLOAT16, save_random_model
from tree_rl.benchmark.model_sizes import MODEL_SIZES
from tree_rl.benchmark.provenance import provenance
from tree_rl.benchmark.results import write_csv
from tree_rl.verl_plugin.engine.engine import TreeFSDPEngineWithLMHead
from tree_rl.verl_plugin.options import TreeConfig, TreeFSDPEngineConfig

MODELS = ("0.6b", "8b")
VOCAB = MODEL_SIZES["8b"].shape.vocab
CAPACITY = 6_000


def build_engine(path: Path) -> Any:
    """The tree engine under verl's FSDP2, bf16 parameters."""
    engine = TreeFSDPEngineWithLMHead(
        model_config=HFModelConfig(
            path=str(path), load_tokenizer=False, override_config={"attn_implementation": "sdpa"}
        ),
        engine_config=TreeFSDPEngineConfig(
            mixed_precision=BFLOAT16, model_dtype="bf16", use_torch_compile=False, tree=TreeConfig(self_check=False)
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-6, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def rows_of_rank(rank: int, world: int) -> list[np.ndarray]:
    """Unequal on purpose: more branches on higher ranks, none at all on the last of four."""
    draw = np.random.default_rng(rank)
    if rank == world - 1 and world > 2:
        return []
    trunk = draw.integers(1, VOCAB, 3_000 + 1_500 * rank)
    return [np.concatenate([trunk, draw.integers(1, VOCAB, 1_200)]) for _ in range(2 + 5 * rank)]


def batch(rows: list[np.ndarray]) -> TensorDict:
    """Rows as verl's SFT hands them over; the last 1,200 tokens of each are trained."""
    if not rows:
        empty = torch.nested.nested_tensor_from_jagged(torch.zeros(0, dtype=torch.long), torch.zeros(1).long())
        data = TensorDict({"input_ids": empty, "loss_mask": empty, "position_ids": empty}, batch_size=[0])
    else:
        masks = [torch.cat([torch.zeros(len(row) - 1_200), torch.ones(1_200)]).long() for row in rows]
        columns = {
            "input_ids": [torch.from_numpy(row) for row in rows],
            "position_ids": [torch.arange(len(row)) for row in rows],
            "loss_mask": masks,
        }
        nested = {k: torch.nested.as_nested_tensor(v, layout=torch.jagged) for k, v in columns.items()}
        data = tu.get_tensordict(nested)
    flags = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 100_000, "use_remove_padding": True, "temperature": 1.0}
    tu.assign_non_tensor(data, **flags)
    return data


def run(engine: Any, tree: TreeConfig, rows: list[np.ndarray]) -> dict[str, Any]:
    """Second of two forwards and backwards: this rank's shards of the gradients, seconds, dummies."""
    engine.tree_config = tree
    planning = []
    for _ in range(2):
        engine.optimizer_zero_grad()
        torch.cuda.synchronize()
        torch.distributed.barrier()
        started = time.perf_counter()
        with engine.train_mode(disable_auto_offload=True):
            output = engine.forward_backward_batch(batch(rows), partial(sft_loss, config=None))
            shards = [p.grad.to_local().float().clone() for p in engine.module.parameters() if p.grad is not None]
        torch.cuda.synchronize()
        planning.append(output["metrics"]["tree/plan_seconds"].aggregate())
    return {
        "shards": shards,
        "planning": planning,
        "seconds": time.perf_counter() - started,
        "dummies": engine.step.dummy_ops,
        "tokens": engine_tokens(output),
        "peak": torch.cuda.max_memory_allocated(),
    }


def engine_tokens(output: dict[str, Any]) -> float:
    """Unique tokens of all ranks; the metric is this rank's count times their number."""
    world = torch.distributed.get_world_size()
    tokens = torch.tensor([output["metrics"]["tree/unique_tokens"].aggregate() / world], device="cuda")
    torch.distributed.all_reduce(tokens)
    return float(tokens)


def error(got: list[torch.Tensor], truth: list[torch.Tensor]) -> float:
    """Relative norm of the difference of all gradients, over all ranks."""
    sums = torch.stack(
        [
            sum((one - other).square().sum() for one, other in zip(got, truth, strict=True)),
            sum(other.square().sum() for other in truth),
        ]
    )
    torch.distributed.all_reduce(sums)
    return float((sums[0] / sums[1]).sqrt())


def main() -> None:
    """Compare and write one CSV row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="0.6b")
    parser.add_argument("--commit", default=None)
    parser.add_argument("--scratch", type=Path, default=Path("/tmp"))
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    args = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))
    path = args.scratch / f"random_qwen3_{args.model}"
    if rank == 0 and not (path / "config.json").exists():
        save_random_model(MODEL_SIZES[args.model], path, torch.device("cuda"), torch.bfloat16)
        torch.cuda.empty_cache()
    torch.distributed.barrier()
    engine = build_engine(path)
    rows = rows_of_rank(rank, world)
    whole = run(engine, TreeConfig(mode="tree", self_check=False), rows)
    cut = run(engine, TreeConfig(mode="tree", max_tokens=CAPACITY, self_check=False), rows)
    again = run(engine, TreeConfig(mode="tree", max_tokens=CAPACITY, self_check=False), rows)
    dummies = torch.tensor([float(cut["dummies"])], device="cuda")
    torch.distributed.all_reduce(dummies)
    row = {
        "model": f"qwen3-{args.model} random bf16",
        "gpus": world,
        "capacity": CAPACITY,
        "unique_tokens": int(cut["tokens"]),
        "dummy_ops": int(dummies),
        "dummy_share": round(float(dummies) / cut["tokens"], 6),
        "gradient_error_partitions_to_whole": error(cut["shards"], whole["shards"]),
        "gradient_error_between_equal_runs": error(again["shards"], cut["shards"]),
        "seconds_whole": round(whole["seconds"], 3),
        "seconds_partitions": round(cut["seconds"], 3),
        "plan_seconds_first_call": round(cut["planning"][0], 4),
        "plan_seconds_later_call": round(cut["planning"][1], 4),
        "peak_gib_rank0": round(cut["peak"] / 2**30, 2),
        **provenance(commit=args.commit),
    }
    if rank == 0:
        print(row, flush=True)
        write_csv(args.out / f"lock_step_{args.model}_{world}gpu.csv", [row])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
