"""Every supported model family, in float64: log-probs and gradients of a forest are those of its rows run alone."""

import pytest
from dense_models import FAMILIES, assert_reads_trees, build


@pytest.mark.parametrize("family", FAMILIES)
def test_forest_equals_rows_alone(family: str) -> None:
    assert_reads_trees(build(FAMILIES[family]))
