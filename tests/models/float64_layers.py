"""Layers of stock models without their rounding to float32."""

import torch


def float64_throughout(model: torch.nn.Module) -> None:
    """Norms, rotary angles and routers in the dtype of the model; stock code rounds them to float32."""

    def norm(self: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    def rotary(self: torch.nn.Module, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].double() * self.inv_freq.double()
        both = torch.cat([angles, angles], dim=-1)
        return both.cos(), both.sin()

    def router(self: torch.nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = hidden @ self.weight.T
        top, index = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
        return logits, top / top.sum(-1, keepdim=True), index

    forwards = {
        **dict.fromkeys(("LlamaRMSNorm", "Qwen3MoeRMSNorm"), norm),
        **dict.fromkeys(("LlamaRotaryEmbedding", "Qwen3MoeRotaryEmbedding"), rotary),
        "Qwen3MoeTopKRouter": router,
    }
    for module in model.modules():
        if type(module).__name__ in forwards:
            module.forward = forwards[type(module).__name__].__get__(module)
