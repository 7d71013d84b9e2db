"""Cuts a forest that exceeds memory into connected partitions (paper, section Redundancy-Free Tree Partitioning)."""

from tree_rl.tree.partition.partitions import Cut, Partition, PartitionPlan
from tree_rl.tree.partition.plan_partitions import plan_partitions

__all__ = ["Cut", "Partition", "PartitionPlan", "plan_partitions"]
