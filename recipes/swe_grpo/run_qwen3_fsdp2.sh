#!/usr/bin/env bash
# Agents on software tasks, trained on trees through verl's own main_ppo. Without arguments it runs a tiny model on a CPU;
# see README.md. recipes/swe_ppo starts it with RECIPE=swe_ppo.
set -euo pipefail

# ---- user-adjustable ----
MODEL_PATH=${MODEL_PATH:-}                 # empty: a tiny Qwen3 with random weights
NGPUS=${NGPUS:-1}                          # training processes per node
NNODES=${NNODES:-1}
DEVICE=${DEVICE:-$(nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)}
ROLLOUT=${ROLLOUT:-$([[ $DEVICE == gpu ]] && echo vllm || echo hf)}
TRAIN_FILE=${TRAIN_FILE:-}                 # empty: the small tasks of recipes/swe_tasks
TEST_FILE=${TEST_FILE:-}
TRAIN_TASKS=${TRAIN_TASKS:-31}             # of the small tasks
AGENT=${AGENT:-react}                      # react, mini_swe, command_line
MAX_TURNS=${MAX_TURNS:-6}
ESTIMATOR=${ESTIMATOR:-full_tree}          # full_tree, longest_path, tree_loo, or verl's own; swe_ppo has gae
WARM_UP_STEPS=${WARM_UP_STEPS:-0}          # SFT on the reference repairs first; 0 leaves it out
WARM_UP_LR=${WARM_UP_LR:-3e-3}             # for the tiny model; 1e-5 for a pretrained one
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-4}    # prompts per step
MINI_BATCH_SIZE=${MINI_BATCH_SIZE:-4}      # prompts per optimizer step
ROLLOUT_N=${ROLLOUT_N:-8}
PROMPT_LENGTH=${PROMPT_LENGTH:-1024}
RESPONSE_LENGTH=${RESPONSE_LENGTH:-1536}
TURN_LENGTH=${TURN_LENGTH:-192}            # tokens of one model call
MAX_TOKENS=${MAX_TOKENS:-16384}            # unique tokens of one micro-batch
LR=${LR:-2e-4}                             # for the tiny model; 1e-6 for a pretrained one
CRITIC_LR=${CRITIC_LR:-1e-3}               # 1e-5 for a pretrained one
STEPS=${STEPS:-10}
RECIPE=${RECIPE:-swe_grpo}
OUTPUT=${OUTPUT:-outputs/$RECIPE}
PYTHON=${PYTHON:-python3}
# -------------------------

RECIPES=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH=$RECIPES/swe_tasks${PYTHONPATH:+:$PYTHONPATH}
[[ $DEVICE == cpu ]] && export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCH_COMPILE_DISABLE=1
mkdir -p "$OUTPUT"
OUTPUT=$(realpath "$OUTPUT")
if [[ -z $MODEL_PATH ]]; then
    MODEL_PATH=$OUTPUT/model
    "$PYTHON" "$RECIPES/swe_tasks/tiny_model.py" "$MODEL_PATH"
fi
if [[ -z $TRAIN_FILE ]]; then
    "$PYTHON" "$RECIPES/swe_tasks/generate.py" "$OUTPUT/data" --train-tasks "$TRAIN_TASKS"
    TRAIN_FILE=$OUTPUT/data/train.parquet
    TEST_FILE=$OUTPUT/data/test.parquet
fi
if [[ $WARM_UP_STEPS != 0 ]]; then
    "$PYTHON" "$RECIPES/swe_tasks/experts.py" "$MODEL_PATH" "$OUTPUT/data/experts.parquet" --tasks "$TRAIN_TASKS"
    env MODEL_PATH="$MODEL_PATH" TRAIN_FILE="$OUTPUT/data/experts.parquet" OUTPUT="$OUTPUT/warm_up" NGPUS="$NGPUS" \
        GROUP_KEY=conversation TRAIN_BATCH_SIZE="$TRAIN_TASKS" MAX_LENGTH=8192 MAX_TOKENS="$MAX_TOKENS" LR="$WARM_UP_LR" \
        EPOCHS=100000 DEVICE="$DEVICE" PYTHON="$PYTHON" bash "$RECIPES/sft/run_qwen3_fsdp2.sh" \
        data.custom_cls.path=pkg://tree_rl.verl_plugin.sft.token_rows_dataset data.custom_cls.name=TokenRowsDataset \
        trainer.total_training_steps="$WARM_UP_STEPS" trainer.logger='[console]' 'checkpoint.save_contents=[hf_model]'
    MODEL_PATH=$OUTPUT/warm_up/checkpoints/global_step_$WARM_UP_STEPS/huggingface
fi

DATA=(
    data.train_files="$(realpath "$TRAIN_FILE")"
    data.val_files="$(realpath "${TEST_FILE:-$TRAIN_FILE}")"
    data.train_batch_size="$TRAIN_BATCH_SIZE"
    data.max_prompt_length="$PROMPT_LENGTH"
    data.max_response_length="$RESPONSE_LENGTH"
)
MODEL=(
    actor_rollout_ref.model.path="$(realpath -q "$MODEL_PATH" || echo "$MODEL_PATH")"
)
ACTOR=(
    actor_rollout_ref.actor.optim.lr="$LR"
    actor_rollout_ref.actor.ppo_mini_batch_size="$MINI_BATCH_SIZE"
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$MAX_TOKENS"
)
ROLLOUT_ARGS=(
    actor_rollout_ref.rollout.name="$ROLLOUT"
    actor_rollout_ref.rollout.n="$ROLLOUT_N"
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5
    actor_rollout_ref.rollout.custom.gateway_agent.agent_options.agent="$AGENT"
    actor_rollout_ref.rollout.custom.gateway_agent.agent_options.options.max_turns="$MAX_TURNS"
    actor_rollout_ref.rollout.custom.gateway_agent.gateway.max_turn_tokens="$TURN_LENGTH"
)
if [[ $RECIPE == swe_ppo ]]; then
    ALGORITHM=(
        critic.model.path="$(realpath -q "$MODEL_PATH" || echo "$MODEL_PATH")"
        critic.optim.lr="$CRITIC_LR"
        critic.ppo_max_token_len_per_gpu="$MAX_TOKENS"
    )
else
    ALGORITHM=(algorithm.adv_estimator="$ESTIMATOR")
fi
TRAINER=(
    machine="$DEVICE"
    trainer.n_gpus_per_node="$NGPUS"
    trainer.nnodes="$NNODES"
    trainer.total_training_steps="$STEPS"
    trainer.total_epochs=1000
    trainer.val_before_train=false
    trainer.test_freq=-1
    trainer.save_freq=-1
    trainer.logger='[console]'
    trainer.default_local_dir="$OUTPUT/checkpoints"
)

"$PYTHON" -m verl.trainer.main_ppo --config-path "$RECIPES/$RECIPE" --config-name "$RECIPE" \
    "${DATA[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${ROLLOUT_ARGS[@]}" "${ALGORITHM[@]}" "${TRAINER[@]}" "$@"
