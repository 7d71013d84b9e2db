"""A decoder in plain torch that reads rows and trees in whatever dtype it holds, float64 by default."""

from types import SimpleNamespace

import torch
from torch import nn

from tree_kernels.tree_attention import tree_attention
from tree_kernels.tree_layout import TreeLayout
from tree_rl.models.relay import LayerRelay

HEADS, HEAD_SIZE, LAYERS = 2, 4, 2
WIDTH = HEADS * HEAD_SIZE


class PlainDecoder(nn.Module):
    """Embedding with learned positions, causal attention and MLP, tied head; no float32 step anywhere."""

    def __init__(self, vocab: int, *, positions: int = 16, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(vocab, WIDTH)
        self.position = nn.Embedding(positions, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)) for _ in range(LAYERS)
        )
        self.double()

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        tree_layout: TreeLayout | None = None,
        logits_to_keep: torch.Tensor | None = None,
        kv_relay: LayerRelay | None = None,
        **_: object,
    ) -> SimpleNamespace:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).unsqueeze(0)
        hidden_1NC = self.embed(input_ids) + self.position(position_ids)
        for layer, (qkv, mlp) in enumerate(zip(self.qkv, self.mlp, strict=True)):
            q, k, v = qkv(hidden_1NC)[0].view(-1, 3, HEADS, HEAD_SIZE).unbind(1)
            past = {} if kv_relay is None else kv_relay.past(layer)
            if kv_relay is not None:
                kv_relay.capture(layer, keys=k, values=v)
            if tree_layout is None:
                mixed_NC = _causal(q, k, v)
            else:
                mixed_NC = tree_attention(q, k, v, tree_layout, past_k=past.get("keys"), past_v=past.get("values"))
            hidden_1NC = hidden_1NC + mixed_NC.reshape(1, -1, WIDTH)
            hidden_1NC = hidden_1NC + mlp(hidden_1NC)
        kept = hidden_1NC if logits_to_keep is None else hidden_1NC[:, logits_to_keep]
        return SimpleNamespace(logits=kept @ self.embed.weight.T)


def _causal(q_LHD: torch.Tensor, k_LHD: torch.Tensor, v_LHD: torch.Tensor) -> torch.Tensor:
    scores_HLL = torch.einsum("lhd,mhd->hlm", q_LHD, k_LHD) / HEAD_SIZE**0.5
    future = torch.ones(scores_HLL.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum("hlm,mhd->lhd", scores_HLL.masked_fill(future, -torch.inf).softmax(-1), v_LHD)
