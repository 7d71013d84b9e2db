"""Which checkpoint of a warm start to begin with: the one that plays about a wanted share of the demonstrations.

A policy samples a demonstrated session token by token with probability exp(-sum of its tokens' losses): a lower
bound of its reward, since other repairs pass the tests too. Usage:

python benchmarks/swe_learning_start.py DEMONSTRATIONS.parquet SHARE CHECKPOINT ... > chosen.json
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
import torch
from transformers import AutoModelForCausalLM


@torch.no_grad()
def mean_share(model: torch.nn.Module, rows: pd.DataFrame) -> float:
    """Mean over the sessions of the probability that the model samples the demonstration."""
    device = next(model.parameters()).device
    losses: dict[str, float] = {}
    for row in rows.itertuples():
        ids = torch.tensor(row.input_ids, device=device)[None]
        mask = torch.tensor(row.loss_mask, device=device)[1:].bool()
        scores = model(ids).logits[0, :-1][mask].float()
        loss = torch.nn.functional.cross_entropy(scores, ids[0, 1:][mask], reduction="sum")
        losses[row.conversation] = losses.get(row.conversation, 0.0) + float(loss)
    return float(torch.exp(-torch.tensor(list(losses.values()))).mean())


def nearest(names: Sequence[str], share_of: Callable[[str], float], wanted: float) -> tuple[str, dict[str, float]]:
    """The name whose share is nearest to the wanted one, of shares that grow, and those that were looked at.

    Raises:
        ValueError: no names.
    """
    if not names:
        raise ValueError("expected checkpoints of a warm start, received none; see --sft-steps and --sft-save")
    looked: dict[str, float] = {}
    low, high = 0, len(names) - 1
    while low <= high:
        middle = (low + high) // 2
        looked[names[middle]] = share_of(names[middle])
        if looked[names[middle]] < wanted:
            low = middle + 1
        else:
            high = middle - 1
    return min(looked, key=lambda name: abs(looked[name] - wanted)), looked


def main() -> None:
    """Print the checkpoint chosen."""
    rows, wanted = pd.read_parquet(sys.argv[1]), float(sys.argv[2])
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def look(name: str) -> float:
        model = AutoModelForCausalLM.from_pretrained(Path(name), dtype=torch.float32, attn_implementation="sdpa")
        share = round(mean_share(model.to(device).eval(), rows), 4)
        print(f"{name}: {share}", file=sys.stderr, flush=True)
        return share

    chosen, looked = nearest(sys.argv[3:], look, wanted)
    print(json.dumps({"chosen": chosen, "shares": looked}))


if __name__ == "__main__":
    main()
