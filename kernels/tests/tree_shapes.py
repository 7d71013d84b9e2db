"""Small forests for the tests, as parent vectors in DFS order; deliberately naive."""

import random

import torch
from hypothesis import strategies as st


def subtree_end_of(parent: list[int]) -> torch.Tensor:
    """int32 [N] from parents in DFS order, by pushing each token's end up to its ancestors."""
    end = [token + 1 for token in range(len(parent))]
    for token in reversed(range(len(parent))):
        if parent[token] >= 0:
            end[parent[token]] = max(end[parent[token]], end[token])
    return torch.tensor(end, dtype=torch.int32)


def chain(size: int) -> list[int]:
    return list(range(-1, size - 1))


def rows(*sizes: int) -> list[int]:
    """Chains side by side."""
    parent: list[int] = []
    for size in sizes:
        start = len(parent)
        parent += [-1, *range(start, start + size - 1)]
    return parent


def rows_below(shared: int, *sizes: int) -> list[int]:
    """A chain of `shared` tokens, chains of `sizes` below its last, then a lone row of 300."""
    parent = chain(shared)
    for size in sizes:
        start = len(parent)
        parent += [shared - 1, *range(start, start + size - 1)]
    return [*parent, -1, *range(len(parent), len(parent) + 299)]


def star(size: int) -> list[int]:
    """One root, every other token its child."""
    return [-1] + [0] * (size - 1) if size else []


def comb(size: int) -> list[int]:
    """A spine on which every token first grows a tooth of one token."""
    parent: list[int] = []
    spine = -1
    while len(parent) < size:
        parent.append(spine)
        spine = len(parent) - 1
        if len(parent) < size:
            parent.append(spine)
    return parent


def trunk_and_stubs(size: int) -> list[int]:
    """A trunk over half of the tokens, then stubs of 5 tokens off ever shallower trunk tokens."""
    trunk = max(1, size // 2)
    parent = chain(trunk)
    joint = trunk - 1
    while len(parent) < size:
        for step in range(min(5, size - len(parent))):
            parent.append(joint if step == 0 else len(parent) - 1)
        joint = max(0, joint - 7)
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
