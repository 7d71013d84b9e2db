"""Reads the cost model that a run has fitted, from its checkpoint."""

from dataclasses import astuple
from pathlib import Path

import numpy as np

from tree_rl.cost.cost_fit import LEAST_EQUATIONS, CostFit
from tree_rl.cost.cost_model import CostModel, ModelShape
from tree_rl.inspection.files import InputError
from tree_rl.inspection.files.json_text import parse_json
from tree_rl.inspection.files.open_file import read_bytes
from tree_rl.inspection.files.quoting import quoted_path

STATE_FILES = "tree_engine_world_size_*_rank_0.json"
"""Files that the engine writes next to verl's; the costs are the same on every rank."""


def read_fitted_cost(folder: Path, shape: ModelShape) -> tuple[CostModel, int]:
    """Cost model fitted to the run's updates, including its collectives, and the number of GPUs that shared tokens.

    `folder` is a checkpoint (`global_step_N`) of a model of this shape, or its folder `actor`. Raises an InputError for
    unexpected content or too few measured updates.
    """
    files = sorted([*folder.glob(STATE_FILES), *folder.glob(f"actor/{STATE_FILES}")])
    named = f"--checkpoint {quoted_path(folder)}"
    if not files:
        raise InputError(f"{named}: expected global_step_N or its folder actor, with {STATE_FILES}; found none")
    state = parse_json(read_bytes(files[0]), quoted_path(files[0]))
    fit = CostFit(shape.cost)
    try:
        fit.restore(state["costs"])
        sharing = int(state.get("sharing_ranks", 1))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InputError(f"{named}: expected costs that an engine saved, found others in {files[0].name}") from error
    if fit.model is None:
        raise InputError(f"{named}: expected {LEAST_EQUATIONS} measured updates, found fewer; name a later checkpoint")
    if not np.isfinite(astuple(fit.model)).all():
        raise InputError(f"{named}: expected finite times and counts, found others in {files[0].name}")
    return fit.model, sharing
