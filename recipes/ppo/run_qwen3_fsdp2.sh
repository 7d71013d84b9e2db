#!/usr/bin/env bash
# Tree PPO with a critic through verl's own main_ppo. Without arguments it runs a tiny model on a CPU; see README.md.
set -euo pipefail

# ---- user-adjustable ----
MODEL_PATH=${MODEL_PATH:-}                 # empty: a tiny Qwen3 with random weights
NGPUS=${NGPUS:-1}                          # training processes per node
NNODES=${NNODES:-1}
DEVICE=${DEVICE:-$(nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)}
ROLLOUT=${ROLLOUT:-$([[ $DEVICE == gpu ]] && echo vllm || echo hf)}
TRAIN_FILE=${TRAIN_FILE:-}                 # empty: the toy task of recipes/toy_task.py
TEST_FILE=${TEST_FILE:-}
REWARD_FILE=${REWARD_FILE:-}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-16}   # prompts per step
MINI_BATCH_SIZE=${MINI_BATCH_SIZE:-8}      # prompts per optimizer step
ROLLOUT_N=${ROLLOUT_N:-8}
PROMPT_LENGTH=${PROMPT_LENGTH:-256}
RESPONSE_LENGTH=${RESPONSE_LENGTH:-16}
MAX_TOKENS=${MAX_TOKENS:-16384}            # unique tokens of one micro-batch
LR=${LR:-5e-3}                             # for the tiny model; 1e-6 for a pretrained one
CRITIC_LR=${CRITIC_LR:-1e-3}               # 1e-5 for a pretrained one
STEPS=${STEPS:-30}
OUTPUT=${OUTPUT:-outputs/ppo}
PYTHON=${PYTHON:-python3}
# -------------------------

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
RECIPES=$(dirname "$HERE")
if [[ -z $MODEL_PATH ]]; then
    MODEL_PATH=$OUTPUT/model
    "$PYTHON" "$RECIPES/tiny_model.py" "$MODEL_PATH"
fi
if [[ -z $TRAIN_FILE ]]; then
    "$PYTHON" "$RECIPES/toy_task.py" "$OUTPUT/data"
    TRAIN_FILE=$OUTPUT/data/train.parquet
    TEST_FILE=$OUTPUT/data/test.parquet
    REWARD_FILE=$RECIPES/toy_task.py
fi
[[ $DEVICE == cpu ]] && export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCH_COMPILE_DISABLE=1

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
CRITIC=(
    critic.model.path="$(realpath -q "$MODEL_PATH" || echo "$MODEL_PATH")"
    critic.optim.lr="$CRITIC_LR"
    critic.ppo_max_token_len_per_gpu="$MAX_TOKENS"
)
ROLLOUT_ARGS=(
    actor_rollout_ref.rollout.name="$ROLLOUT"
    actor_rollout_ref.rollout.n="$ROLLOUT_N"
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5
)
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
EXTRA=()
[[ -n $REWARD_FILE ]] && EXTRA+=(reward.custom_reward_function.path="$(realpath "$REWARD_FILE")")

"$PYTHON" -m verl.trainer.main_ppo --config-path "$HERE" --config-name tree_ppo \
    "${DATA[@]}" "${MODEL[@]}" "${ACTOR[@]}" "${CRITIC[@]}" "${ROLLOUT_ARGS[@]}" "${TRAINER[@]}" "${EXTRA[@]}" "$@"
