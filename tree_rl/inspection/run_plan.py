"""How the engine would run the groups of a file within a token budget: whole, packed together, or in partitions."""

from dataclasses import dataclass

from tree_rl.cost.memory.choice import Chooser, MemoryChoice
from tree_rl.inspection.overlap_by_group import forest_of, rows_by_group
from tree_rl.inspection.row import Row
from tree_rl.tree.attention_blocks import AttentionBlocks, count_attention_blocks
from tree_rl.tree.packing import fill_bins, pack_groups
from tree_rl.tree.partition import PartitionPlan, plan_partitions


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRun:
    """How one group runs."""

    name: str
    """The group's value in the file."""
    num_rows: int
    unique_tokens: int
    """Tokens that it computes: each once, whole or partitioned."""
    partitions: PartitionPlan | None
    """Its partitions; None if the group runs in one forward."""
    choice: MemoryChoice | None
    """How a group beyond the budget runs, with its predicted peak; None within the budget, or if no model is named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """Forwards of the groups as trees, and of the same rows without sharing."""

    max_tokens: int
    """Token budget of one forward."""
    groups: tuple[GroupRun, ...]
    """All groups, in the order of the file."""
    whole: tuple[int, ...]
    """Unique tokens of each forward of the groups within the budget."""
    flat: tuple[int, ...]
    """Tokens of each forward of the rows within the budget without sharing."""
    oversized_rows: tuple[Row, ...]
    """Rows that are longer than the budget; without trees each runs in a forward beyond it."""
    attention: AttentionBlocks
    """Blocks that attention visits in all forwards over trees."""

    @property
    def beyond(self) -> list[GroupRun]:
        """Groups beyond the budget that still run in one forward."""
        return [group for group in self.groups if group.choice is not None and group.partitions is None]

    @property
    def partitioned(self) -> list[PartitionPlan]:
        """Partition plans of the groups that run in partitions."""
        return [group.partitions for group in self.groups if group.partitions is not None]


def plan_run(rows: list[Row], max_tokens: int, chooser: Chooser | None = None) -> RunPlan:
    """Plan every group as the engine does with `tree.mode: tree` and `tree.scope: uid`.

    A forward has at most `max_tokens` unique tokens; `chooser` says how larger groups run, None: in partitions.
    """
    groups, whole, alone = [], [], []
    for name, members in rows_by_group(row.group for row in rows).items():
        part = forest_of([rows[index] for index in members])
        fits, choice, plan = part.num_unique <= max_tokens, None, None
        if fits:
            whole.append(members)
        elif chooser is None:
            plan = plan_partitions(part, max_tokens)
        else:
            choice = chooser.choose(part, max_tokens)
            plan = choice.plan
        alone += [] if fits or plan else [part]
        unique = part.num_unique
        groups.append(GroupRun(name=name, num_rows=len(members), unique_tokens=unique, partitions=plan, choice=choice))
    lengths = [len(row.token_ids) for row in rows if len(row.token_ids) <= max_tokens]
    together = pack_groups(forest_of(rows), whole, max_tokens=max_tokens)
    packed = [forest_of([rows[index] for index in members]) for members in together]
    counts = [count_attention_blocks(one.subtree_end) for one in (*packed, *alone)]
    for one in (one for group in groups if group.partitions for one in group.partitions.partitions):
        counts.append(count_attention_blocks(one.local_subtree_end, past_length=one.past_length))
    return RunPlan(
        max_tokens=max_tokens,
        groups=tuple(groups),
        whole=tuple(one.num_unique for one in packed),
        flat=tuple(sum(lengths[index] for index in content) for content in fill_bins(lengths, max_tokens)),
        oversized_rows=tuple(row for row in rows if len(row.token_ids) > max_tokens),
        attention=sum(counts, start=AttentionBlocks(full=0, partial=0)),
    )
