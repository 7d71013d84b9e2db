"""A LoRA adapter that never reaches the rollout ends the run as soon as it can show; one that arrives is named once."""

from pathlib import Path

import pytest
import torch
from engine_harness import LORA
from local_trainer import BRANCHES, LocalQueue, OneWorker, config_of_mode, make_trainer, put_rows, trainer_config
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import get_trainer_cls

from tree_rl.verl_plugin.refusals.refusal import UnsupportedFeatureError
from tree_rl.verl_plugin.trainer.adapter_check import SHARE, AdapterCheck, AdapterMissingError, Effect
from tree_rl.verl_plugin.trainer.old_log_probs import LogProbReuse
from tree_rl.verl_plugin.trainer.queue_rows import log_probs_of_pass
from tree_rl.verl_plugin.trainer.workers import WITHOUT_ADAPTER

BYPASS = {"rollout_is": None, "rollout_rs": None, "bypass_mode": True}
RANK = "actor_rollout_ref.model.lora_rank"


def log_probs(*, share: float, effect: float, noise: float, tokens: int = 20_000) -> list[torch.Tensor]:
    """Of a rollout with a share of the adapter's effect, and the trainer's with and without it, rounded separately."""
    generator = torch.Generator().manual_seed(0)
    base, whole, *rounding = torch.randn(5, tokens, generator=generator, dtype=torch.float64)
    exact = (base + share * effect * whole, base + effect * whole, base)
    return [values + noise * error for values, error in zip(exact, rounding, strict=True)]


@pytest.mark.parametrize(
    ("share", "effect", "noise", "has_arrived"),
    [
        *((share, *size, share == 1) for share in (1.0, 0.0) for size in ((1e-3, 0.0), (3e-2, 1e-2))),
        (0.5, 3e-2, 1e-3, None),
        # Rounding hides what one small update does: neither an alarm nor a clearance.
        *((share, 1e-4, 1e-2, None) for share in (1.0, 0.0)),
    ],
)
def test_log_probs_tell_what_has_arrived(share: float, effect: float, noise: float, has_arrived: bool | None) -> None:
    found = Effect.of(*log_probs(share=share, effect=effect, noise=noise))
    assert found is not None and found.has_arrived is has_arrived
    if noise < 0.1 * effect:
        assert found.share == pytest.approx(share, abs=0.02)


def test_an_offset_of_all_tokens_and_repeated_tokens_change_nothing_and_an_adapter_of_zeros_shows_nothing() -> None:
    rollout, adapted, base = log_probs(share=0.0, effect=1e-2, noise=1e-2, tokens=500)
    found, moved = Effect.of(rollout, adapted, base), Effect.of(rollout + 0.7, adapted, base)
    again = Effect.of(*(values.repeat(8) for values in (rollout, adapted, base)))
    assert found is not None and moved is not None and again is not None
    assert moved.share == pytest.approx(found.share) and again.deviation == pytest.approx(found.deviation)
    assert Effect.of(rollout, base, base) is None


def test_comparisons_start_where_an_adapter_can_show_and_become_rare() -> None:
    check = AdapterCheck(is_open=True, is_loaded=False)
    assert [version for version in range(20) if check.begin_update(version)] == [1, 2, 4, 8, 16]
    loaded = AdapterCheck(is_open=True, is_loaded=True)
    assert [version for version in range(5) if loaded.begin_update(version)] == [0, 1, 3]
    resumed = AdapterCheck(is_open=True, is_loaded=False)
    assert [version for version in range(7, 12) if resumed.begin_update(version)] == [7, 8, 10]


def test_rows_of_much_older_adapters_do_not_count() -> None:
    check = AdapterCheck(is_open=True, is_loaded=False, updates=8)
    assert check.is_comparable({"min_global_steps": 7}, 7) and not check.is_comparable({"min_global_steps": 6}, 7)
    check.updates = 9
    assert check.is_comparable({"min_global_steps": 7}, 8) and not check.is_comparable({"min_global_steps": 6}, 8)
    assert not check.is_comparable({"min_global_steps": None}, 8) and not check.is_comparable({}, 8)


@pytest.mark.parametrize(
    ("overrides", "is_open"),
    [
        ((f"{RANK}=4",), True),
        ((), False),
        ((f"{RANK}=4", "actor_rollout_ref.actor.fsdp_config.tree.self_check=false"), False),
        ((f"{RANK}=4", "actor_rollout_ref.rollout.calculate_log_probs=false"), False),
    ],
)
def test_only_runs_with_an_adapter_and_the_self_check_compare(overrides: tuple[str, ...], is_open: bool) -> None:
    assert AdapterCheck.of(config_of_mode("tree_sync", *overrides)).is_open is is_open


def test_separate_rollouts_take_merged_adapters_only() -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"backend=gloo with .*lora_rank=4: .*#7495.*lora\.merge=True"):
        get_trainer_cls("tree_separate_async")(config_of_mode("tree_separate_async", f"{RANK}=4"))
    merged = ["actor_rollout_ref.model.lora.merge=true", f"{RANK}=4"]
    assert get_trainer_cls("tree_separate_async")(config_of_mode("tree_separate_async", *merged))._adapter_check.is_open


@pytest.mark.parametrize("arrives", (True, False))
@pytest.mark.parametrize("old", ("update", "pass", "rollout"))
@pytest.mark.parametrize("has_kl", (False, True))
def test_a_step_ends_the_run_exactly_if_rollouts_lack_the_adapter(
    queue: LocalQueue, model_path: Path, capsys: pytest.CaptureFixture[str], old: str, has_kl: bool, arrives: bool
) -> None:
    trainer = make_trainer(ranks=1, config=trainer_config("token-mean", BYPASS if old == "rollout" else None))
    trainer._reuse = LogProbReuse(setting="auto", conflict=None if old == "update" else "asked for")
    trainer._adapter_check = AdapterCheck(is_open=True, is_loaded=False)
    trainer.use_reference_policy, trainer.ref_in_actor = has_kl, True
    trainer.actor_rollout_wg = worker = OneWorker(model_path, queue, **LORA)
    torch.manual_seed(0)
    for name, weight in worker._worker.actor.engine.module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight.to_local(), std=0.2)
    batch = put_rows(queue, BRANCHES)
    for key, row in queue.rows.items():
        del row["old_log_probs"], row["ref_log_prob"]
        queue.tags[key]["min_global_steps"] = trainer.global_steps - 1
    batch = trainer._balance_batch(batch, metrics := {})
    with_adapter = log_probs_of_pass(worker, batch, 0.9)
    passed = trainer._compute_ref_log_prob(KVBatchMeta(batch.keys, batch.tags, batch.partition_id), {})
    assert WITHOUT_ADAPTER not in passed.extra_info, "a critic's pass would leave out adapters that it does not have"
    for key in batch.keys:
        row = queue.rows[key]
        without = row["ref_log_prob"] if has_kl else row.pop("ref_log_prob")
        row["rollout_log_probs"] = (with_adapter[key] if arrives else without).clone()

    batch = trainer._compute_advantage(trainer._compute_old_log_prob(batch, metrics), metrics)
    before = worker.forwards
    if arrives:
        trainer._update_actor(batch, metrics)
        assert metrics[SHARE] == pytest.approx(1, abs=1e-3)
        assert capsys.readouterr().out.count("adapter: the rollout samples with it") == 1
        assert not trainer._adapter_check.is_open
    else:
        said = r"without the LoRA adapter: .*lora\.merge=True.*self_check=False"
        with pytest.raises(AdapterMissingError, match=said):
            trainer._update_actor(batch, metrics)
        assert "samples with it" not in capsys.readouterr().out
    assert worker.forwards - before == 1 + (not has_kl) + (old == "rollout")
