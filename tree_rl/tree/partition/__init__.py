"""A forest beyond memory cut into connected partitions (paper, section Redundancy-Free Tree Partitioning)."""

from tree_rl.tree.partition.layout import Cut, Partition, PartitionPlan
from tree_rl.tree.partition.plan import plan_partitions

__all__ = ["Cut", "Partition", "PartitionPlan", "plan_partitions"]
