"""Random updates on trees against stock verl on rows alone: models, options, losses and layouts of ranks, in float32.

    export PYTHONPATH=.:kernels:tests
    python tests/verl_plugin/random_updates.py --seconds 600 --seed 1
    python tests/verl_plugin/random_updates.py --seconds 600 --seed 1 --ranks 4

Prints every update that differs by more than the tolerances of the tests, and how many were drawn. Exits with 1 if one
differs by more than the last place of the largest gradient, and by more than stock verl does whose weights are rounded
otherwise. Models with Gated DeltaNet are drawn on several ranks only and held against whole trees on one rank: stock
rows round their gates' gradients worse than trees, which other tests hold against float64.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import rank_engines
import torch
from engine_harness import ALONE, LORA, Row, build_engine, nested, ppo_batch, save_model, tiny_qwen3, with_whole_masks
from equivalence import LOSS_TOLERANCE, assert_equal_gradients, run
from rank_engines import empty_batch
from rank_processes import run_ranks
from routed_rows import Routes, recorded_routes
from stock_routers import stock_routers_told
from tensordict import TensorDict
from tiny_families import GATED_DELTA_NET, RECURRENT, SHARED, save_hybrid
from tiny_sizes import ROPE, sizes
from transformers import Gemma2Config, GptOssConfig, LlamaConfig, MistralConfig, PretrainedConfig, Qwen3MoeConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config.engine import EngineRouterReplayConfig
from verl.workers.utils.losses import sft_loss
from verl_losses import AGG_MODES, BATCH_LOSSES, POLICY_LOSSES, actor_loss, critic_loss

from tree_rl.verl_plugin.options import TreeConfig

VOCAB = SHARED["vocab_size"]
SIZES = sizes(**SHARED, intermediate_size=48)
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 6}
SOFT_CAPS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8}
MODELS: dict[str, tuple[PretrainedConfig, str]] = {
    "qwen3": (tiny_qwen3(), "sdpa"),
    "qwen3 untied": (tiny_qwen3(tie_word_embeddings=False), "sdpa"),
    "llama": (LlamaConfig(**SIZES), "sdpa"),
    "mistral, windows": (MistralConfig(**SIZES, sliding_window=7), "eager"),
    "gemma 2, soft caps": (Gemma2Config(**SIZES, **SOFT_CAPS, sliding_window=9), "eager"),
    "gpt-oss, sinks": (GptOssConfig(**SIZES, **EXPERTS, sliding_window=8, rope_parameters=ROPE), "eager"),
    "qwen3-moe": (Qwen3MoeConfig(**SIZES, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16), "sdpa"),
    **{name: (config, "sdpa") for name, config in (RECURRENT | GATED_DELTA_NET).items()},
}
"""Configuration, and transformers' attention of the rows."""
WITH_LORA = ("qwen3", "qwen3 untied", "llama")
WITH_CRITIC = (*WITH_LORA, "mistral, windows", "qwen3-moe")
WITH_ROUTES = ("qwen3-moe", "gpt-oss, sinks")
REPLAY = {"router_replay": EngineRouterReplayConfig(mode="R3")}
VALUE, SFT = "value", "sft"
LAYOUTS: dict[str, dict[str, int]] = {"dp": {}, **rank_engines.LAYOUTS}
ROUNDINGS = 8
"""Draws of weights that an update which differs is held against."""
Found = tuple[float, dict[str, torch.Tensor]]
"""Loss and gradients of an update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """Rows and a loss."""

    rows: list[Row]
    deal: list[int]
    """Of each row a number; modulo the ranks it says who trains it."""
    seed: int
    routes: Routes | None
    """Of each row the experts that its rollout chose."""
    loss: tuple[str, str]
    """VALUE, SFT or a policy loss, and its aggregation."""
    terms: dict[str, Any]
    """KL and entropy."""
    budget: int
    """Tokens of a micro-batch of trees."""

    def batch(self, **flags: Any) -> TensorDict:
        shared = {"calculate_entropy": self.loss[0] != VALUE, "global_batch_size": len(self.rows)}
        data = ppo_batch(self.rows, seed=self.seed, **shared, **flags)
        if self.routes is not None:
            data["routed_experts"] = nested([torch.from_numpy(routes_TLK) for routes_TLK in self.routes])
        return with_whole_masks(data) if self.loss[0] == SFT else data

    def on(self, engine: Any, data: TensorDict) -> Found:
        name, aggregation = self.loss
        if name == VALUE:
            loss = critic_loss(aggregation, loss_scale_factor=17 if aggregation == "seq-mean-token-sum-norm" else None)
        else:
            loss = partial(sft_loss, config=None) if name == SFT else actor_loss(name, aggregation, **self.terms)
        found = run(engine, data, loss)
        return sum(found["loss"]), found["gradients"]

    def alone(self, stock: Any) -> Found:
        """Train every row alone, by the routes that trees are given."""
        data = self.batch(**ALONE)
        if self.routes is None:
            return self.on(stock, data)
        with stock_routers_told(self.routes, EXPERTS["num_local_experts"]):
            return self.on(stock, data.exclude("routed_experts"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """An engine, and what it trains."""

    name: str
    layout: str
    critic: bool
    routed: bool
    """Whether the rows come with their routes."""
    tree: dict[str, Any]
    model: dict[str, Any]
    engine: dict[str, Any]
    updates: list[Update]

    def path(self, folder: Path) -> Path:
        path = folder / (f"critic, {self.name}" if self.critic else self.name)
        if not path.exists():
            save = save_hybrid if self.name in GATED_DELTA_NET else partial(save_model, value=self.critic)
            save(path, deepcopy(MODELS[self.name][0]))
        return path

    def trees(self, folder: Path) -> Any:
        more = LAYOUTS[self.layout] | (REPLAY if self.routed else {})
        return self._build(folder, TreeConfig(**self.tree), self.model, self.engine | more)

    def reference(self, folder: Path) -> tuple[Any, Callable[[Update], Found]]:
        """One rank with these weights, and how it trains: stock verl, or trees if its rows are no yardstick."""
        if self.name in GATED_DELTA_NET:
            engine = self._build(folder, TreeConfig(mode="tree"), self.model, self.engine)
            return engine, lambda one: one.on(engine, one.batch())
        # A recomputed layer would ask for its routes twice.
        model = self.model | ({"enable_gradient_checkpointing": False} if self.routed else {})
        engine = self._build(folder, None, model, self.engine)
        return engine, lambda one: one.alone(engine)

    def _build(self, folder: Path, tree: TreeConfig | None, model: dict[str, Any], engine: dict[str, Any]) -> Any:
        given = {"value": self.critic, "attention": MODELS[self.name][1], "model": model, "engine": engine}
        return build_engine(self.path(folder), tree=tree, **given)


def draw_rows(rng: np.random.Generator) -> list[Row]:
    """Rows of one to three groups that branch anywhere: repeated and prefix rows, masks with holes, any prompt."""
    rows: list[Row] = []
    for group in range(rng.integers(1, 4)):
        # Few token ids: rows also share what nobody meant them to share.
        ids = draw_token_ids(rng, int(rng.choice([3, 6, VOCAB])))
        temperature = float(rng.choice([1.0, 1.0, 0.7]))
        for tokens in ids:
            prompt = int(rng.integers(1, len(tokens))) if rng.random() < 0.5 else min(2, len(tokens) - 1)
            length, kind = len(tokens) - prompt, rng.random()
            mask = rng.integers(0, 2, length) if kind < 0.25 else np.full(length, int(kind > 0.3))
            advantage = float(rng.choice([0, 1, -1, 0.3]))
            heat = temperature if rng.random() < 0.8 else 1.3
            fields = {"advantage": advantage, "uid": f"group {group}", "temperature": heat}
            rows.append(Row(tokens=tokens, prompt=prompt, mask=mask.tolist(), **fields))
    if not any(any(row.mask) for row in rows):
        rows[0] = replace(rows[0], mask=[1] * len(rows[0].mask))
    return [rows[index] for index in rng.permutation(len(rows))]


def draw_token_ids(rng: np.random.Generator, vocab: int) -> list[list[int]]:
    """Token ids of a group's rows: each continues a prefix of an earlier one, or is an earlier one."""
    ids: list[list[int]] = [rng.integers(1, vocab, rng.integers(2, 30)).tolist()]
    for _ in range(rng.integers(1, 6)):
        base = ids[rng.integers(len(ids))]
        kept = len(base) if rng.random() < 0.15 else rng.integers(0, len(base) + 1)
        more = [] if kept == len(base) else rng.integers(1, vocab, rng.integers(0, 14)).tolist()
        ids += [new for new in (base[:kept] + more,) if len(new) > 1]
    return ids


def draw_update(rng: np.random.Generator, *, critic: bool, routed: bool) -> Update:
    """Any loss on any rows, dealt out in turns or at random, which may leave ranks without rows."""
    rows = draw_rows(rng)
    longest = max(len(row.tokens) for row in rows)
    names = (VALUE,) if critic else (*(loss for loss in POLICY_LOSSES if loss not in BATCH_LOSSES), SFT)
    return Update(
        rows=rows,
        deal=rng.integers(0, 4, len(rows)).tolist() if rng.random() < 0.6 else list(range(len(rows))),
        seed=int(rng.integers(1_000_000)),
        routes=recorded_routes(rows, seed=int(rng.integers(1000))) if routed else None,
        loss=(str(rng.choice(names)), str(rng.choice(AGG_MODES))),
        terms={"kl": bool(rng.integers(2)), "entropy_coeff": float(rng.choice([0.0, 0.01]))},
        budget=int(rng.choice([100_000, max(longest, rng.integers(20, 120))])),
    )


def draw_setup(rng: np.random.Generator, ranks: int, updates: int) -> Setup:
    name = str(rng.choice([name for name in MODELS if ranks > 1 or name not in GATED_DELTA_NET]))
    critic = name in WITH_CRITIC and rng.random() < 0.25
    routed = name in WITH_ROUTES and not critic and rng.random() < 0.5
    model: dict[str, Any] = {"enable_gradient_checkpointing": bool(rng.integers(2))}
    if name in WITH_LORA and not critic and rng.random() < 0.2:
        model |= LORA
    switches = ("reshard_after_forward", "use_no_sync_for_gradient_accumulation", "entropy_checkpointing")
    budgets = (None, int(rng.integers(1, 30)), int(rng.integers(6, 60)))
    tree: dict[str, Any] = {"mode": str(rng.choice(["tree", "auto"])), "max_tokens": budgets[rng.integers(3)]}
    tree |= {"scope": str(rng.choice(["uid", "rank"])), "offload": (True, False, "auto")[rng.integers(3)]}
    tree |= {"self_check": bool(rng.integers(2))}
    layout = str(rng.choice(list(LAYOUTS))) if ranks == 4 else "dp"
    engine = {switch: bool(rng.integers(2)) for switch in switches}
    drawn = [draw_update(rng, critic=critic, routed=routed) for _ in range(updates)]
    options = {"tree": tree, "model": model, "engine": engine}
    return Setup(name=name, layout=layout, critic=critic, routed=routed, updates=drawn, **options)


def train_share(_: int, setups: Sequence[Setup], folder: Path) -> list[list[Found]]:
    """What a rank finds for the rows that are dealt to it."""
    found = []
    for setup in setups:
        engine = setup.trees(folder)
        rank, ranks = engine.get_data_parallel_rank(), engine.get_data_parallel_size()
        of_setup = []
        for one in setup.updates:
            mine = [row for row, place in enumerate(one.deal) if place % ranks == rank]
            data = one.batch(max_tokens=one.budget)
            loss, gradients = one.on(engine, tu.index_select_tensor_dict(data, mine) if mine else empty_batch())
            # verl averages the losses of ranks with other rows; those that share tokens have the same.
            of_setup.append((loss / torch.distributed.get_world_size(), gradients))
        found.append(of_setup)
    return found


def differences(setups: Sequence[Setup], folder: Path, ranks: int) -> Iterator[tuple[bool, str]]:
    """Updates in which trees on that many ranks do not train as rows alone on one; True where rounding explains it."""
    for setup in setups:
        setup.path(folder)  # ranks shall not write at the same time
    if ranks == 1:
        of_ranks = [train_share(0, setups, folder)]
    else:
        of_ranks = run_ranks(train_share, ranks, setups, folder, seconds=1800.0)
    for index, setup in enumerate(setups):
        engine, train = setup.reference(folder)
        for place, one in enumerate(setup.updates):
            alone = train(one)
            found = [of_rank[index][place] for of_rank in of_ranks]
            loss = sum(of_rank for of_rank, _ in found)
            errors = [difference(alone, (loss, gradients)) for _, gradients in found]
            off = next(filter(None, errors), None)
            if off is not None:
                name, error, norm = off
                largest = max(float(gradient.norm()) for gradient in alone[1].values())
                noise = [difference(alone, other) for other in rounded_otherwise(engine, partial(train, one))]
                is_rounding = error <= torch.finfo(torch.float32).eps * largest or any(noise)
                about = f"{name} is off by {error:.2g}, its norm {norm:.2g}, the largest {largest:.2g}"
                yield is_rounding, f"{about}: {replace(setup, updates=[one])}"


def rounded_otherwise(engine: Any, train: Callable[[], Found]) -> list[Found]:
    """The same update on weights that moved by one unit in the last place, up or down; another draw each time."""
    weights = [getattr(weight, "_local_tensor", weight).detach() for weight in engine.module.parameters()]
    exact = [weight.clone() for weight in weights]
    found, draw = [], torch.Generator().manual_seed(0)
    for _ in range(ROUNDINGS):
        for weight, was in zip(weights, exact, strict=True):
            sign = torch.randint(2, was.shape, generator=draw) * 2 - 1
            weight.copy_(was * (1 + torch.finfo(was.dtype).eps * sign))
        found.append(train())
    for weight, was in zip(weights, exact, strict=True):
        weight.copy_(was)
    return found


def difference(expected: Found, got: Found) -> tuple[str, float, float] | None:
    """What lies beyond the tolerances: a parameter or the loss, its error, its size."""
    error, size = abs(got[0] - expected[0]), abs(expected[0])
    if error > LOSS_TOLERANCE * size + 1e-6:
        return "loss", error, size
    try:
        assert_equal_gradients(expected[1], got[1])
    except AssertionError as off:
        return off.args[0]
    return None


def main(given: Sequence[str] | None = None) -> int:
    """Draw setups until the time is over; returns 1 if an update differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4), default=1, help="processes that talk by gloo")
    parser.add_argument("--setups", type=int, default=5, help="engines of a round")
    parser.add_argument("--updates", type=int, default=6, help="updates of an engine")
    args = parser.parse_args(given)
    torch.set_num_threads(1)
    rng, until = np.random.default_rng(args.seed), time.monotonic() + args.seconds
    drawn = different = rounded = 0
    with tempfile.TemporaryDirectory() as folder:
        while drawn == 0 or time.monotonic() < until:
            setups = [draw_setup(rng, args.ranks, args.updates) for _ in range(args.setups)]
            for is_rounding, line in differences(setups, Path(folder), args.ranks):
                rounded, different = rounded + is_rounding, different + (not is_rounding)
                print("rounding" if is_rounding else "DIFFERS", line, flush=True)
            drawn += args.setups * args.updates
            print(f"{drawn} updates, {different} differ; {rounded} as far as by rounding", flush=True)
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
