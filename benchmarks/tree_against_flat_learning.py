"""Learning curves of one agent task, from the same weights and random numbers: trees, verl's own rows, longest paths.

The quickstart's task and tiny model, the native agent behind the recording gateway, verl's main_ppo.

PYTHONPATH=recipes python benchmarks/tree_against_flat_learning.py --seeds 0 1
"""

import argparse
import asyncio
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from quickstart.experts import HABITS, Expert
from quickstart.model import build_model
from quickstart.prepare import prompt_table, task_words
from quickstart.progress import Phase, read_steps, reward_of_step, run_phase
from quickstart.task import StockEnvironment, draw_task, first_messages
from quickstart.tokenizer import build_tokenizer

from tree_rl.benchmark.provenance import provenance
from tree_rl.benchmark.results import write_csv
from tree_rl.rollout.agents.in_environment import run_task
from tree_rl.rollout.agents.react import ReActAgent
from tree_rl.rollout.gateway.backend import Generation
from tree_rl.rollout.gateway.gateway import Gateway
from tree_rl.rollout.gateway.options import GatewayOptions
from tree_rl.rollout.transcript import rows_of_calls

REPOSITORY = Path(__file__).resolve().parents[1]
ARMS = ("tree", "flat", "longest")
MAX_TURNS, TURN_TOKENS, CONTEXT_TOKENS = 4, 112, 416
"""The context is data.max_prompt_length + data.max_response_length of the quickstart."""
SFT_STEPS = 420
AT_ONCE = 16
LIMIT_SECONDS = 1500.0
ACTOR = "actor_rollout_ref.actor"
AGENT = "actor_rollout_ref.rollout.custom.gateway_agent"


class Demonstrators:
    """A backend whose sessions are experts of different habits."""

    def __init__(self) -> None:
        self.experts: dict[str, Expert] = {}

    async def generate(
        self, prompt_ids: Sequence[int], *, max_tokens: int, sampling: Mapping[str, Any], session: str
    ) -> Generation:
        """Answer as the session's expert."""
        ids, _ = await self.experts[session](list(prompt_ids), max_tokens=max_tokens)
        return Generation(token_ids=tuple(ids), log_probs=None, finish_reason="stop")


async def demonstrate(tokenizer: Any, count: int, seed: int) -> list[dict[str, Any]]:
    """Rows of demonstrated sessions, cut by the gateway as those of the policy will be.

    Args:
        tokenizer: of the policy.
        count: sessions.
        seed: decides tasks and experts.
    """
    source = random.Random(seed)
    tasks = [draw_task(source) for _ in range(count)]
    habits = source.choices(list(HABITS.values()), [habit.share for habit in HABITS.values()], k=count)
    backend, free = Demonstrators(), asyncio.Semaphore(AT_ONCE)
    options = GatewayOptions(max_context_tokens=CONTEXT_TOKENS, max_turn_tokens=TURN_TOKENS)

    async def play(gateway: Gateway, number: int) -> list[dict[str, Any]]:
        async with free:
            session, task = gateway.open_session(), tasks[number]
            backend.experts[session.id] = Expert(habits[number], task["rooms"], tokenizer)
            done = await run_task(
                agent=ReActAgent(),
                environment=StockEnvironment(),
                endpoint=gateway.endpoint(session),
                task=task,
                messages=first_messages(task),
                timeout_seconds=120,
            )
            record = await gateway.close_session(session)
        if done.status != "completed":
            raise RuntimeError(f"demonstration {number}: expected the status completed, received {done}")
        return [
            {
                "conversation": number,
                "input_ids": list(row.token_ids),
                "loss_mask": [0] * len(row.prompt_ids) + list(row.response_mask),
                "reward": done.reward,
            }
            for row in rows_of_calls(record.calls)
        ]

    async with Gateway(tokenizer=tokenizer, backend=backend, options=options) as gateway:
        played = await asyncio.gather(*[play(gateway, number) for number in range(count)])
    return [row for rows in played for row in rows]


def prepare(folder: Path, *, seed: int, demonstrations: int) -> None:
    """Write the untrained model, the demonstrations and the tasks."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(task_words())
    tokenizer.save_pretrained(folder / "model")
    build_model(tokenizer, seed=seed).save_pretrained(folder / "model")
    table = pd.DataFrame(asyncio.run(demonstrate(tokenizer, demonstrations, seed)))
    table.to_parquet(folder / "demonstrations.parquet")
    prompt_table(512, seed=seed + 1).to_parquet(folder / "tasks.parquet")
    rewards = table.groupby("conversation")["reward"].first()
    print(f"{len(rewards)} demonstrations, {len(table)} rows, mean reward {rewards.mean():.2f}", flush=True)


def phase(name: str, folder: Path, module: str, config: str, overrides: Sequence[str], **environment: str) -> Phase:
    """One training process with a config of the quickstart."""
    metrics = folder / f"{name}.jsonl"
    return Phase(
        name=name,
        command=[
            *(sys.executable, "-m", module, "--config-path", str(REPOSITORY / "recipes" / "quickstart")),
            *("--config-name", config, *overrides),
        ],
        log=folder / f"{name}.log",
        limit_seconds=LIMIT_SECONDS,
        metrics=metrics,
        describe=reward_of_step,
        environment={
            "VERL_FILE_LOGGER_PATH": str(metrics),
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "recipes"), os.environ.get("PYTHONPATH", "")]),
            "TORCH_COMPILE_DISABLE": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            **environment,
        },
    )


def warm_start(folder: Path, seed: int) -> Phase:
    """verl's SFT on the demonstrations."""
    return phase(
        "sft",
        folder,
        "tree_rl.sft",
        "sft",
        [
            f"data.train_files={folder / 'start' / 'demonstrations.parquet'}",
            f"model.path={folder / 'start' / 'model'}",
            f"trainer.default_local_dir={folder / 'sft'}",
            f"trainer.total_training_steps={SFT_STEPS}",
            f"trainer.seed={seed}",
        ],
    )


def arm_phase(arm: str, folder: Path, *, seed: int, steps: int) -> Phase:
    """main_ppo with the arm's engine and paths; everything else is the same."""
    engine = {
        "tree": ["algorithm.adv_estimator=full_tree"],
        "longest": ["algorithm.adv_estimator=longest_path"],
        # verl's own engine. Its best budget of tokens on this machine is 1024 (recipes/quickstart/README.md).
        "flat": [
            "algorithm.adv_estimator=full_tree",
            "actor_rollout_ref.model.model_type=language_model",
            f"{ACTOR}.fsdp_config._target_=verl.workers.config.FSDPEngineConfig",
            f"~{ACTOR}.fsdp_config.tree",
            f"{ACTOR}.ppo_max_token_len_per_gpu=1024",
        ],
    }[arm]
    return phase(
        arm,
        folder,
        "tree_rl.train",
        "grpo",
        [
            *engine,
            f"data.train_files={folder / 'start' / 'tasks.parquet'}",
            f"data.val_files={folder / 'start' / 'tasks.parquet'}",
            f"data.seed={seed}",
            f"actor_rollout_ref.model.path={folder / 'sft' / f'global_step_{SFT_STEPS}' / 'huggingface'}",
            "actor_rollout_ref.rollout.agent.default_agent_loop=tree_gateway_agent",
            f"actor_rollout_ref.rollout.custom.tree_dump_dir={folder / f'{arm}_rows'}",
            f"+{AGENT}.agent=tree_rl.rollout.agents.in_environment.AgentInEnvironment",
            f"+{AGENT}.agent_options.environment=quickstart.task.StockEnvironment",
            f"+{AGENT}.agent_options.options.max_turns={MAX_TURNS}",
            f"+{AGENT}.gateway.max_turn_tokens={TURN_TOKENS}",
            f"+{AGENT}.seed={seed}",
            f"trainer.default_local_dir={folder / arm}",
            f"trainer.total_training_steps={steps}",
        ],
        # verl lists its own engine for accelerators alone; under this name it runs on the CPU all the same.
        **({"VERL_ENGINE_DEVICE": "cuda"} if arm == "flat" else {}),
    )


def rollouts(folder: Path, arm: str) -> dict[int, Counter[str]]:
    """What was rolled out: step -> rows, token for token, whichever session they are of."""
    found: dict[int, Counter[str]] = {}
    for path in (folder / f"{arm}_rows").glob("train-*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            found.setdefault(row["step"], Counter())[str((row["prompt_ids"], row["response_ids"]))] += 1
    return found


def measured(folder: Path, seed: int) -> list[dict[str, Any]]:
    """CSV rows of the arms that have run."""
    trees = rollouts(folder, "tree")
    lines = []
    for arm in ARMS:
        if not (folder / f"{arm}.made_by.json").exists():
            continue
        made_by = json.loads((folder / f"{arm}.made_by.json").read_text())
        mine = rollouts(folder, arm)
        for step, figures in read_steps(folder / f"{arm}.jsonl"):
            if "tree/session_score/mean" not in figures:
                continue
            drawn, reference = mine[step], trees.get(step, Counter())
            lines.append(
                {
                    "seed": seed,
                    "arm": arm,
                    "step": step,
                    "reward": round(figures["tree/session_score/mean"], 4),
                    "rows": drawn.total(),
                    "rows_as_in_tree_arm": (drawn & reference).total(),
                    "trained_rows": drawn.total() - int(figures.get("tree/untrained_rows", 0)),
                    "flat_tokens": int(figures["tree/flat_tokens"]),
                    "unique_tokens": int(figures["tree/unique_tokens"]),
                    "gradient_norm": f"{figures['actor/grad_norm']:.6g}",
                    "step_s": round(figures["timing_s/step"], 3),
                    "rollout_s": round(figures["timing_s/gen"], 3),
                    "log_probs_s": round(figures["timing_s/old_log_prob"], 3),
                    "update_s": round(figures["timing_s/update_actor"], 3),
                    "rollout_log_prob_error": f"{figures['training/rollout_probs_diff_max']:.3g}",
                    **made_by,
                }
            )
    return lines


def main() -> None:
    """Run what has not run yet, then write the CSV of everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS))
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--demonstrations", type=int, default=1500)
    parser.add_argument("--commit", default=None, help="to write beside figures; asked of git if left out")
    parser.add_argument("--output", type=Path, default=Path("outputs/tree_against_flat_learning"))
    parser.add_argument("--csv", type=Path, default=Path("outputs/tree_against_flat_learning.csv"))
    arguments = parser.parse_args()
    lines: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        folder = arguments.output.resolve() / f"seed_{seed}"
        if not (folder / "start" / "tasks.parquet").exists():
            prepare(folder / "start", seed=seed, demonstrations=arguments.demonstrations)
        if not (folder / "sft" / f"global_step_{SFT_STEPS}" / "huggingface").exists():
            run_phase(warm_start(folder, seed))
        for arm in arguments.arms:
            done = read_steps(folder / f"{arm}.jsonl")
            if not done or done[-1][0] < arguments.steps:
                for rows in (folder / f"{arm}_rows").glob("*.jsonl"):
                    rows.unlink()
                run_phase(arm_phase(arm, folder, seed=seed, steps=arguments.steps))
                made_by = provenance(commit=arguments.commit, packages=("torch", "transformers", "verl")) | {
                    "cores": str(os.cpu_count())
                }
                (folder / f"{arm}.made_by.json").write_text(json.dumps(made_by))
        lines += measured(folder, seed)
    write_csv(arguments.csv, lines)


if __name__ == "__main__":
    main()
