"""Environments in which agents act, and the tests that score them."""

from tree_rl.rollout.environments.environment import Environment, Outcome, ToolCall
from tree_rl.rollout.environments.shell_environment import ShellEnvironment

__all__ = ["Environment", "Outcome", "ShellEnvironment", "ToolCall"]
