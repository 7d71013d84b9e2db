"""GRPO in TRL's form on a TreeStep: padded prompts and completions in, TRL's loss, no verl.

The inputs and the loss are those of `GRPOTrainer._compute_loss` (TRL 1.16, `loss_type` grpo and dapo, token-level
ratios, KL by `beta`); only the forward and backward differ. The policy learns to answer with even tokens.
Run: python examples/trl_style_trainer.py (half a minute on a CPU; needs the extra train).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tree_rl.models import use_edge_head, use_tree_attention
from tree_rl.training import EdgeOutputs, Rows, TreeOptions, TreeStep

Inputs = dict[str, torch.Tensor]
"""As TRL names them: prompt_ids [B, P], completion_ids, completion_mask, old_per_token_logps, ref_per_token_logps
[B, T], advantages [B]."""


@dataclass(frozen=True, kw_only=True)
class GRPOLoss:
    """TRL's loss of a generation batch, from per-token log-probs [b, T] of some of its rows."""

    loss_type: str = "grpo"
    epsilon_low: float = 0.2
    epsilon_high: float = 0.28
    beta: float = 0.04

    def __call__(self, inputs: Inputs, per_token_logps: torch.Tensor, rows: list[int]) -> torch.Tensor:
        mask = inputs["completion_mask"][rows]
        advantages = inputs["advantages"][rows, None]
        ratio = torch.exp(per_token_logps - inputs["old_per_token_logps"][rows])
        clipped = ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
        per_token = -torch.min(ratio * advantages, clipped * advantages)
        to_reference = inputs["ref_per_token_logps"][rows] - per_token_logps
        per_token = per_token + self.beta * (to_reference.exp() - to_reference - 1)
        if self.loss_type == "grpo":
            per_row = (per_token * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)
            return per_row.sum() / len(inputs["advantages"])
        return (per_token * mask).sum() / inputs["completion_mask"].sum().clamp(min=1.0)


class TreeGRPOTrainer:
    """One optimizer step per generation batch; rows share prefixes wherever their ids agree."""

    def __init__(self, model: Qwen3ForCausalLM, loss: GRPOLoss, *, lr: float, options: TreeOptions) -> None:
        use_tree_attention(model)
        use_edge_head(model)
        self.model, self.loss = model, loss
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.tree_step = TreeStep(model, options)

    def backward(self, inputs: Inputs) -> float:
        """Gradients of one batch; returns its loss."""
        result = self.tree_step.run(self.rows(inputs), lambda outputs, members: self._loss(inputs, outputs, members))
        return sum(result.losses)

    def step(self, inputs: Inputs) -> float:
        """One update."""
        loss = self.backward(inputs)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.tree_step.forget()
        return loss

    def per_token_logps(self, inputs: Inputs) -> torch.Tensor:
        """[B, T], log-probs of the completions under the present weights, without gradients."""
        return self._padded(
            inputs, self.tree_step.infer(self.rows(inputs)).outputs, list(range(len(inputs["prompt_ids"])))
        )

    def rows(self, inputs: Inputs) -> Rows:
        """The rows without padding."""
        prompt_length = inputs["prompt_ids"].shape[1]
        ids, trained = [], []
        for prompt, completion, length in zip(
            inputs["prompt_ids"], inputs["completion_ids"], _lengths(inputs), strict=True
        ):
            ids.append(torch.cat([prompt, completion[:length]]).tolist())
            trained.append([0] * prompt_length + [1] * length)
        return Rows.of(ids, trained=trained)

    def _loss(
        self, inputs: Inputs, outputs: EdgeOutputs, members: Sequence[int]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        rows = list(members)
        return self.loss(inputs, self._padded(inputs, outputs, rows), rows), {}

    def _padded(self, inputs: Inputs, outputs: EdgeOutputs, rows: list[int]) -> torch.Tensor:
        """Outputs, row after row, as TRL's [b, T]: position p - 1 predicts the first token of the completion."""
        prompt_length, most = inputs["prompt_ids"].shape[1], inputs["completion_ids"].shape[1]
        lengths = [_lengths(inputs)[row] for row in rows]
        of_row = outputs["log_probs"].split([prompt_length + length for length in lengths])
        pieces = [part[prompt_length - 1 : -1] for part in of_row]
        return torch.stack([torch.nn.functional.pad(piece, (0, most - len(piece))) for piece in pieces])


def _lengths(inputs: Inputs) -> list[int]:
    return [int(length) for length in inputs["completion_mask"].sum(-1)]


def tiny_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)
    config.num_attention_heads, config.num_key_value_heads, config.initializer_range = 4, 2, 0.2
    return Qwen3ForCausalLM(config)


def generate(trainer: TreeGRPOTrainer, *, num_generations: int = 8, most: int = 6) -> Inputs:
    """Answers to two prompts, rewarded by their share of even tokens; answers that end early are masked."""
    prompts = torch.tensor([[3, 4, 5, 6], [3, 4, 9, 8]]).repeat_interleave(num_generations, 0)
    ids = trainer.model.generate(prompts, do_sample=True, max_new_tokens=most, min_new_tokens=most, use_cache=False)
    completion_ids = ids[:, prompts.shape[1] :]
    # Token 0 ends an answer.
    mask = torch.cumsum(completion_ids == 0, -1) - (completion_ids == 0).long() == 0
    rewards = ((completion_ids % 2 == 0) * mask).sum(-1) / mask.sum(-1)
    by_prompt = rewards.view(-1, num_generations)
    advantages = ((by_prompt - by_prompt.mean(1, keepdim=True)) / (by_prompt.std(1, keepdim=True) + 1e-4)).flatten()
    inputs = {"prompt_ids": prompts, "completion_ids": completion_ids, "completion_mask": mask.long()}
    inputs |= {"advantages": advantages, "rewards": rewards}
    known = trainer.per_token_logps(inputs)
    return inputs | {"old_per_token_logps": known, "ref_per_token_logps": known}


def main() -> None:
    for loss_type, options in (("grpo", TreeOptions()), ("dapo", TreeOptions(max_tokens=16))):
        trainer = TreeGRPOTrainer(tiny_model(), GRPOLoss(loss_type=loss_type), lr=3e-3, options=options)
        rewards = []
        for _ in range(30):
            inputs = generate(trainer)
            trainer.step(inputs)
            rewards.append(float(inputs["rewards"].mean()))
        first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
        budget = f"{loss_type}, max_tokens={options.max_tokens}"
        print(f"{budget}: reward {first:.2f} in the first five steps, {last:.2f} in the last")


if __name__ == "__main__":
    main()
