"""Rows of a mini-batch on ranks: each once, no rank slower than with whole groups, near the optimum of CP-SAT."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from tree_rl.cost import CostModel
from tree_rl.cost.balance.cell_layout import LEAST_GAIN, lay_out_cell
from tree_rl.cost.balance.paths import MOST_PATHS, GroupPaths
from tree_rl.tree import Forest
from tree_rl.tree.packing import least_loaded

COST = CostModel(per_token=10.0, per_pair=1.0, per_head_token=5.0)


def group_rows(generator: np.random.Generator, rows: int, *, nested: bool) -> list[np.ndarray]:
    """Rows that leave one another at random depths; `nested` rows continue others or repeat them."""
    made = [generator.integers(0, 3, generator.integers(1, 20))]
    while len(made) < rows:
        base = made[generator.integers(len(made))]
        kept = len(base) if nested and generator.random() < 0.5 else generator.integers(0, len(base) + 1)
        grown = np.concatenate([base[:kept], generator.integers(0, 3, generator.integers(1, 15))])
        made.append(base if nested and generator.random() < 0.2 else grown)
    return made


@st.composite
def cells(draw: st.DrawFn) -> tuple[list[Forest], int]:
    generator = np.random.default_rng(draw(st.integers(0, 10_000)))
    sizes = draw(st.lists(st.integers(1, 9), max_size=6))
    nested = draw(st.booleans())
    return [Forest.from_rows(group_rows(generator, size, nested=nested)) for size in sizes], draw(st.integers(1, 7))


@settings(deadline=None, max_examples=30)
@given(cells())
def test_laws_of_a_layout(cell: tuple[list[Forest], int]) -> None:
    forests, num_ranks = cell
    groups = [GroupPaths.of(forest, COST) for forest in forests]
    layout = lay_out_cell(groups, num_ranks, trials=60)
    found: list[list[int]] = [[] for _ in forests]
    for rank, held in enumerate(layout.rows):
        # A rank computes the forest of its own rows, and nothing else.
        own = sum(COST.forest(forests[group].select_rows(rows)) for group, rows in held)
        assert layout.load_D[rank] == pytest.approx(own)
        for group, rows in held:
            found[group] += rows.tolist()
    assert [sorted(rows) for rows in found] == [list(range(forest.num_rows)) for forest in forests]
    whole = np.array([COST.forest(forest) for forest in forests])
    slowest = max((whole[content].sum() for content in least_loaded(whole, num_ranks)), default=0.0)
    assert layout.load_D.max() <= slowest * (1 + 1e-9)
    rows_alone = [COST.rows(forest.row_index.lengths).max() for forest in forests]
    assert layout.bound == pytest.approx(max([whole.sum() / num_ranks, *rows_alone]))
    assert layout.load_D.max() >= layout.bound * (1 - 1e-9)
    assert layout.split_groups == sum(
        sum(g == group for held in layout.rows for g, _ in held) > 1 for group in range(len(forests))
    )
    if layout.split_groups:
        assert layout.load_D.max() < slowest * (1 - LEAST_GAIN)
    again = lay_out_cell([GroupPaths.of(forest, COST) for forest in forests], num_ranks, trials=60)
    first, second = ([[(g, rows.tolist()) for g, rows in held] for held in one.rows] for one in (layout, again))
    assert first == second


@pytest.mark.parametrize(("num_rows", "seed"), [*((12, seed) for seed in range(20)), (600, 1)])
def test_a_set_of_paths_costs_what_its_forest_costs_and_paths_are_few(num_rows: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    forest = Forest.from_rows(group_rows(generator, num_rows, nested=seed % 2 == 0))
    group = GroupPaths.of(forest, COST)
    assert group.num_paths <= MOST_PATHS + 1
    picked = np.flatnonzero(generator.random(group.num_paths) < 0.5)
    if len(picked):
        rows = np.concatenate([group.rows[path] for path in picked])
        assert group.cost(picked) == pytest.approx(COST.forest(forest.select_rows(rows)))
    assert group.whole == pytest.approx(COST.forest(forest))


def optimum(forests: list[Forest], num_ranks: int) -> float:
    """Least cost of the slowest rank over all placements of rows: segments run wherever a row of theirs does."""
    model = cp_model.CpModel()
    loads: list[list[tuple[int, cp_model.IntVar]]] = [[] for _ in range(num_ranks)]
    for forest in forests:
        lengths = forest.segments.start, forest.segments.depth, forest.segments.lengths
        ends = COST.rows(lengths[1] + lengths[2]) - COST.rows(lengths[1])
        places = [[model.new_bool_var("") for _ in range(num_ranks)] for _ in range(forest.num_rows)]
        for place in places:
            model.add_exactly_one(place)
        for rank in range(num_ranks):
            for start, cost in zip(lengths[0].tolist(), ends.tolist(), strict=True):
                runs = model.new_bool_var("")
                for row in forest.rows_through(start).tolist():
                    model.add_implication(places[row][rank], runs)
                loads[rank].append((round(cost), runs))
    slowest = model.new_int_var(0, 10**9, "")
    for load in loads:
        model.add(sum(cost * runs for cost, runs in load) <= slowest)
    model.minimize(slowest)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    return solver.objective_value


@pytest.mark.parametrize("seed", range(15))
def test_small_cases_are_near_the_optimum(seed: int) -> None:
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, 5, generator.integers(1, 4))
    forests = [Forest.from_rows(group_rows(generator, int(size), nested=False)) for size in sizes]
    num_ranks = int(generator.integers(2, 4))
    layout = lay_out_cell([GroupPaths.of(forest, COST) for forest in forests], num_ranks, trials=300)
    # Whole groups stay whole where splitting gains less.
    assert layout.load_D.max() * (1 - LEAST_GAIN) <= optimum(forests, num_ranks)
