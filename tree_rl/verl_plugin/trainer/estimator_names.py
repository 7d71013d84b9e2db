"""Names of the estimators that use the tree: `algorithm.adv_estimator=NAME`.

verl gives an estimator padded rows without token ids. So the tree trainers compute these themselves; verl's trainers
refuse them. verl imports this module during its import, so it must not import what imports verl.
"""

from typing import Any, NoReturn

from verl.trainer.ppo.core_algos import register_adv_est

from tree_rl.credit import ESTIMATORS

LONGEST_PATH = "longest_path"
ON_PATHS = ("full_tree", LONGEST_PATH)
"""Our names of GRPO on every path, and of GRPO on each session's longest path only, the paper's baseline in its section
"The gain of training on all tokens of trajectory trees"."""


def verls_estimator(name: str) -> str:
    """verl's name of an estimator."""
    return "grpo" if name in ON_PATHS else name


def _refuse_elsewhere(name: str) -> None:
    @register_adv_est(name)
    def refuse(**_: Any) -> NoReturn:
        raise NotImplementedError(
            f"algorithm.adv_estimator={name} needs the rows' token ids, which verl's own trainers do not pass on; "
            "set trainer.v1.trainer_mode=tree_sync"
        )


for _name in (*ESTIMATORS, *ON_PATHS):
    _refuse_elsewhere(_name)
