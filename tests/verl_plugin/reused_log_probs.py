"""Updates behind a pass for old log-probs, and batches whose update finds them itself."""

from typing import Any

from engine_harness import Row, ppo_batch
from equivalence import infer, run
from verl.workers.utils.padding import response_from_nested

from tree_rl.verl_plugin.engine.verl_loss import REUSE_LOG_PROBS


def run_after_pass(engine: Any, rows: list[Row], loss: Any, **flags: Any) -> dict[str, Any]:
    data = ppo_batch(rows, **flags)
    data["old_log_probs"] = response_from_nested(infer(engine, ppo_batch(rows))["log_probs"], data["response_mask"])
    return run(engine, data, loss)


def without_pass(rows: list[Row], **flags: Any) -> Any:
    data = ppo_batch(rows, **{REUSE_LOG_PROBS: True, **flags})
    del data["old_log_probs"]
    return data
