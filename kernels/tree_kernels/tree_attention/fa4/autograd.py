"""Tree attention with flash-attn-4's CuTe kernels: Hopper, bf16 and fp16, not deterministic.

Invisible blocks are skipped, and fully visible blocks need no mask. If little or nothing is shared, FA4's causal
kernels run over the rows instead (`leaf_rows`). The compiled kernels work for every length.
Legend: N unique tokens, P past tokens, M = P + N keys, H query heads, K key heads, D head size of queries and keys, E
of values.
"""

import functools
import hashlib
from base64 import urlsafe_b64encode
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tree_kernels.tree_attention.fa4.fa4_plan import FORWARD_BLOCKS, VALUE_SIZES, Fa4Plan, fa4_plan, rows_worth_copying
from tree_kernels.tree_attention.fa4.leaf_rows import LeafRows, along_paths
from tree_kernels.tree_attention.score_rule import ScoreRule
from tree_kernels.tree_layout import TreeLayout
from tree_kernels.triton_support import HOPPER

PACKAGE = "flash-attn-4"
VERSIONS = {"4.0.0b36": (64, 128, 192, 256), "4.0.0b19": (64, 128)}
"""Tested versions and the head sizes that pass: the newest, and the one that installs together with vLLM 0.24. Other
versions may lack functions that we call."""
ENTRY = "flash_attn/cute/interface.py"
"""Flash-attn 2's source distribution has this file too and may have overwritten it."""
DTYPES = (torch.bfloat16, torch.float16)


def fa4_unavailable_reason(
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    *,
    value_size: int | None = None,
    softcap: float | None = None,
    needs_lse: bool = False,
    deterministic: bool = False,
) -> str | None:
    """Why flash-attn-4 cannot run, or None if it can."""
    if device.type != "cuda":
        return f"{PACKAGE} needs a CUDA device, received {device}"
    if dtype not in DTYPES:
        return f"{PACKAGE} needs one of {DTYPES}, received {dtype}"
    if head_size not in FORWARD_BLOCKS:
        return f"{PACKAGE} needs a head size of {tuple(FORWARD_BLOCKS)}, received {head_size}"
    if (value_size or head_size) > VALUE_SIZES[head_size]:
        sizes = f"head size of {head_size}, received {value_size or head_size}"
        return f"{PACKAGE} needs a value size of at most {VALUE_SIZES[head_size]} with a {sizes}"
    if deterministic:
        return f"{PACKAGE} sums dQ in the order in which blocks finish, received deterministic=True"
    if softcap is not None:
        return f"{PACKAGE} approximates the soft cap's tanh to 11 bits, received softcap={softcap}"
    if needs_lse:
        return f"{PACKAGE}: gradients through the log-sum-exp are unproven, received sinks or return_lse=True"
    return package_reason() or version_reason(head_size) or _device_reason(device)


def fa4_attention_of_tree(
    q_NHD: torch.Tensor,
    k_MKD: torch.Tensor,
    v_MKD: torch.Tensor,
    layout: TreeLayout,
    rule: ScoreRule,
) -> torch.Tensor:
    """Output [N, H, E] in q's dtype; keys and values [P + N, K, D or E] have the past first; `rule` has no softcap.

    Gradients accumulate in float32, except that FA4 rounds those of copied keys and values row by row, and those of key
    heads that several query heads share query head by query head where D and E differ.
    """
    num_tokens, heads, head_size = q_NHD.shape
    value_size = v_MKD.shape[-1]
    if num_tokens == 0:
        return q_NHD.new_zeros(0, heads, value_size) + q_NHD.sum() * 0
    missing = VALUE_SIZES[head_size] - value_size
    if missing:
        padded = torch.nn.functional.pad(v_MKD, (0, missing))
        return fa4_attention_of_tree(q_NHD, k_MKD, padded, layout, rule)[..., :value_size]
    if value_size != head_size and k_MKD.shape[1] != heads:
        # The backward of FA4 shares key heads only where all sizes are equal.
        k_MKD, v_MKD = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k_MKD, v_MKD))
    rows = rows_worth_copying(layout, rule.window)
    if rows is not None:
        if rows.copies is not None:
            k_MKD, v_MKD = (along_paths(t, rows.copies) for t in (k_MKD, v_MKD))
        out_of_rows_NHD: torch.Tensor = _Fa4Attention.apply(q_NHD, k_MKD, v_MKD, rows, rule.scale)
        return out_of_rows_NHD
    plan = fa4_plan(layout, head_size=head_size, heads=heads, window=rule.window)
    inputs = [_padded(t, plan.padding) for t in (q_NHD, k_MKD, v_MKD)]
    out_NHD: torch.Tensor = _Fa4Attention.apply(*inputs, plan, rule.scale)
    # Sliced only if there is padding, because the gradient of a slice is a copy.
    return out_NHD[:num_tokens] if plan.padding else out_NHD


class _Fa4Attention(torch.autograd.Function):
    """Forward and backward kernels of one plan, or of rows of leaves."""

    @staticmethod
    def forward(
        ctx: Any, q_NHD: torch.Tensor, k_MKD: torch.Tensor, v_MKD: torch.Tensor, plan: Fa4Plan | LeafRows, scale: float
    ) -> torch.Tensor:
        # Imported late, because the package is optional and takes seconds to import.
        from tree_kernels.tree_attention.fa4 import calls

        q_NHD, k_MKD, v_MKD = (_materialised(t) for t in (q_NHD, k_MKD, v_MKD))
        out_NHD, lse_HN = calls.forward(q_NHD, k_MKD, v_MKD, plan, scale)
        ctx.save_for_backward(q_NHD, k_MKD, v_MKD, out_NHD, lse_HN)
        ctx.plan, ctx.scale = plan, scale
        return out_NHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out_NHD: torch.Tensor) -> tuple[Any, ...]:
        from tree_kernels.tree_attention.fa4 import calls

        q_NHD, k_MKD, v_MKD, out_NHD, lse_HN = ctx.saved_tensors
        grad_out = grad_out_NHD.contiguous()
        grads = calls.backward(q_NHD, k_MKD, v_MKD, out_NHD, lse_HN, grad_out, ctx.plan, ctx.scale)
        return (*grads, None, None)


def _padded(t: torch.Tensor, count: int) -> torch.Tensor:
    """`t` with `count` rows of zeros appended."""
    return t if count == 0 else torch.nn.functional.pad(t, (0, 0, 0, 0, 0, count))


def _materialised(t: torch.Tensor) -> torch.Tensor:
    """`t`, copied if it has a stride of 0, for which FA4 would compile another kernel."""
    return t.contiguous() if 0 in t.stride() else t


@functools.cache
def package_reason() -> str | None:
    """Why the installed package cannot be used, or None if it can."""
    remedy = 'pip install -c constraints/gpu.txt "tree_rl[fa4]"'
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed; {remedy}"
    if package.version not in VERSIONS:
        return f"{PACKAGE}=={' or '.join(VERSIONS)} is needed, found {package.version}; {remedy}"
    found = _imported_entry()
    if found is None or _record_hash(found.read_bytes()) != _recorded(package):
        return (
            f"{PACKAGE} {package.version} is hidden by another package: {found or ENTRY} is not its own file, as after "
            f"an installation of flash-attn 2; pip install --force-reinstall --no-deps {PACKAGE}=={package.version}"
        )
    return None


def version_reason(head_size: int) -> str | None:
    """Why the installed version, one of VERSIONS, does not support a head size, or None if it does."""
    version = metadata.version(PACKAGE)
    if head_size in VERSIONS[version]:
        return None
    needed = next(newer for newer, sizes in VERSIONS.items() if head_size in sizes)
    return f"{PACKAGE} {version} fails with a head size of {head_size}, which {needed} runs (constraints/fa4.txt)"


def _imported_entry() -> Path | None:
    """The file that `import flash_attn.cute.interface` would load, without importing anything."""
    parent = find_spec("flash_attn")
    folders = parent.submodule_search_locations if parent is not None else None
    places = [Path(folder).parent / ENTRY for folder in folders or ()]
    return next((place for place in places if place.is_file()), None)


def _recorded(package: metadata.Distribution) -> str | None:
    """The hash of ENTRY in the package's RECORD."""
    return next((file.hash.value for file in package.files or () if str(file) == ENTRY and file.hash), None)


def _record_hash(content: bytes) -> str:
    """SHA-256 in the format of a wheel's RECORD."""
    return urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


@functools.cache
def _device_reason(device: torch.device) -> str | None:
    if not torch.cuda.is_available():
        return f"{PACKAGE} needs a CUDA device, and torch sees none"
    major, minor = torch.cuda.get_device_capability(device)
    if major == HOPPER:
        return None
    return f"{PACKAGE} is used on Hopper (compute capability 9.x) only, received {major}.{minor}"
