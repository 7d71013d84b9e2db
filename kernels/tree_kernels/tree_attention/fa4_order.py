"""`head_sections` as flash-attn-4 compiles it into the block-sparse backward; imported only where that package is."""

import hashlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cutlass
from cutlass import Int32, cute
from flash_attn.cute import flash_bwd_sm90
from flash_attn.cute.tile_scheduler import SingleTileScheduler, WorkTileInfo

from tree_kernels.tree_attention.head_sections import SECTIONS, tile_at


class SectionScheduler(SingleTileScheduler):
    """One tile per program, as its base; the device starts programs by block, then by head."""

    section: int
    """heads of a section"""

    @classmethod
    def create(cls, params, ctx=None, *, loc=None, ip=None):  # type: ignore[no-untyped-def]
        """As the base."""
        return cls(params, cute.arch.block_idx())

    def get_current_work(self, *, loc=None, ip=None):  # type: ignore[no-untyped-def]
        """The tile of this program."""
        column, row, batch = self._blk_coord
        blocks, heads = self.params.num_block, self.params.num_head
        place = column + blocks * row
        block, head = tile_at(place, blocks=blocks, heads=heads, section=self.section, smaller=cutlass.min)
        return WorkTileInfo((block, head, batch, Int32(0)), self._is_first_block)

    def __new_from_mlir_values__(self, values):  # type: ignore[no-untyped-def]
        base = super().__new_from_mlir_values__(values)
        scheduler = type(self)(base.params, base._blk_coord, loc=self._loc)
        scheduler._is_first_block = base._is_first_block
        return scheduler


SCHEDULERS = {
    heads: type(f"SectionsOf{heads}", (SectionScheduler,), {"section": heads, "__doc__": SectionScheduler.__doc__})
    for heads in SECTIONS
}
_SOURCE = inspect.getsource(SectionScheduler) + inspect.getsource(tile_at)


@contextmanager
def heads_in_sections(section: int, mask: Any) -> Iterator[None]:
    """Backward kernels with `mask` that are compiled inside take their tiles in sections of so many heads.

    flash-attn-4 offers no such choice, so its scheduler is exchanged while it compiles, and the order becomes part of
    the mask's name, by which compiled kernels are kept. Should another thread compile a kernel of its own meanwhile,
    that one computes the same in another order.
    """
    own, name = flash_bwd_sm90.SingleTileScheduler, mask.__cute_hash__
    flash_bwd_sm90.SingleTileScheduler = SCHEDULERS[section]
    mask.__cute_hash__ = hashlib.sha256(f"{name} {section} {_SOURCE}".encode()).hexdigest()
    try:
        yield
    finally:
        flash_bwd_sm90.SingleTileScheduler, mask.__cute_hash__ = own, name
