"""Small forests for the tests, as parent vectors in DFS order; deliberately naive."""

import random
from collections.abc import Sequence
from itertools import pairwise

import torch
from hypothesis import strategies as st

from tree_kernels import TreeLayout


def subtree_end_of(parent: list[int]) -> torch.Tensor:
    """int32 [N] from parents in DFS order, by pushing each token's end up to its ancestors."""
    end = [token + 1 for token in range(len(parent))]
    for token in reversed(range(len(parent))):
        if parent[token] >= 0:
            end[parent[token]] = max(end[parent[token]], end[token])
    return torch.tensor(end, dtype=torch.int32)


def layout_of(parent: list[int], past: int = 0) -> TreeLayout:
    return TreeLayout.from_subtree_end(subtree_end_of(parent), past_length=past)


def chain(size: int) -> list[int]:
    return list(range(-1, size - 1))


def hang(parent: list[int], joint: int, *sizes: int) -> list[int]:
    """These parents, and behind them chains that hang from a token, or start trees at -1."""
    parent = list(parent)
    for size in sizes:
        parent += [joint, *range(len(parent), len(parent) + size - 1)]
    return parent


def rows(*sizes: int) -> list[int]:
    """Chains side by side."""
    return hang([], -1, *sizes)


def fork(prefix: int, tails: Sequence[int]) -> list[int]:
    """A prefix, and tails that hang from its last token."""
    return hang(chain(prefix), prefix - 1, *tails)


def rows_below(shared: int, *sizes: int) -> list[int]:
    """A chain of `shared` tokens, chains of `sizes` below its last, then a lone row of 300."""
    return hang(fork(shared, sizes), -1, 300)


def star(size: int) -> list[int]:
    """One root, every other token its child."""
    return [-1] + [0] * (size - 1) if size else []


def comb(size: int) -> list[int]:
    """A spine on which every token first grows a tooth of one token."""
    spine = [-1, *range(0, size, 2)]
    return [token for pair in pairwise(spine) for token in pair][:size]


def trunk_and_stubs(size: int) -> list[int]:
    """A trunk over half of the tokens, then stubs of 5 tokens off ever shallower trunk tokens."""
    trunk = max(1, size // 2)
    parent, joint = chain(trunk), trunk - 1
    while len(parent) < size:
        parent, joint = hang(parent, joint, 5), max(0, joint - 7)
    return parent[:size]


def random_trie(size: int, seed: int, *, branching: float = 0.1, roots: int = 1) -> list[int]:
    """Random walk down with jumps back to an ancestor; `roots` trees of about equal size."""
    chance = random.Random(seed)
    parent: list[int] = []
    path: list[int] = []
    for token in range(size):
        if token in {size * tree // roots for tree in range(roots)}:
            path = []
        elif path and chance.random() < branching:
            del path[chance.randint(1, len(path)) :]
        parent.append(path[-1] if path else -1)
        path.append(token)
    return parent


@st.composite
def tries(draw: st.DrawFn, most: int, *, least: int = 1) -> list[int]:
    """Random forests of up to four trees, from chains to bushes."""
    size, seed = draw(st.integers(least, most)), draw(st.integers(0, 10**6))
    branching, roots = draw(st.sampled_from([0.0, 0.05, 0.3, 0.7])), draw(st.integers(1, 4))
    return random_trie(size, seed, branching=branching, roots=roots)


def paths_of(parent: list[int]) -> list[list[int]]:
    """Tokens on each root-to-leaf path."""
    inner = set(parent)
    paths = []
    for leaf in range(len(parent)):
        if leaf in inner:
            continue
        path = [leaf]
        while parent[path[-1]] >= 0:
            path.append(parent[path[-1]])
        paths.append(path[::-1])
    return paths


SHAPES = {
    "chain": chain,
    "star": star,
    "comb": comb,
    "trunk_and_stubs": trunk_and_stubs,
    "random_trie": lambda size: random_trie(size, seed=size),
    "bushy_trie": lambda size: random_trie(size, seed=size, branching=0.5),
    "forest": lambda size: random_trie(size, seed=size, roots=3),
}
