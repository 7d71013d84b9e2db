"""Trees against trees: one batch through each library that trains on trees; correct or wrong first, then time, memory.

Usage: python benchmarks/tree_rivals.py OUTPUT.csv [--model NAME --layers N] [--por P ...] [--shape agents prompt]
    [--rivals NAME ...] [--python NAME=PYTHON ...] [--site NAME=FOLDER:FOLDER ...] [--device cpu|cuda]

Each rival plays in a process of its own: with PYTHON, and FOLDERs before its other packages. It reads the rows and the
weights, computes sum(-advantage * log-prob) / trained tokens, and leaves the gradient. The error of a gradient is its
distance to float32 rows alone over all parameters; `correct` means no further than 1.1 times rows alone in the rival's
own type. Tokens train that not all rows of a group share. Rivals are called the way their trainers call them (TRL 1.16,
AReaL 1.0.4, Arctic Platform 0.1.2), rows alone always:

* rows: each row alone through transformers.
* trl: `TreeRow` and its fused head. Its attention gathers keys along each path and calls FlashAttention 3, which
  FlashAttention 4 replaces here, torch's SDPA on a CPU.
* areal: `build_packed_tree_batch` and Flex attention; on a CPU, where Flex has no backward, SDPA under AReaL's mask.
* zorro: `Qwen3ModelOncePatcher`; merges prompts only, the tokens that all rows of a group share. It calls
  FlashAttention 2, which is replaced as TRL's.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Work = Callable[[], int]
"""Forward and backward of the batch; returns the tokens that went through the layers."""


class Given:
    """What every rival receives."""

    def __init__(self, folder: Path, device: str) -> None:
        """Read `rows.npz`, as `write_rows` left it."""
        with np.load(folder / "rows.npz") as rows:
            self.tokens_BL, self.groups_B, self.unique_G = rows["tokens_BL"], rows["groups_B"], rows["unique_G"]
            self.prompt = int(rows["prompt"])
            """Tokens that all rows of every group share; those behind them are trained."""
            self.advantages_B = torch.from_numpy(rows["advantages_B"])
        self.model_folder, self.device = folder / "model", torch.device(device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.length = self.tokens_BL.shape[1]
        self.num_trained = len(self.tokens_BL) * (self.length - self.prompt)

    def model(self, **more: Any) -> Any:
        """The model in train mode, with checkpointing on a GPU."""
        model = AutoModelForCausalLM.from_pretrained(self.model_folder, dtype=self.dtype, **more)
        model = model.to(self.device).train()
        if self.device.type == "cuda":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    def members(self) -> Iterator[np.ndarray]:
        """Row numbers of each group."""
        for group in np.unique(self.groups_B):
            yield np.flatnonzero(self.groups_B == group)

    def part(self, row: int, log_probs: torch.Tensor) -> torch.Tensor:
        """A row's share of the loss from the log-probs [L - 1] of its tokens after the first."""
        return -self.advantages_B[row].item() * log_probs[self.prompt - 1 :].float().sum() / self.num_trained


def rows_alone(given: Given) -> tuple[Any, Work]:
    """Every row through transformers' own forward."""
    model = given.model(attn_implementation="sdpa")

    def work() -> int:
        for row, tokens in enumerate(given.tokens_BL):
            ids = torch.from_numpy(tokens)[None].to(given.device)
            logits = model(ids, use_cache=False).logits[0, :-1].float()
            given.part(row, logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]).backward()
        return int(given.tokens_BL.size)

    return model, work


def tree_rl(given: Given) -> tuple[Any, Work]:
    """`TreeStep`, as a plain torch loop calls it."""
    from tree_rl.models import use_edge_head, use_tree_attention
    from tree_rl.training import Rows, TreeOptions, TreeStep

    model = given.model()
    use_tree_attention(model)
    use_edge_head(model)
    step = TreeStep(model, TreeOptions(max_tokens=1 << 20))
    trained = [np.arange(given.length) >= given.prompt] * len(given.tokens_BL)
    rows = Rows.of(list(given.tokens_BL), trained=trained, groups=given.groups_B.tolist())

    def loss(outputs: Any, members: Any) -> tuple[torch.Tensor, dict[str, float]]:
        # A row's tokens come in order; a token's log-prob stands at the token before it.
        log_probs = outputs["log_probs"].view(len(members), given.length)[:, :-1]
        return torch.stack([given.part(row, part) for row, part in zip(members, log_probs, strict=True)]).sum(), {}

    def work() -> int:
        return sum(batch.unique_tokens for batch in step.run(rows, loss, is_separable=True).micro_batches)

    return model, work


def trl(given: Given) -> tuple[Any, Work]:
    """TRL's asynchronous GRPO trainer: one `TreeRow` for each group."""
    from trl.experimental.async_grpo import packing
    from trl.trainer.utils import add_fused_lm_head

    packing._flash_attn = lambda: _VariableLength
    packing.register_tree_attention()
    model = given.model(attn_implementation=packing.TREE_ATTENTION)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))

    def work() -> int:
        tokens = 0
        for members in given.members():
            tree = packing.TreeRow()
            for row in members:
                ids, mask = torch.from_numpy(given.tokens_BL[row]), torch.arange(given.length) >= given.prompt
                sample = {"input_ids": ids, "completion_mask": mask.long(), "old_log_probs": torch.zeros(len(ids))}
                tree.add({**sample, "advantage": given.advantages_B[row].item(), "group_id": 0})
            packed = {name: value.to(given.device) for name, value in tree.pack().items()}
            names = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
            most_q, most_k = packed["tree_max_seqlens"].tolist()
            outputs = model(
                **{name: packed[name][None] for name in ("input_ids", "position_ids", "shift_labels")},
                **{name: packed[name] for name in names},
                tree_max_seqlen_q=most_q,
                tree_max_seqlen_k=most_k,
                fused_lm_head=True,
            )
            log_probs = outputs.log_probs.flatten()[packed["token_index"]]
            (-(packed["advantages"] * log_probs.float()).sum() / given.num_trained).backward()
            tokens += packed["input_ids"].numel()
        return tokens

    return model, work


class _VariableLength:
    """What TRL asks of FlashAttention 3, and `_in_flash_attention_2` of it."""

    @staticmethod
    def flash_attn_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        softmax_scale: float | None,
        causal: bool,
        window_size: tuple[int, int],
    ) -> torch.Tensor:
        """Attention of packed rows, causal from the end of each: [tokens, heads, head size]."""
        assert causal and window_size == (-1, -1)
        if q.is_cuda:
            from flash_attn.cute import flash_attn_varlen_func

            out = flash_attn_varlen_func(
                q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, softmax_scale=softmax_scale, causal=True
            )
            return out[0] if isinstance(out, tuple) else out
        parts = []
        ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        for start, end, first, last in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
            mask = torch.ones(end - start, last - first, dtype=torch.bool).tril(last - first - (end - start))
            one = [x.transpose(0, 1)[None] for x in (q[start:end], k[first:last], v[first:last])]
            out = torch.nn.functional.scaled_dot_product_attention(
                *one, attn_mask=mask, scale=softmax_scale, enable_gqa=True
            )
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)


def _in_flash_attention_2(
    _module: Any, q_1HQD: torch.Tensor, k_1HKD: torch.Tensor, v_1HKD: torch.Tensor, **asked: Any
) -> tuple[torch.Tensor, None]:
    """transformers' attention of packed rows, causal from the end of each: [1, Q, H, D]."""
    out_QHD = _VariableLength.flash_attn_varlen_func(
        *(one[0].transpose(0, 1).contiguous() for one in (q_1HQD, k_1HKD, v_1HKD)),
        asked["cu_seq_lens_q"],
        asked["cu_seq_lens_k"],
        asked["max_length_q"],
        asked["max_length_k"],
        softmax_scale=asked["scaling"],
        causal=True,
        window_size=(-1, -1),
    )
    return out_QHD[None], None


def areal(given: Given) -> tuple[Any, Work]:
    """AReaL's FSDP engine: greedy tries under a budget, every trie padded to it."""
    from areal.api.cli_args import MicroBatchSpec
    from areal.models.tree_attn.functional import _gather_packed_tree_logprobs
    from areal.models.tree_attn.module_fsdp import patch_fsdp_for_tree_training
    from areal.models.tree_attn.tree import build_packed_tree_batch, build_tree_attn_kwargs

    on_cpu = given.device.type == "cpu"
    model = given.model(attn_implementation="sdpa")
    if not on_cpu:
        patch_fsdp_for_tree_training()
        # Named after loading: transformers would look for the package flash-attn, which the patch replaces.
        model.config._attn_implementation = "flash_attention_2"
    # AReaL has one budget for all tries; the largest group's unique tokens, rounded up to its blocks, pad least.
    budget = -(-int(given.unique_G.max()) // 128) * 128

    def work() -> int:
        tokens = 0
        for members in given.members():
            ids = torch.from_numpy(given.tokens_BL[members])
            data = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            for batch in build_packed_tree_batch(data, MicroBatchSpec(max_tokens_per_mb=budget)).mbs:
                trie = batch["trie_node"]
                inputs = {name: batch[name].view(1, -1).to(given.device) for name in ("input_ids", "position_ids")}
                masks = build_tree_attn_kwargs(trie, budget, given.device, dense_mask=on_cpu)
                if on_cpu:
                    masks = {"attention_mask": masks["attention_mask"].view(1, 1, budget, budget)}
                logits = model(**inputs, **masks, use_cache=False).logits[0]
                found = _gather_packed_tree_logprobs(logits, trie, inputs["input_ids"])
                # A row's last entry is the log-prob of what the trie begins with.
                parts = [given.part(int(members[one]), row_log_probs[:-1]) for one, row_log_probs in found.items()]
                torch.stack(parts).sum().backward()
                tokens += budget
        return tokens

    return model, work


def zorro(given: Given) -> tuple[Any, Work]:
    """Arctic Platform's prompt deduplication, patched in as its DeepSpeed worker does; a group at a time."""
    from importlib.util import find_spec
    from types import ModuleType

    # These two packages import the rollout server, hence vLLM, which training does not need.
    root = find_spec("arctic_platform")
    assert root is not None and root.submodule_search_locations is not None
    for name in ("arctic_platform.rl", "arctic_platform.rl.utils"):
        package = ModuleType(name)
        package.__path__ = [str(Path(next(iter(root.submodule_search_locations)), *name.split(".")[1:]))]
        sys.modules[name] = package
    from arctic_platform.rl.zorro_train.qwen_model_patcher import Qwen3ModelOncePatcher

    if given.device.type == "cuda":  # it asks for the rank
        torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = given.model(attn_implementation="sdpa")
    ALL_ATTENTION_FUNCTIONS.register("flash_attention_2", _in_flash_attention_2)
    model.config._attn_implementation = "flash_attention_2"  # after loading, as for AReaL
    response = given.length - given.prompt
    patcher = Qwen3ModelOncePatcher(
        model,
        response_len=response,
        max_token_len=given.tokens_BL.size,
        rollout_n=int((given.groups_B == 0).sum()),
        temperature=1,
        logits_optimization="none" if given.device.type == "cpu" else "memory",
        world_size=1,
        use_unpad=True,
    )
    patcher.patch_forward()

    def work() -> int:
        tokens = 0
        for members in given.members():
            ids = torch.from_numpy(given.tokens_BL[members]).to(given.device)
            positions = torch.arange(given.length, device=given.device).expand_as(ids)
            outputs = model(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids), use_cache=False)
            advantages = given.advantages_B[members].to(given.device)
            loss = -(advantages[:, None] * outputs.logprobs.view(len(members), -1).float()).sum()
            (loss / given.num_trained).backward()
            tokens += given.prompt + len(members) * response
        return tokens

    return model, work


RIVALS: dict[str, Callable[[Given], tuple[Any, Work]]] = {
    "truth": rows_alone,
    "rows": rows_alone,
    "tree_rl": tree_rl,
    "trl": trl,
    "areal": areal,
    "zorro": zorro,
}


def play(name: str, folder: Path, device: str, repeats: int) -> None:
    """In a rival's process: warm up, measure, leave `NAME.safetensors`, print the figures as JSON."""
    given = Given(folder, device)
    if name == "truth":
        given.dtype = torch.float32
    model, work = RIVALS[name](given)
    work()
    gradients = {key: value.grad.float().cpu() for key, value in model.named_parameters() if value.grad is not None}
    save_file(gradients, folder / f"{name}.safetensors")
    seconds, tokens = [], 0
    on_gpu = given.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats):
        model.zero_grad()
        start = time.perf_counter()
        tokens = work()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    print(json.dumps({"seconds": seconds, "tokens": tokens, "peak_gib": peak / 2**30, "torch": torch.__version__}))


def write_rows(folder: Path, arguments: argparse.Namespace, por: float, shape: str) -> int:
    """Write `rows.npz` and, once, the model; returns the unique tokens."""
    from tree_rl.benchmark.batch import agent_batch
    from tree_rl.cost.model_sizes import MODEL_SIZES
    from tree_rl.tree import Forest

    size = MODEL_SIZES[arguments.model].with_layers(arguments.layers)
    if not (folder / "model").exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**size.config)).save_pretrained(folder / "model")
    count, length, groups = arguments.rows, arguments.row_tokens, arguments.groups
    batch = agent_batch(
        por=0.0 if shape == "prompt" else por,
        num_rows=count,
        row_tokens=length,
        num_groups=groups,
        trained_share=1.0,
        vocab=size.shape.vocab,
    )
    tokens_BL = np.stack(batch.rows)
    groups_B = np.repeat(np.arange(groups), count)
    shared = round(por * length * count / (count - 1))
    if shape == "prompt":
        for group in range(groups):
            tokens_BL[groups_B == group, :shared] = tokens_BL[group * count, :shared]
    grouped_GBL = tokens_BL.reshape(groups, count, length)
    equal_L = (grouped_GBL == grouped_GBL[:, :1]).all(axis=(0, 1))
    unique = [Forest.from_rows(list(rows_BL)).num_unique for rows_BL in grouped_GBL]
    np.savez(
        folder / "rows.npz",
        tokens_BL=tokens_BL,
        groups_B=groups_B,
        unique_G=unique,
        prompt=max(1, int(np.argmin(equal_L))),
        advantages_B=batch.advantage_B,
    )
    return sum(unique)


def measure(name: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a rival's process; its figures, or what it said last."""
    python = dict(one.split("=", 1) for one in arguments.python).get(name, sys.executable)
    site = dict(one.split("=", 1) for one in arguments.site).get(name, "")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([site, os.environ.get("PYTHONPATH", "")]).strip(":")}
    repeats = 0 if name == "truth" else arguments.repeats
    command = [python, __file__, str(folder), "--play", name, "--device", arguments.device, "--repeats", str(repeats)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"note": " ".join(done.stderr.strip().splitlines()[-1:])[-300:]}
    return {"note": "", **json.loads(done.stdout.strip().splitlines()[-1])}


def compare(folder: Path, arguments: argparse.Namespace, por: float, shape: str) -> Iterator[dict[str, Any]]:
    """All rivals on one batch; a row of the table each."""
    from tree_rl.benchmark.gradient_errors import GradientErrors, relative_error

    unique = write_rows(folder, arguments, por, shape)
    truth_said = measure("truth", folder, arguments)["note"]
    if truth_said:
        raise SystemExit(f"rows alone in float32 failed: {truth_said}")
    truth = load_file(folder / "truth.safetensors")
    of_rows = 0.0
    for name in ["rows", *(name for name in arguments.rivals if name != "rows")]:
        found = measure(name, folder, arguments)
        row: dict[str, Any] = {"rival": name, "shape": shape, "por": por, "unique_tokens": unique}
        if not found["note"]:
            got = load_file(folder / f"{name}.safetensors")
            error = relative_error([got.get(key, torch.zeros(())) for key in truth], list(truth.values()))
            of_rows = error if name == "rows" else of_rows
            correct = error <= GradientErrors(tree=error, rows=of_rows).limit
            row |= {"error": f"{error:.2e}", "correct": correct, "tokens_run": found["tokens"]}
            row |= {"seconds": f"{np.median(found['seconds']):.3f}", "spread": f"{np.ptp(found['seconds']):.3f}"}
            row |= {"peak_gib": f"{found['peak_gib']:.2f}"}
        row["note"] = found["note"]
        print(*row.values(), flush=True)
        yield row


def main() -> None:
    """Play one rival, or all of them on every batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--play", choices=list(RIVALS), help=argparse.SUPPRESS)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--por", type=float, nargs="+", default=[0.25, 0.5, 0.9])
    parser.add_argument("--shape", nargs="+", default=["agents", "prompt"], choices=["agents", "prompt"])
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--rows", type=int, default=16, help="of a group")
    parser.add_argument("--row-tokens", type=int, default=256)
    parser.add_argument("--rivals", nargs="+", default=list(RIVALS)[1:], choices=list(RIVALS)[1:])
    parser.add_argument("--python", nargs="*", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--site", nargs="*", default=[], metavar="NAME=FOLDERS")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.play:
        play(arguments.play, arguments.output, arguments.device, arguments.repeats)
        return
    from tree_rl.benchmark.provenance import PACKAGES, provenance
    from tree_rl.benchmark.results import collect_rows

    about: dict[str, Any] = {name: getattr(arguments, name) for name in ("model", "groups", "rows", "row_tokens")}
    about |= provenance(packages=[*PACKAGES, "numpy"])
    with tempfile.TemporaryDirectory() as folder:
        batches = itertools.product(arguments.shape, arguments.por)
        rows = (row for shape, por in batches for row in compare(Path(folder), arguments, por, shape))
        collect_rows(rows, about, arguments.output)


if __name__ == "__main__":
    main()
