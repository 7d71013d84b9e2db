"""Lets flash-attn-4 compile `head_sections` into the block-sparse backward; imported only if it is installed."""

from collections.abc import Iterator
from contextlib import contextmanager

import cutlass
from cutlass import Int32, cute
from flash_attn.cute import flash_bwd_sm90
from flash_attn.cute.tile_scheduler import SingleTileScheduler, WorkTileInfo

from tree_kernels.tree_attention.fa4.head_sections import tile_at


class SectionScheduler(SingleTileScheduler):
    """One tile per program, like its base class; the device starts programs by block, then by head."""

    @staticmethod
    def create(params, ctx=None, *, loc=None, ip=None):  # type: ignore[no-untyped-def]
        """Create the scheduler of this program."""
        return SectionScheduler(params, cute.arch.block_idx())

    def get_current_work(self, *, loc=None, ip=None):  # type: ignore[no-untyped-def]
        """The tile of this program; FA4 calls this."""
        column, row, batch = self._blk_coord
        blocks, heads = self.params.num_block, self.params.num_head
        block, head = tile_at(column + blocks * row, blocks=blocks, heads=heads, smaller=cutlass.min)
        return WorkTileInfo((block, head, batch, Int32(0)), self._is_first_block)

    def __new_from_mlir_values__(self, values):  # type: ignore[no-untyped-def]
        base = super().__new_from_mlir_values__(values)
        scheduler = SectionScheduler(base.params, base._blk_coord, loc=self._loc)
        scheduler._is_first_block = base._is_first_block
        return scheduler


@contextmanager
def heads_in_sections() -> Iterator[None]:
    """Backward kernels that are compiled in this context take their tiles in sections.

    flash-attn-4 has no option for this, so its scheduler is replaced while it compiles. A kernel that another thread
    compiles meanwhile computes the same in another order.
    """
    stock = flash_bwd_sm90.SingleTileScheduler
    flash_bwd_sm90.SingleTileScheduler = SectionScheduler
    try:
        yield
    finally:
        flash_bwd_sm90.SingleTileScheduler = stock
