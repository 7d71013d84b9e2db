"""`docs/verl_options.md` has a line for every option of verl, and what a line claims is so."""

import re
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from local_trainer import stock_config
from omegaconf import DictConfig, OmegaConf
from verl.trainer.config import CheckpointConfig
from verl.utils.config import omega_conf_to_dataclass
from verl.workers import config as workers
from verl.workers.config.engine import EngineRouterReplayConfig, QATEngineConfig

from tree_rl.verl_plugin.refusals.refusal import UnsupportedFeatureError
from tree_rl.verl_plugin.trainer.prepared_config import prepare_config

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "verl_options.md"
TESTED, NO_EFFECT, REFUSED = RESULTS = ("tested", "no effect", "refused")
ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
SECTIONS: dict[str, type | None] = {
    "actor_rollout_ref.model": workers.HFModelConfig,
    f"{ACTOR}.fsdp_config": workers.FSDPEngineConfig,
    ACTOR: workers.FSDPActorConfig,
    # A reference policy has the actor's class; verl reads what its YAML lists.
    REF: None,
    "critic": workers.FSDPCriticConfig,
    f"{ACTOR}.optim": workers.FSDPOptimizerConfig,
    f"{ACTOR}.checkpoint": CheckpointConfig,
}
"""First name in a section's heading, which is a node of verl's config -> the dataclass that the node becomes."""
NESTED = {"mtp": workers.MtpConfig, "policy_loss": workers.PolicyLossConfig}
NESTED |= {"qat": QATEngineConfig, "router_replay": EngineRouterReplayConfig}
"""Options that stand for several, which have lines of their own."""
OF_OTHER_SECTIONS = {"_target_", "optim", "checkpoint", "fsdp_config", "fsdp", "model"}


class OptionRow(NamedTuple):
    """One line of the page's lists; `quoted` follows the options: tests, or a message."""

    section: str
    options: tuple[str, ...]
    result: str
    quoted: tuple[str, ...]
    alone: bool
    """Whether the line names options without a condition."""


@cache
def rows() -> tuple[OptionRow, ...]:
    found, section, result = [], "", ""
    for line in PAGE.read_text(encoding="utf-8").replace("\n  ", " ").splitlines():
        if line.startswith("## "):
            section = re.findall(r"`([^`]+)`", line)[0]
        if heading := re.fullmatch(r"\*\*(.+)\*\*", line):
            result = heading[1].lower()
        if line.startswith("* `"):
            named, _, evidence = line.removeprefix("* ").partition(": ")
            conditional = re.sub(r"`[^`]+`,?", "", named).strip()
            options, quoted = (tuple(re.findall(r"`([^`]+)`", text)) for text in (named, evidence))
            found.append(OptionRow(section, options[:1] if conditional else options, result, quoted, not conditional))
    return tuple(found)


def config_with(*overrides: str) -> DictConfig:
    uses_all = ["critic.enable=true", f"{ACTOR}.use_kl_loss=true"]
    return OmegaConf.merge(stock_config(), OmegaConf.from_dotlist([*uses_all, *overrides]))


def verls_options(section: str) -> set[str]:
    """Every option that verl has in a section, as lines name it."""
    made = SECTIONS[section]
    declared = set() if made is None else {field.name for field in fields(made)}
    listed = OmegaConf.select(stock_config(), section).keys()
    options = {str(name) for name in declared | set(listed)} - OF_OTHER_SECTIONS
    nested = {f"{name}.{field.name}" for name in options & set(NESTED) for field in fields(NESTED[name])}
    return (options - set(NESTED)) | {name for name in nested if not name.endswith("._target_")}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_option_of_verl_has_a_row(section: str) -> None:
    named = [option for row in rows() if row.section == section for option in row.options]
    assert sorted(verls_options(section) - set(named)) == []
    unknown = {name for name in named if name not in verls_options(section)}
    # Keys of an option that is a mapping.
    assert {name for name in unknown if name.split(".")[0] not in verls_options(section)} == set()
    once = [option for row in rows() if row.section == section and row.alone for option in row.options]
    assert len(once) == len(set(once))


def test_every_row_has_one_result_and_says_why() -> None:
    assert {row.result for row in rows()} == set(RESULTS) and {row.section for row in rows()} <= set(SECTIONS)
    assert [row for row in rows() if row.result != NO_EFFECT and not row.quoted] == []
    assert all(row.quoted[0].startswith("test_") for row in rows() if row.result == TESTED)


@pytest.mark.parametrize("named", sorted({name for row in rows() for name in row.quoted if name.startswith("test_")}))
def test_a_named_test_exists(named: str) -> None:
    file, _, function = named.partition("::")
    found = list(TESTS.rglob(file))
    assert len(found) == 1, f"{file}: {len(found)} files of that name"
    text = found[0].read_text(encoding="utf-8")
    assert f"def {function}(" in text if function else "def test_" in text


SEQUENCE_PARALLEL = "ulysses_sequence_parallel_size"
MODEL, ENGINE = "actor_rollout_ref.model", f"{ACTOR}.fsdp_config"
PLACES = {"model": MODEL, "fsdp_config": ENGINE, "actor": ACTOR, "ref": REF, "checkpoint": f"{ACTOR}.checkpoint"}
"""Where the keys stand that messages begin with."""
MORE = {
    "with actor_rollout_ref.model.lora_rank=0": (f"{MODEL}.lora_adapter_path=adapter",),
    "fsdp_config.ulysses_sequence_parallel_size=2": (f"{ENGINE}.tree.mode=flat",),
}
"""What else a config sets to get a message that begins so."""


@pytest.mark.parametrize("message", sorted({row.quoted[0] for row in rows() if row.result == REFUSED}))
def test_a_refusal_is_what_the_trainer_raises(message: str) -> None:
    """Of the option that it names, at the value that it names."""
    named = re.search(r"([\w.]+)=([^\s:]+)", message)
    assert named is not None
    place, _, option = named[1].partition(".")
    more = [one for start, given in MORE.items() if message.startswith(start) for one in given]
    with pytest.raises(UnsupportedFeatureError, match=re.escape(message)):
        prepare_config(config_with(f"{PLACES.get(place, place)}.{option}={named[2]}", *more))


@pytest.mark.parametrize(
    "overrides",
    (
        "",
        f"{ACTOR}.grad_clip=0.5 {ACTOR}.optim.clip_grad=0.5",
        f"{ACTOR}.optim.clip_grad=0.5",
        f"{ACTOR}.clip_ratio_low=0.0003 {ACTOR}.clip_ratio_high=0.0004",
        f"{ACTOR}.clip_ratio=0.1 {ACTOR}.clip_ratio_low=null {ACTOR}.clip_ratio_high=null",
        f"{ENGINE}.dtype=float16 {ENGINE}.mixed_precision.param_dtype=fp16",
        f"{MODEL}.lora_adapter_path=adapter {MODEL}.lora_rank=8",
        f"{MODEL}.lora.merge=true {MODEL}.lora_rank=8",
        # What is refused on a tree engine is the user's choice on verl's own.
        "critic.model.lora_rank=4 critic.model.model_type=value_model",
        f"{ACTOR}.use_prefix_grouper=true {MODEL}.model_type=language_model",
        f"{ENGINE}.{SEQUENCE_PARALLEL}=2 critic.fsdp.{SEQUENCE_PARALLEL}=2",
        f"{ACTOR}.{SEQUENCE_PARALLEL}=2 critic.fsdp.{SEQUENCE_PARALLEL}=2",
        # A reference policy trains nothing, so its forests may lie on ranks otherwise.
        f"{REF}.fsdp_config.{SEQUENCE_PARALLEL}=2",
    ),
)
def test_what_does_as_it_says_passes(overrides: str) -> None:
    prepare_config(config_with(*overrides.split()))


@pytest.mark.parametrize("role", (ACTOR, REF))
def test_a_roles_own_key_of_sequence_parallelism_reaches_its_engine(role: str) -> None:
    config = config_with(f"{ACTOR}.{SEQUENCE_PARALLEL}=2", f"{ACTOR}.ppo_micro_batch_size_per_gpu=1")
    # verl builds a reference policy of the actor's class, after it has renamed some keys.
    own = {SEQUENCE_PARALLEL: OmegaConf.select(config, role)[SEQUENCE_PARALLEL]}
    node = OmegaConf.merge(OmegaConf.select(config, ACTOR), own)
    assert omega_conf_to_dataclass(node).engine.ulysses_sequence_parallel_size == 2


def test_a_tree_critic_gets_the_budget_that_its_options_name(model_path: Path) -> None:
    sizes = ("ppo_max_token_len_per_gpu=777", "ppo_micro_batch_size_per_gpu=3", "ppo_infer_micro_batch_size_per_gpu=5")
    given = (f"model.path={model_path}", "model.load_tokenizer=false", "use_dynamic_bsz=false", *sizes)
    config = config_with(*(f"critic.{one}" for one in given))
    prepare_config(config)
    critic = omega_conf_to_dataclass(config.critic)
    # verl's trainer copies it to the engine's max_token_len_per_gpu and infer_max_token_len_per_gpu.
    assert critic.ppo_infer_max_token_len_per_gpu == 777
    assert not critic.engine.use_dynamic_bsz
    assert (critic.engine.micro_batch_size_per_gpu, critic.engine.infer_micro_batch_size_per_gpu) == (3, 5)
