"""Which checkpoint of a warm start to begin with: the one that plays about a wanted share of the demonstrations.

A policy samples a demonstrated session token by token with probability exp(-sum of its tokens' losses): a lower
bound of its reward, since other repairs pass the tests too. Usage:

python benchmarks/swe_learning_start.py DEMONSTRATIONS.parquet SHARE CHECKPOINT ... > chosen.json
"""

import json
import sys
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


def main() -> None:
    """Print the checkpoint chosen, and the share of each."""
    rows, wanted, names = pd.read_parquet(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shares: dict[str, float] = {}
    for name in names:
        model = AutoModelForCausalLM.from_pretrained(Path(name), dtype=torch.float32, attn_implementation="sdpa")
        shares[name] = round(mean_share(model.to(device).eval(), rows), 4)
        print(f"{name}: {shares[name]}", file=sys.stderr, flush=True)
    print(json.dumps({"chosen": min(names, key=lambda name: abs(shares[name] - wanted)), "shares": shares}))


if __name__ == "__main__":
    main()
