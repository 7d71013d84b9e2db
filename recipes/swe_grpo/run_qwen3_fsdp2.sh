#!/usr/bin/env bash
# Agents on software tasks, trained on trees through verl's own main_ppo. Without arguments it runs a tiny model on a CPU;
# see README.md. recipes/swe_ppo starts it with RECIPE=swe_ppo.
set -euo pipefail

# ---- user-adjustable, besides what recipes/launcher.sh lists ----
TRAIN_FILE=${TRAIN_FILE:-}                 # empty: the small tasks of recipes/swe_tasks
TRAIN_TASKS=${TRAIN_TASKS:-31}             # of the small tasks
AGENT=${AGENT:-react}                      # react, mini_swe, claude_code, codex, gemini_cli, qwen_code, opencode, openhands,
                                           # aider, command_line; docs/agents has a page for each
AGENT_ARGUMENTS=${AGENT_ARGUMENTS:-}       # of a harness, as a shell reads them
AGENT_COMMAND=${AGENT_COMMAND:-}           # of command_line: my-agent --task {prompt} --model {model}
AGENT_READABLE=${AGENT_READABLE:-}         # folder that sandboxes show besides the system's and the harness's own
MAX_TURNS=${MAX_TURNS:-6}                  # of react and mini_swe; for the others all model calls of a session
ESTIMATOR=${ESTIMATOR:-full_tree}          # full_tree, longest_path, tree_loo, or verl's own; swe_ppo has gae
WARM_UP_STEPS=${WARM_UP_STEPS:-0}          # SFT on the reference repairs first; 0 leaves it out
WARM_UP_LR=${WARM_UP_LR:-3e-3}             # for the tiny model; 1e-5 for a pretrained one
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-4}    # prompts per step
MINI_BATCH_SIZE=${MINI_BATCH_SIZE:-4}      # prompts per optimizer step
PROMPT_LENGTH=${PROMPT_LENGTH:-1024}
RESPONSE_LENGTH=${RESPONSE_LENGTH:-1536}
TURN_LENGTH=${TURN_LENGTH:-192}            # tokens of one model call
LR=${LR:-2e-4}                             # for the tiny model; 1e-6 for a pretrained one
STEPS=${STEPS:-10}
RECIPE=${RECIPE:-swe_grpo}
OUTPUT=${OUTPUT:-outputs/$RECIPE}
# -----------------------------------------------------------------

# shellcheck source=recipes/launcher.sh
source "$(dirname "${BASH_SOURCE[0]}")/../launcher.sh"
export PYTHONPATH=$RECIPES:$RECIPES/swe_tasks${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$OUTPUT"
OUTPUT=$(realpath "$OUTPUT")
BUBBLEWRAP='from tree_rl.rollout.sandbox.sandbox_folder import why_no_bubblewrap; exit(why_no_bubblewrap())'
UNCONFINED=false
if [[ -z $MODEL_PATH && -z $TRAIN_FILE ]] && ! "$PYTHON" -c "$BUBBLEWRAP"; then
    UNCONFINED=true
    echo "bubblewrap does not work here: the tiny model's sessions run with agent_options.sandbox.unconfined=true"
fi
need_model swe_tasks/tiny_swe_model.py
if [[ -z $TRAIN_FILE ]]; then
    "$PYTHON" "$RECIPES/swe_tasks/generate.py" "$OUTPUT/data" --train-tasks "$TRAIN_TASKS"
    TRAIN_FILE=$OUTPUT/data/train.parquet
    TEST_FILE=$OUTPUT/data/test.parquet
fi
if [[ $WARM_UP_STEPS != 0 ]]; then
    "$PYTHON" "$RECIPES/swe_tasks/experts.py" "$MODEL_PATH" "$OUTPUT/data/experts.parquet" --tasks "$TRAIN_TASKS" \
        --sandbox "{\"unconfined\": $UNCONFINED}"
    env MODEL_PATH="$MODEL_PATH" TRAIN_FILE="$OUTPUT/data/experts.parquet" OUTPUT="$OUTPUT/warm_up" NGPUS="$NGPUS" \
        GROUP_KEY=conversation TRAIN_BATCH_SIZE="$TRAIN_TASKS" MAX_LENGTH=8192 MAX_TOKENS="$MAX_TOKENS" LR="$WARM_UP_LR" \
        EPOCHS=100000 SAVE_FREQ=-1 LOGGER= DEVICE="$DEVICE" PYTHON="$PYTHON" bash "$RECIPES/sft/run_qwen3_fsdp2.sh" \
        data.custom_cls.path=pkg://tree_rl.verl_plugin.sft.token_rows_dataset data.custom_cls.name=TokenRowsDataset \
        trainer.total_training_steps="$WARM_UP_STEPS" 'checkpoint.save_contents=[hf_model]'
    MODEL_PATH=$OUTPUT/warm_up/checkpoints/global_step_$WARM_UP_STEPS/huggingface
fi

# A text as a value of Hydra.
quoted() {
    printf "'%s'" "${1//\'/\\\'}"
}

GATEWAY_AGENT=actor_rollout_ref.rollout.custom.gateway_agent
AGENT_ARGS=("$GATEWAY_AGENT.agent_options.agent=$AGENT" "$GATEWAY_AGENT.gateway.max_turn_tokens=$TURN_LENGTH")
case $AGENT in
    react | mini_swe) AGENT_ARGS+=("++$GATEWAY_AGENT.agent_options.options.max_turns=$MAX_TURNS") ;;
    *) AGENT_ARGS+=("++$GATEWAY_AGENT.gateway.max_calls=$MAX_TURNS") ;;
esac
if [[ -n $AGENT_ARGUMENTS ]]; then
    AGENT_ARGS+=("++$GATEWAY_AGENT.agent_options.options.arguments=$(quoted "$AGENT_ARGUMENTS")")
fi
if [[ -n $AGENT_COMMAND ]]; then
    AGENT_ARGS+=("++$GATEWAY_AGENT.agent_options.options.command=$(quoted "$AGENT_COMMAND")")
fi
if [[ $UNCONFINED == true ]]; then
    AGENT_ARGS+=("++$GATEWAY_AGENT.agent_options.sandbox.unconfined=true")
fi
if [[ -n $AGENT_READABLE ]]; then
    AGENT_ARGS+=("++$GATEWAY_AGENT.agent_options.sandbox.readable=[$(quoted "$AGENT_READABLE")]")
fi
critic_args
ALGORITHM=(algorithm.adv_estimator="$ESTIMATOR")
if [[ $RECIPE == swe_ppo ]]; then
    ALGORITHM=("${CRITIC[@]}")
fi
run_main_ppo "$RECIPE" "$RECIPE" "${ALGORITHM[@]}" "${AGENT_ARGS[@]}" "$@"
