"""Predicted steps of three models on 8, 64 and 512 H200s, each with the fastest number of GPUs that share tokens.

    python examples/write_qwen_tokenizer.py outputs/qwen_tokenizer
    python benchmarks/scale_table.py --data examples/tau_bench_airline/trajectories.json \\
        --tokenizer outputs/qwen_tokenizer --out docs/benchmarks/scale.csv

A step trains 512 prompts, drawn from 50 recorded groups, in 4 mini-batches. No GPU is needed.
"""

import argparse
import json
import tempfile
from pathlib import Path

from tree_rl.benchmark.model_sizes import MODEL_SIZES
from tree_rl.benchmark.provenance import provenance
from tree_rl.benchmark.results import Columns, write_csv
from tree_rl.cost.cluster.hardware import Cluster
from tree_rl.cost.memory.model import GIB
from tree_rl.inspection.row_file import read_row_file
from tree_rl.inspection.scale.predict_scale import ScaleSettings, Step

TFLOPS = {"8b": 450, "32b": 500, "qwen3-30b-a3b": 290}
"""Rate of one H200 through verl's engine, without fused layers: measured for 8B (scale_steps.csv). For the others 0.9
times what `tree-rl bench` measured (update_32b_agents.csv: 557, update_qwen3-30b-a3b_agents.csv: 320), as for 8B."""
GPUS = (8, 64, 512)
PROMPTS, MINI_BATCHES, MAX_TOKENS = 512, 4, 32_768


def main() -> None:
    """Predict and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="", help="recorded beside each line; the default asks git")
    args = parser.parse_args()
    rows = read_row_file(args.data, tokenizer=args.tokenizer)
    about: Columns = {"prompts": PROMPTS, "mini_batches": MINI_BATCHES, "max_tokens": MAX_TOKENS}
    about |= provenance(commit=args.commit or None)
    lines: list[Columns] = []
    for name, tflops in TFLOPS.items():
        with tempfile.NamedTemporaryFile("w", suffix=".json") as config:
            json.dump(MODEL_SIZES[name].config(), config)
            config.flush()
            cluster = Cluster(gpus=max(GPUS), flops=tflops * 1e12)
            settings = ScaleSettings(cluster, mini_batches=MINI_BATCHES, prompts=PROMPTS, max_tokens=MAX_TOKENS)
            step = Step(rows, Path(config.name), settings)
        for gpus in GPUS:
            found = list(step.alternatives(gpus))
            best = min(found, key=lambda one: (not one.fits, one.time.total))
            alone = next(one for one in found if one.model.sharing == 1)
            parts = ("balanced", "waiting", "gathers", "exchanges", "optimizer")
            seconds = {f"{part}_s": round(getattr(best.time, part), 3) for part in parts}
            size = {"model": name, "gpus": gpus, "sharing": best.model.sharing, "tflops": tflops}
            total = {"step_s": round(best.time.total, 2), "step_s_without_sharing": round(alone.time.total, 2)}
            more = {"gib_a_gpu": round(best.memory.total / GIB, 1), "fits": best.fits, "slowed_by": best.slowed_by}
            lines.append(size | total | seconds | more | about)
            print(" ".join(f"{key}={value}" for key, value in lines[-1].items()), flush=True)
    if args.out:
        write_csv(args.out, lines)


if __name__ == "__main__":
    main()
