"""Train a tiny Hugging Face model on branching rows: plain torch, a loss of our own, gradients equal to rows alone.

Run: python examples/tree_training_in_60_lines.py (a few seconds on a CPU; needs the extra train).
"""

from collections.abc import Sequence

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tree_rl.models import use_edge_head, use_tree_attention
from tree_rl.training import EdgeOutputs, Rows, TreeOptions, TreeStep

PROMPT = [5, 6, 7, 8, 9, 10]
ROWS = [
    [*PROMPT, 11, 12, 13],  # three answers to one prompt,
    [*PROMPT, 11, 12, 14, 15],  # two of which begin alike
    [*PROMPT, 16],
]
REWARDS = torch.tensor([1.0, 0.2, -0.5])
TRAINED = [[0] * len(PROMPT) + [1] * (len(row) - len(PROMPT)) for row in ROWS]


def tiny_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)
    config.num_attention_heads, config.num_key_value_heads, config.initializer_range = 4, 2, 0.2
    return Qwen3ForCausalLM(config)


def loss(outputs: EdgeOutputs, members: Sequence[int]) -> tuple[torch.Tensor, dict[str, float]]:
    """REINFORCE; outputs hold one log-prob per token of the given rows, row after row, 0 where nothing is trained."""
    lengths = [len(ROWS[row]) for row in members]
    per_row = torch.stack([part.sum() for part in outputs["log_probs"].split(lengths)])
    value = -(REWARDS[list(members)] * per_row).sum()
    return value, {"loss": value.item()}


def gradients_of_rows_alone() -> list[torch.Tensor]:
    model = tiny_model()
    for row, trained, reward in zip(ROWS, TRAINED, REWARDS, strict=True):
        log_probs = model(torch.tensor([row])).logits[0, :-1].log_softmax(-1)
        chosen = log_probs.gather(1, torch.tensor(row[1:])[:, None])[:, 0]
        (-reward * (chosen * torch.tensor(trained[1:])).sum()).backward()
    return [parameter.grad for parameter in model.parameters()]


def main() -> None:
    expected = gradients_of_rows_alone()
    for name, options in (("whole", TreeOptions()), ("partitions of 4 tokens", TreeOptions(max_tokens=4))):
        model = tiny_model()
        use_tree_attention(model)
        use_edge_head(model)
        result = TreeStep(model, options).run(Rows.of(ROWS, trained=TRAINED), loss)
        pairs = zip(model.parameters(), expected, strict=True)
        error = max(float((p.grad - alone).norm() / alone.norm()) for p, alone in pairs)
        (batch,) = result.micro_batches
        tokens = f"{batch.flat_tokens} tokens of rows as {batch.unique_tokens} unique ones"
        print(f"{name}: {tokens} in {batch.num_partitions} forward(s); gradients differ from rows alone by {error:.1e}")


if __name__ == "__main__":
    main()
