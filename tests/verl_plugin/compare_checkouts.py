"""Are losses, outputs and gradients of two checkouts bitwise the same? On hostile rows, budgets, weightings, losses.

python tests/verl_plugin/compare_checkouts.py old.pt                    in one checkout,
python tests/verl_plugin/compare_checkouts.py new.pt --against old.pt   in the other: exits with 1 if anything differs.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from engine_harness import build_engine, ppo_batch, save_model, tiny_qwen3
from equivalence import run
from hostile_rows import SHAPES
from verl_losses import actor_loss

from tree_rl.verl_plugin.options import TreeConfig

LOSSES = {"vanilla": "token-mean", "gspo": "seq-mean-token-mean"}
Found = dict[str, torch.Tensor]


def updates(model: Path, tree: TreeConfig, loss_mode: str, **flags: Any) -> Iterator[tuple[str, Found]]:
    """Loss, outputs and gradients of one update for each set of hostile rows."""
    engine = build_engine(model, tree=tree)
    for name, rows in SHAPES.items():
        data = ppo_batch(rows, calculate_entropy=True, return_model_output=True, **flags)
        got = run(engine, data, actor_loss(loss_mode, LOSSES[loss_mode]))
        outputs = {key: nested.values().detach() for key, nested in got["model_output"].items()}
        yield name, {"loss": torch.tensor(got["loss"], dtype=torch.float64), **outputs, **got["gradients"]}


def cases(folder: Path) -> Iterator[tuple[str, Found]]:
    """Every case by name."""
    policy = save_model(folder / "policy", tiny_qwen3())
    for tokens in (None, 3, 7, 20):
        for weighting in ("verl", "sep_avg", "token_unique"):
            tree = TreeConfig(mode="tree", max_tokens=tokens, path_weighting=weighting, self_check=False)
            for loss_mode in LOSSES:
                for name, found in updates(policy, tree, loss_mode):
                    yield f"{name}, max_tokens={tokens}, {weighting}, {loss_mode}", found
    for name, found in updates(policy, TreeConfig(mode="auto"), "vanilla", max_tokens=30):
        yield f"{name}, mode=auto", found
    critic = save_model(folder / "critic", tiny_qwen3(tie_word_embeddings=False), value=True)
    for tokens in (None, 7):
        engine = build_engine(critic, tree=TreeConfig(mode="tree", max_tokens=tokens), value=True)
        for name, rows in SHAPES.items():
            with engine.eval_mode(disable_auto_offload=True):
                values = engine.infer_batch(ppo_batch(rows))["model_output"]["values"].values()
            yield f"{name}, critic, max_tokens={tokens}", {"values": values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--against", type=Path, help="file that another checkout wrote")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = dict(cases(Path(folder)))
    torch.save(found, args.out)
    if args.against is None:
        return
    known = torch.load(args.against)
    assert found.keys() == known.keys()
    differ = [
        f"{case}: {name} by {float((value - known[case][name]).abs().max()):.1e}"
        for case, values in found.items()
        for name, value in values.items()
        if not torch.equal(value, known[case][name])
    ]
    print(*differ, f"{len(found)} cases, {len(differ)} tensors differ", sep="\n")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
