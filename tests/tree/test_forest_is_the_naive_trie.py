"""Forest against a trie of nested dicts, the slow and obvious definition. Legend: N unique tokens, B rows."""

from operator import attrgetter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tree_rl.tree import Forest

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), max_size=14)
KEYS = st.sampled_from(["none", "row", "token"])


class Node:
    """One token of the naive trie."""

    def __init__(self, parent: "Node | None", token: int, position: int) -> None:
        self.parent, self.token, self.position = parent, token, position
        self.children: dict[object, Node] = {}
        self.rows: list[int] = []
        self.ends = False

    def weight(self) -> int:
        return 1 + sum(child.weight() for child in self.children.values())

    def heaviest_first(self) -> "list[Node]":
        return sorted(self.children.values(), key=lambda child: (-child.weight(), child.rows[0]))


def naive_trie(rows: list[list[int]], symbols: list[list[object]]) -> tuple[dict[Node, int], list[list[int]]]:
    """Nodes and their places in depth-first order, heaviest subtree first; and each row's path as places."""
    root = Node(None, -1, -1)
    paths = []
    for row, (tokens, keys) in enumerate(zip(rows, symbols, strict=True)):
        node, path = root, []
        for position, (token, key) in enumerate(zip(tokens, keys, strict=True)):
            node = node.children.setdefault((token, key), Node(node, token, position))
            node.rows.append(row)
            path.append(node)
        node.ends = True
        paths.append(path)
    number: dict[Node, int] = {}

    def visit(node: Node) -> None:
        for child in node.heaviest_first():
            number[child] = len(number)
            visit(child)

    visit(root)
    return number, [[number[node] for node in path] for path in paths]


def keyed(rows: list[list[int]], kind: str, seed: int) -> tuple[object, list[list[object]]]:
    """A merge key of the given kind, and the symbols that it makes of each row's tokens."""
    draw = np.random.default_rng(seed)
    if kind == "none":
        return None, [[None] * len(row) for row in rows]
    if kind == "row":
        names = [("base", "adapter")[draw.integers(2)] for _ in rows]
        return names, [[name] * len(row) for row, name in zip(rows, names, strict=True)]
    hashes = [draw.integers(-1, 1, len(row)) for row in rows]
    return hashes, [hash_row.tolist() for hash_row in hashes]


@given(rows=ROWS, kind=KEYS, seed=st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_arrays_visible_tokens_and_the_order_of_rows_are_those_of_the_naive_trie(rows, kind, seed):
    merge_key, symbols = keyed(rows, kind, seed)
    forest = Forest.from_rows(rows, merge_key=merge_key)
    number, paths = naive_trie(rows, symbols)
    order = list(number)
    assert forest.input_ids.tolist() == [node.token for node in order]
    assert forest.parent.tolist() == [number.get(node.parent, -1) for node in order]
    assert forest.position.tolist() == [node.position for node in order]
    assert forest.path_count.tolist() == [len(node.rows) for node in order]
    assert [row.tolist() for row in forest.row_index] == paths
    starts = [
        index
        for index, node in enumerate(order)
        if node.position == 0 or node.parent.ends or len(node.parent.children) > 1
    ]
    assert forest.segments.start.tolist() == starts
    assert forest.segments.end.tolist() == [*starts, len(order)][1:]
    above = [number.get(order[start].parent, -1) for start in starts]
    assert forest.segments.parent.tolist() == (np.searchsorted(starts, above, "right") - 1).tolist()
    assert [array.dtype for array in (forest.input_ids, forest.parent, forest.row_index.values)] == [np.int32] * 3
    # A token sees exactly its ancestors.
    index = np.arange(forest.num_unique)
    visible = (index[None, :] <= index[:, None]) & (index[:, None] < forest.subtree_end[None, :])
    expected = np.zeros_like(visible)
    for path in paths:
        for depth, token in enumerate(path):
            expected[token, path[: depth + 1]] = True
    np.testing.assert_array_equal(visible, expected)
    # Neighbours in the order of rows share what their paths share.
    found = forest.row_order
    assert sorted(found.rows) == list(range(len(rows))) and found.num_unique == forest.num_unique
    for rank in range(1, len(rows)):
        assert found.shared[rank] == len(set(paths[found.rows[rank - 1]]) & set(paths[found.rows[rank]]))
    subset = np.flatnonzero(np.random.default_rng(seed).integers(0, 2, len(rows)))
    assert found.select(subset).num_unique == len({token for row in subset for token in paths[row]})


@given(rows=ROWS, kind=KEYS, seed=st.integers(0, 999))
@settings(max_examples=80, deadline=None)
def test_selected_rows_are_the_forest_of_these_rows(rows, kind, seed):
    merge_key, _ = keyed(rows, kind, seed)
    draw = np.random.default_rng(seed)
    picked = draw.permutation(len(rows))[: draw.integers(0, len(rows) + 1)]
    selected = Forest.from_rows(rows, merge_key=merge_key).select_rows(picked)
    key = None if merge_key is None else [merge_key[row] for row in picked]
    direct = Forest.from_rows([rows[row] for row in picked], merge_key=key)
    arrays = ("input_ids", "parent", "position", "subtree_end", "path_count")
    for name in (*arrays, "row_index.values", "row_index.offsets", "segments.parent"):
        np.testing.assert_array_equal(attrgetter(name)(selected), attrgetter(name)(direct), err_msg=name)


@given(rows=ROWS)
@settings(max_examples=60, deadline=None)
def test_rows_of_a_token_tokens_of_a_row_and_their_trees_are_found(rows):
    forest = Forest.from_rows(rows)
    for token in range(forest.num_unique):
        expected = [row for row, path in enumerate(forest.row_index) if token in path]
        assert forest.rows_through(token).tolist() == expected
    assert [forest.row_tokens(row).tolist() for row in range(len(rows))] == rows
    roots = np.flatnonzero(forest.parent < 0)
    assert forest.num_trees == len(roots) == len({row[0] for row in rows})
    tree_of_token = np.searchsorted(roots, np.arange(forest.num_unique), "right") - 1
    for row, path in enumerate(forest.row_index):
        assert set(tree_of_token[path]) == {forest.tree_of_row[row]}
    np.testing.assert_array_equal(np.bincount(forest.tree_of_row, minlength=len(roots)), forest.rows_per_tree)
