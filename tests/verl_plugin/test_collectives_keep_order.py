"""Forests, partitions, rows and dummies make FSDP2 gather and reduce in one order: ranks may run any at one time."""

from pathlib import Path
from unittest.mock import create_autospec

import pytest
from engine_harness import VOCAB, build_engine, ppo_batch, save_model
from equivalence import LOSS, run
from hostile_rows import SHAPES
from tiny_families import RECURRENT
from tiny_sizes import sizes
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from transformers import CohereConfig, Gemma2Config, PretrainedConfig

from tree_rl.verl_plugin.options import TreeConfig

SIZES = sizes(vocab_size=VOCAB, max_position_embeddings=512, head_dim=None) | {"tie_word_embeddings": False}
MODELS: dict[str, PretrainedConfig] = {
    "cohere, logits times a factor": CohereConfig(**SIZES, logit_scale=0.25),
    "granite_4": RECURRENT["granite_4"],
    "gemma 2, soft cap": Gemma2Config(**SIZES, final_logit_softcapping=5.0, attn_logit_softcapping=None),
}
"""With a head of their own, which verl shards apart from the rest of the model."""
EVENTS = ("pre_forward", "pre_backward", "post_backward")
ROWS = SHAPES["branches"]
WORK = {"forest": {"mode": "tree"}, "partitions": {"max_tokens": 9}, "rows": {"mode": "flat"}, "dummy": {}}


@pytest.mark.parametrize("family", MODELS)
def test_every_kind_of_work_gathers_in_one_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    stock = {event: getattr(FSDPParamGroup, event) for event in EVENTS}
    watched = {event: create_autospec(method, side_effect=method) for event, method in stock.items()}
    for event, method in watched.items():
        monkeypatch.setattr(FSDPParamGroup, event, method)
    path = save_model(tmp_path, MODELS[family])
    orders: dict[str, dict[str, set[tuple[str, ...]]]] = {event: {} for event in EVENTS}
    for kind, options in WORK.items():
        if kind == "rows" and family in RECURRENT:
            continue  # refused: packed rows would see each other
        engine = build_engine(path, tree=TreeConfig(self_check=False, **options))
        for method in watched.values():
            method.reset_mock()
        with engine.train_mode(disable_auto_offload=True):
            if kind == "dummy":
                engine.step.runner.idle_forward().backward()
            else:
                run(engine, ppo_batch(ROWS), LOSS)
        for event, method in watched.items():
            groups = [str(call.args[0].fsdp_params[0]._param_fqn) for call in method.call_args_list]
            # Once a group in each forward or backward.
            size = len(set(groups))
            orders[event][kind] = {tuple(groups[at : at + size]) for at in range(0, len(groups), size)}
    for event, of_kind in orders.items():
        assert len(set.union(*of_kind.values())) == 1, (event, of_kind)
