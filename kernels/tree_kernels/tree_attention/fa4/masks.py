"""Mask functions that flash-attn-4 compiles into its kernels; imported only if that package is installed.

Vectors are passed as addresses, not as FA4's aux tensors, for which its backward divides every index of every element
by the lengths. Loads are marked constant, so a thread reads each key once per block.
"""

import hashlib
import inspect

import cutlass
from cutlass import Int32, Int64, cute
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op
from flash_attn.cute.utils import scalar_to_ssa

from tree_kernels.tree_attention.fa4.head_sections import SECTION, tile_at
from tree_kernels.tree_attention.fa4.scheduler import SectionScheduler


@dsl_user_op
def _load_int32(address: Int64, index: Int32, *, loc=None, ip=None) -> Int32:  # type: ignore[no-untyped-def]
    """The int32 at `index` of a vector that no kernel writes."""
    place = Int64(address) + Int64(index) * 4
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [place.ir_value(loc=loc, ip=ip)],
            "ld.global.nc.b32 $0, [$1];",
            "=r,l",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


@cute.jit
def sees_ancestors(batch, head, query, key, lengths, tensors, scalars):  # type: ignore[no-untyped-def]
    """key <= query < end[key], with the query in key coordinates; scalars: the address of `key_ends`."""
    end = scalar_to_ssa(_load_int32(scalars[0], key[0]), cutlass.Int32)
    own_key = query + scalar_to_ssa(lengths.seqlen_k - lengths.seqlen_q, cutlass.Int32)
    return (key <= own_key) & (own_key < end)


@cute.jit
def sees_near_ancestors(batch, head, query, key, lengths, tensors, scalars):  # type: ignore[no-untyped-def]
    """As `sees_ancestors`, and the query is at most window - 1 deeper than the key.

    Scalars: addresses of `key_ends`, `key_depths` and the queries' depths, and the window.
    """
    end = scalar_to_ssa(_load_int32(scalars[0], key[0]), cutlass.Int32)
    key_depth = scalar_to_ssa(_load_int32(scalars[1], key[0]), cutlass.Int32)
    depth = scalar_to_ssa(_load_int32(scalars[2], query[0]), cutlass.Int32)
    own_key = query + scalar_to_ssa(lengths.seqlen_k - lengths.seqlen_q, cutlass.Int32)
    near = depth - key_depth < scalar_to_ssa(scalars[3], cutlass.Int32)
    return (key <= own_key) & (own_key < end) & near


def _fix_hash(mask: object) -> None:
    """FA4 caches kernels by the source of the mask; add the source of our other code that is compiled with it."""
    parts = (_load_int32, mask, SectionScheduler, tile_at)
    source = str(SECTION) + "".join(inspect.getsource(part) for part in parts)  # type: ignore[arg-type]
    mask.__cute_hash__ = hashlib.sha256(source.encode()).hexdigest()  # type: ignore[attr-defined]


_fix_hash(sees_ancestors)
_fix_hash(sees_near_ancestors)
