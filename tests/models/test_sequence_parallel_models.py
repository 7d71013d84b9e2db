"""Models with recurrent layers or experts whose tokens are scattered over ranks train as on one rank that has all rows;
routers count, charge, record and replay as there."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import hybrid_models
import pytest
import torch
from moe_models import REPLAYABLE, build, random_routes
from rank_processes import run_ranks
from recurrent_models import RECURRENT
from sharing_ranks import SHAPES, assert_equal_gradients, averaged, groups_of, prepare
from tiny_sizes import HYBRID, changed

from tree_rl.models.routers.merge_routes import NATIVE
from tree_rl.models.routers.trace import RouterHooks
from tree_rl.models.sequence_parallel_support import check_sequence_parallel
from tree_rl.training import EdgeOutputs, Rows, StepContext, TreeOptions, TreeStep
from tree_rl.training.routers.expert_load import LoadReport

CONFIGS = {**hybrid_models.HYBRIDS, **RECURRENT}
DELTA_NET = {"layer_types": HYBRID}
CONV = {"layer_types": ["conv", "full_attention"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # name: (family, changes of its config)
    "qwen3_next": ("qwen3_next", DELTA_NET),
    "qwen3_5": ("qwen3_5", DELTA_NET),
    "one_key_head": ("qwen3_5", DELTA_NET | {"linear_num_key_heads": 1}),
    "equal_heads": ("qwen3_next", DELTA_NET | {"linear_num_key_heads": 4}),
    "key_heads_no_divisor": ("qwen3_5", DELTA_NET | {"linear_num_key_heads": 6, "linear_num_value_heads": 12}),
    "lfm2": ("lfm2", CONV),
    "lfm2_bias": ("lfm2", CONV | {"conv_bias": True}),
    "bamba": ("bamba", {"attn_layer_indices": [1]}),
    "one_group": ("bamba", {"attn_layer_indices": [1], "mamba_n_groups": 1}),
    "granite_4": ("granite_4", {"layer_types": ["mamba", "attention"], "mamba_n_groups": 4}),
    "nemotron_h": ("nemotron_h", {"layers_block_type": ["mamba", "moe", "attention", "mlp"]}),
    "falcon_h1": ("falcon_h1", {"mamba_n_groups": 1}),
    "zamba2": ("zamba2", {"layers_block_type": ["hybrid", "mamba"]}),
}
FORESTS = ("one_token", "two_tokens", "no_common_root", "identical_and_strict_prefix", "long_trunk")
WORLD = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step of one model over the rows of each data-parallel group."""

    model: str
    shapes: tuple[str, ...]
    """Of each data-parallel group's rows; an empty name is a group without rows."""
    max_tokens: int | None = None
    has_routers: bool = False
    coef: float | None = None
    replays: bool = False
    """Whether routes are prescribed, some of them left to the router."""
    knows_load: bool = False
    """Whether an inference has counted the load before the update."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a case gave on one rank, or on one rank of several."""

    gradients: dict[str, torch.Tensor]
    """As they lie in the parameters."""
    log_probs: torch.Tensor | None
    routes: torch.Tensor | None
    """Experts of each token, ascending."""
    load: LoadReport | None


routed = partial(Case, has_routers=True, coef=0.5)
BOTH, LONELY = ("branches", "comb"), ("identical_and_strict_prefix", "")
RECURRENT_CASES = [
    *(Case(model=model, shapes=("comb",)) for model in MODELS),
    *(Case(model=model, shapes=(forest,)) for model in ("qwen3_5", "lfm2", "bamba") for forest in FORESTS),
    Case(model="bamba", shapes=("identical_and_strict_prefix",), max_tokens=4),
]
CASES = {
    2: [
        *(Case(model=model, shapes=("comb", "two_tokens"), max_tokens=9) for model in MODELS),
        routed(model="qwen3_moe", shapes=BOTH),
        routed(model="mixtral", shapes=BOTH, max_tokens=8, knows_load=True),
        routed(model="qwen3_moe_dense_layer", shapes=LONELY, replays=True),
        routed(model="qwen3_moe", shapes=BOTH, max_tokens=8, coef=None, replays=True),
    ],
    4: [
        *RECURRENT_CASES,
        routed(model="qwen3_next", shapes=("comb",), replays=True),
        routed(model="mixtral", shapes=("single_tokens",)),
        routed(model="deepseek_v3", shapes=("comb",), coef=None, replays=True),
        routed(model="qwen3_moe", shapes=("identical_and_strict_prefix",), max_tokens=5, replays=True),
        routed(model="qwen3_moe", shapes=("branches",), coef=0.0, knows_load=True),
    ],
}
"""By the number of ranks that share tokens, of four in all."""


def model_of(case: Case) -> Any:
    if case.has_routers:
        return prepare(build(REPLAYABLE[case.model]).train())
    family, changes = MODELS[case.model]
    model = hybrid_models.build(changed(CONFIGS[family], **{"num_hidden_layers": 2} | changes), torch.float32)
    draw = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        # Equal weights of all heads would hide that a rank takes others' heads.
        if name.endswith(("A_log", "dt_bias", ".D", "conv.bias")):
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
    return prepare(model)


def run(case: Case, groups: Sequence[int], share: Any, device: str = "cpu") -> Outcome:
    """The rows of some data-parallel groups in one step; the loss of all groups is the sum over their rows."""
    named = [(group, index) for group in groups for index in range(len(SHAPES.get(case.shapes[group], [])))]
    token_ids = [SHAPES[case.shapes[group]][index] for group, index in named]
    draws = [torch.Generator().manual_seed(100 * group + index) for group, index in named]
    weights = [torch.randn(len(ids), generator=draw) for ids, draw in zip(token_ids, draws, strict=True)]
    model = model_of(case).to(device)
    context = StepContext.of(model, sequence_parallel=share)
    if case.has_routers:
        context = replace(context, routers=RouterHooks(model))
    checks = share is not None and device == "cpu"
    options = TreeOptions(mode="tree", max_tokens=case.max_tokens, router_aux_loss_coef=case.coef, self_check=checks)
    rows = Rows.of(token_ids)
    if case.replays and token_ids:
        rows = replace(rows, routes_FLK=torch.cat([routes_of(case, *name) for name in named]).numpy())

    def loss(outputs: EdgeOutputs, members: Sequence[int]) -> tuple[torch.Tensor, None]:
        value_f, weight_f = outputs["log_probs"], torch.cat([weights[row] for row in members])
        # Ranks average their gradients.
        scale = len(case.shapes) / len(groups)
        return (value_f * weight_f.to(value_f) + 0.3 * value_f.square()).sum() * scale, None

    step = TreeStep(model, options, context=context)
    if case.knows_load:
        step.infer(rows)
    result = step.run(rows, loss, records_routes=case.has_routers, is_separable=True)
    log_probs = result.outputs.present().get("log_probs")
    own = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    gradients = own if share is None else averaged(model)
    return Outcome(
        gradients={name: gradient.cpu() for name, gradient in gradients.items()},
        log_probs=None if log_probs is None else log_probs.cpu(),
        routes=None if result.routes_FLK is None else result.routes_FLK.sort(-1).values,
        load=result.load,
    )


def routes_of(case: Case, group: int, index: int) -> torch.Tensor:
    """Routes [T, L, K] of one row; every third token is left to the router in one layer."""
    routes_TLK = torch.from_numpy(random_routes(SHAPES[case.shapes[group]], seed=group)[index].copy())
    routes_TLK[::3, 1] = NATIVE
    return routes_TLK


def check(case: Case, size: int, of_ranks: Sequence[Outcome], expected: Outcome) -> None:
    lengths = [sum(map(len, SHAPES.get(shape, []))) for shape in case.shapes]
    for rank, got in enumerate(of_ranks):
        group = rank // size
        if lengths[group]:
            own = slice(sum(lengths[:group]), sum(lengths[: group + 1]))
            assert got.log_probs is not None and expected.log_probs is not None
            torch.testing.assert_close(got.log_probs, expected.log_probs[own], rtol=1e-5, atol=1e-5)
            assert (got.routes is not None) == case.has_routers
            assert got.routes is None or torch.equal(got.routes, expected.routes[own])
        assert_equal_gradients(got.gradients, expected.gradients)
    check_load([got.load for got in of_ranks], size, expected.load)


def check_load(of_ranks: Sequence[LoadReport | None], size: int, expected: LoadReport | None) -> None:
    """The load is that of all rows; so is the mean over all ranks of the cost, alike on ranks that share tokens."""
    if expected is None:
        assert not any(of_ranks)
        return
    loads = [load for load in of_ranks if load is not None]
    assert len(loads) == len(of_ranks)
    names = ("max_over_mean", "min_over_mean", "idle_experts", "has_extra_pass")
    for name, load in product(names, loads):
        assert getattr(load, name) == pytest.approx(getattr(expected, name), rel=1e-12)
    costs = [load.aux_loss for load in loads]
    if expected.aux_loss is None:
        assert costs == [None] * WORLD
        return
    assert sum(costs) / WORLD == pytest.approx(expected.aux_loss, rel=1e-6)
    assert all(len(set(costs[first : first + size])) == 1 for first in range(0, WORLD, size))


def rank_main(rank: int, cases: Sequence[tuple[int, Case]], on_gpus: bool) -> list[Outcome]:
    shares = {size: groups_of(rank, size) for size in sorted({size for size, _ in cases})}
    device = f"cuda:{rank}" if on_gpus else "cpu"
    return [run(case, [rank // size], shares[size], device) for size, case in cases]


def assert_one_rank(world: int, cases: Sequence[tuple[int, Case]], *, on_gpus: bool) -> None:
    of_ranks = run_ranks(rank_main, world, cases, on_gpus, backend="nccl" if on_gpus else "gloo", seconds=60.0)
    for (size, case), found in zip(cases, zip(*of_ranks, strict=True), strict=True):
        check(case, size, found, run(case, range(len(case.shapes)), None))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_models_scattered_over_gpus_are_those_of_one_rank() -> None:
    world = 4 if torch.cuda.device_count() >= 4 else 2
    assert_one_rank(world, [(world, case) for case in RECURRENT_CASES], on_gpus=True)


@pytest.mark.slow
def test_scattered_models_are_those_of_one_rank() -> None:
    assert_one_rank(WORLD, [(size, case) for size, cases in CASES.items() for case in cases], on_gpus=False)


@pytest.mark.parametrize(
    ("family", "size", "message"),
    (
        ("qwen3_next", 8, "linear_num_value_heads=4 of qwen3_next; set .* 4"),
        ("lfm2", 3, "hidden_size=32 of lfm2; set .* to 1 or 2 or 4$"),
        ("bamba", 8, "mamba_n_heads=4 of bamba"),
        ("nemotron_h", 8, "mamba_num_heads=4 of nemotron_h"),
        ("zamba2", 8, "n_mamba_heads=4 of zamba2"),
    ),
)
def test_sizes_that_heads_do_not_allow_are_refused(family: str, size: int, message: str) -> None:
    for divisor in (1, 2, 4):
        check_sequence_parallel(CONFIGS[family], divisor)
    with pytest.raises(ValueError, match=f"={size} does not divide num_attention_heads=4, {message}"):
        check_sequence_parallel(CONFIGS[family], size)
