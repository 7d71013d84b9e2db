"""Recurrent layers whose tokens are scattered over gloo or NCCL ranks, against the same layer on one rank."""

import sys
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from hybrid_models import HYBRIDS, build
from recurrent_models import RECURRENT

from tree_kernels.tree_layout import TreeLayout
from tree_rl.models import use_tree_attention
from tree_rl.models.attention import skip_mask
from tree_rl.models.relay import LayerRelay, LayerTensors
from tree_rl.models.sequence_parallel import SequenceParallel
from tree_rl.tree.forest import Forest

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))

Blocks = tuple[tuple[int, int], ...]
"""Number and size of the heads of each block of a convolution's channels."""
TAPS = 4


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The first layer of a tiny model."""

    family: str
    sizes: tuple[tuple[str, Any], ...] = ()
    """Of the config, other than the family's."""
    blocks: Blocks
    state: tuple[int, int, int] | None
    """Heads, key size, value size; None where a layer has no state beside the convolution's."""
    taps: int = TAPS


def _delta_net(family: str, keys: int = 2, values: int = 4) -> Layer:
    sizes = (("linear_num_key_heads", keys), ("linear_num_value_heads", values))
    return Layer(family=family, sizes=sizes, blocks=((keys, 8), (keys, 8), (values, 8)), state=(values, 8, 8))


def _mamba(family: str, groups: int = 2) -> Layer:
    sizes = (("mamba_n_groups", groups),)
    return Layer(family=family, sizes=sizes, blocks=((4, 16), (groups, 8), (groups, 8)), state=(4, 8, 16))


LAYERS: dict[str, Layer] = {
    "qwen3_next": _delta_net("qwen3_next"),
    "qwen3_5": _delta_net("qwen3_5"),
    "one_key_head": _delta_net("qwen3_5", keys=1),
    "equal_heads": _delta_net("qwen3_next", keys=4),
    "key_heads_no_divisor": _delta_net("qwen3_5", keys=6, values=12),
    "lfm2": Layer(family="lfm2", blocks=((32, 1),), state=None, taps=3),
    "lfm2_bias": Layer(family="lfm2", sizes=(("conv_bias", True),), blocks=((32, 1),), state=None, taps=3),
    "bamba": _mamba("bamba"),
    "one_group": _mamba("bamba", groups=1),
    "granite_4": _mamba("granite_4", groups=4),
}
DRAW = np.random.default_rng(7)
TRUNK = DRAW.integers(1, 60, 70).tolist()
FORESTS: dict[str, list[list[int]]] = {
    "one_token": [[5]],
    "two_tokens": [[5, 6]],
    "three_roots": [[5], [6], [7]],
    "comb": [TRUNK[: 2 + 2 * i] + DRAW.integers(1, 60, 3).tolist() for i in range(4)],
    "twins_and_prefix": [TRUNK[:9], TRUNK[:5], TRUNK[:9]],
    "beyond_a_tile": [TRUNK + DRAW.integers(1, 60, 1 + 4 * i).tolist() for i in range(3)],
}


@cache
def layer_of(name: str, device: str) -> Any:
    """The layer, prepared for trees; the same weights in every process."""
    spec = LAYERS[name]
    stock = {**HYBRIDS, **RECURRENT}[spec.family]
    config = type(stock)(**{**stock.to_dict(), **dict(spec.sizes)})
    model = build(config, torch.float32)
    use_tree_attention(model)
    layer = model.model.layers[0].to(device)
    for parameter in layer.parameters():
        # Equal weights of all heads would hide that a rank takes others' heads.
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).to(device)
    return layer


@dataclass(kw_only=True)
class Outcome:
    """What one run of a layer gave."""

    output_nC: torch.Tensor
    captured: LayerTensors
    gradients: dict[str, torch.Tensor]
    hidden_gradient_nC: torch.Tensor
    past_gradients: dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One forest below a past, and what the loss weighs."""

    end: np.ndarray
    hidden: torch.Tensor
    weight: torch.Tensor
    past: dict[str, torch.Tensor]
    captured_weight: dict[str, torch.Tensor]
    cuts: tuple[int, ...]

    @classmethod
    def of(cls, spec: Layer, rows: list[list[int]], size: int, device: str) -> "Problem":
        """Padded to a multiple of `size` by tokens that nobody sees and the loss does not weigh."""
        forest = Forest.from_rows(rows)
        draw = torch.Generator().manual_seed(len(rows) + forest.num_unique)
        channels = sum(heads * width for heads, width in spec.blocks)
        cuts = tuple(sorted({0, forest.num_unique // 2, forest.num_unique - 1}))
        shapes = {"context": (spec.taps - 1, channels)}
        if spec.state is not None:
            shapes["state"] = spec.state
        random = partial(torch.randn, generator=draw)
        weight, hidden = random(forest.num_unique, 32), random(forest.num_unique, 32)
        past = {name: random(shape).to(device) for name, shape in shapes.items()}
        captured_weight = {name: random(len(cuts), *shape).to(device) for name, shape in shapes.items()}
        pads = -forest.num_unique % size
        end = np.append(forest.subtree_end, np.arange(forest.num_unique, forest.num_unique + pads) + 1)
        return cls(
            end=end.astype(np.int32),
            hidden=torch.cat([hidden, random(pads, 32)]).to(device),
            weight=torch.cat([weight, torch.zeros(pads, 32)]).to(device),
            past=past,
            captured_weight=captured_weight,
            cuts=cuts,
        )


def run(layer: Any, problem: Problem, own: "Own | None") -> Outcome:
    """Forward and backward of a layer, on a rank's share of a problem or on all of it."""
    ranks = None if own is None else own.ranks
    mine = (lambda t: t) if ranks is None else ranks.own_slice
    take = (lambda name, t: t) if own is None else own.take
    hidden_nC = mine(problem.hidden).clone().requires_grad_()
    past = {name: take(name, tensor).clone().requires_grad_() for name, tensor in problem.past.items()}
    relay = LayerRelay(lambda _: past, cuts=problem.cuts)
    layout = TreeLayout.from_subtree_end(torch.from_numpy(problem.end), on_host=problem.end).to(hidden_nC.device)
    scattered = {} if ranks is None else {"sequence_parallel": ranks}
    answer = layer(
        hidden_nC.unsqueeze(0),
        position_embeddings=None,
        attention_mask=skip_mask(hidden_nC.device),
        tree_layout=layout,
        kv_relay=relay,
        **scattered,
    )
    output_nC = (answer[0] if isinstance(answer, tuple) else answer).squeeze(0)
    (captured,) = [one.tensors for one in relay.take()]
    loss = (output_nC * mine(problem.weight)).sum()
    for name, tensor in captured.items():
        # A head that several ranks hold is weighed by each of them.
        loss = loss + (tensor * take(name, problem.captured_weight[name]) / held(name, own, tensor)).sum()
    parameters = dict(layer.named_parameters())
    leaves = [*parameters.values(), hidden_nC, *past.values()]
    found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    count = len(parameters)
    return Outcome(
        output_nC=output_nC.detach(),
        captured={name: tensor.detach() for name, tensor in captured.items()},
        gradients=dict(zip(parameters, found[:count], strict=True)),
        hidden_gradient_nC=found[count],
        past_gradients=dict(zip(past, found[count + 1 :], strict=True)),
    )


def held(name: str, own: "Own | None", tensor: torch.Tensor) -> torch.Tensor | float:
    """How many ranks hold each channel of a context; a state's heads have one rank each."""
    return 1.0 if own is None or name == "state" else own.holders[own.channels].to(tensor.device)


class Own:
    """What a rank holds of a layer's state and channels, worked out head by head."""

    def __init__(self, spec: Layer, ranks: SequenceParallel) -> None:
        self.ranks = ranks
        each = [_channels(spec.blocks, ranks.size, rank) for rank in range(ranks.size)]
        self.channels = torch.tensor(each[ranks.rank])
        total = sum(heads * width for heads, width in spec.blocks)
        self.holders = torch.bincount(torch.tensor(each).flatten(), minlength=total).float()

    def take(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Own heads of a state [..., H, K, V], or own channels of a context [..., taps - 1, C]."""
        if name == "state":
            return tensor.chunk(self.ranks.size, dim=-3)[self.ranks.rank]
        return tensor[..., self.channels.to(tensor.device)]

    def put(self, name: str, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The whole tensor with the own part added where it belongs, zeros elsewhere."""
        whole = torch.zeros_like(like)
        if name == "state":
            whole.chunk(self.ranks.size, dim=-3)[self.ranks.rank].add_(tensor)
        else:
            whole.index_add_(-1, self.channels.to(tensor.device), tensor)
        return whole


def _channels(blocks: Blocks, size: int, rank: int) -> list[int]:
    """Channels of a rank, in its order: of each block the heads that its part of the most numerous block reads."""
    found, start = [], 0
    for heads, width in blocks:
        copies = int(np.lcm(heads, size)) // heads
        sent = [head for head in range(heads) for _ in range(copies)]
        share = len(sent) // size
        for head in sent[rank * share : (rank + 1) * share]:
            found += range(start + head * width, start + (head + 1) * width)
        start += heads * width
    return found


def check_layer(name: str, forest: str, ranks: SequenceParallel, device: str = "cpu") -> None:
    """A scattered layer gives what the layer gives on one rank: outputs, states at cuts and all gradients."""
    spec, layer = LAYERS[name], layer_of(name, device)
    problem = Problem.of(spec, FORESTS[forest], ranks.size, device)
    own = Own(spec, ranks)
    expected, got = run(layer, problem, None), run(layer, problem, own)
    assert_close(got.output_nC, ranks.own_slice(expected.output_nC), "output")
    assert_close(got.hidden_gradient_nC, ranks.own_slice(expected.hidden_gradient_nC), "gradient of the input")
    for tensor_name, tensor in got.captured.items():
        assert_close(tensor, own.take(tensor_name, expected.captured[tensor_name]), f"captured {tensor_name}")
    summed = dict(got.gradients)
    for past, gradient in got.past_gradients.items():
        summed[f"past {past}"] = own.put(past, gradient, problem.past[past])
    for gradient in summed.values():
        dist.all_reduce(gradient, group=ranks.group)
    reference = expected.gradients | {f"past {name}": g for name, g in expected.past_gradients.items()}
    largest = max(float(gradient.norm()) for gradient in reference.values())
    for leaf, gradient in reference.items():
        norm = float(gradient.norm())
        allowed = 1e-5 * norm if norm >= 1e-2 * largest else 4e-5 * 1e-2 * largest
        error = float((summed[leaf] - gradient).norm())
        assert error <= allowed, f"{leaf}: error {error:.2e}, norm {norm:.2e}, largest {largest:.2e}"


def assert_close(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert got.shape == expected.shape, f"{what}: {tuple(got.shape)}, expected {tuple(expected.shape)}"
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, msg=lambda text: f"{what}: {text}")
