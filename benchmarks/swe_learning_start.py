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
    """Mean over the sessions of the probability that the model samples the demonstration.

    Args:
        model: causal language model.
        rows: columns input_ids, loss_mask and conversation.
    """
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
    """Look at the checkpoints in the order given, until one reaches the share; take it or the one before."""
    rows, wanted = pd.read_parquet(sys.argv[1]), float(sys.argv[2])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    looked: dict[str, float] = {}
    for name in sys.argv[3:]:
        model = AutoModelForCausalLM.from_pretrained(Path(name), dtype=torch.float32, attn_implementation="sdpa")
        looked[name] = round(mean_share(model.to(device).eval(), rows), 4)
        print(f"{name}: {looked[name]}", file=sys.stderr, flush=True)
        if looked[name] >= wanted:
            break
    chosen = min(list(looked)[-2:], key=lambda name: abs(looked[name] - wanted))
    print(json.dumps({"chosen": chosen, "shares": looked}))


if __name__ == "__main__":
    main()
