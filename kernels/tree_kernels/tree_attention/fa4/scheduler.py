"""`head_sections` as flash-attn-4 compiles it into the block-sparse backward; imported only where that package is."""

from collections.abc import Iterator
from contextlib import contextmanager

import cutlass
from cutlass import Int32, cute
from flash_attn.cute import flash_bwd_sm90
from flash_attn.cute.tile_scheduler import SingleTileScheduler, WorkTileInfo

from tree_kernels.tree_attention.fa4.head_sections import tile_at


class SectionScheduler(SingleTileScheduler):
    """One tile per program, as its base; the device starts programs by block, then by head."""

    @staticmethod
    def create(params, ctx=None, *, loc=None, ip=None):  # type: ignore[no-untyped-def]
        """As the base."""
        return SectionScheduler(params, cute.arch.block_idx())

    def get_current_work(self, *, loc=None, ip=None):  # type: ignore[no-untyped-def]
        """The tile of this program."""
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
    """Backward kernels compiled inside take their tiles in sections.

    flash-attn-4 offers no such choice, so its scheduler is exchanged while it compiles. Should another thread compile a
    kernel of its own meanwhile, that one computes the same in another order.
    """
    own = flash_bwd_sm90.SingleTileScheduler
    flash_bwd_sm90.SingleTileScheduler = SectionScheduler
    try:
        yield
    finally:
        flash_bwd_sm90.SingleTileScheduler = own
