# What the recipes' scripts share; each of them sources this file. A variable of the environment wins over its default.

# ---- user-adjustable in every recipe ----
MODEL_PATH=${MODEL_PATH:-}                 # empty: a tiny Qwen3 with random weights
NGPUS=${NGPUS:-1}                          # training processes per node
NNODES=${NNODES:-1}
DEVICE=${DEVICE:-$(nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)}
MAX_TOKENS=${MAX_TOKENS:-16384}            # unique tokens of one micro-batch
PYTHON=${PYTHON:-python3}
PROJECT=${PROJECT:-tree_rl}                # names under which loggers keep the run
EXPERIMENT=${EXPERIMENT:-}                 # empty: the recipe's
LOGGER=${LOGGER-$([[ $DEVICE == cpu ]] || echo tensorboard)} # besides the console: tensorboard, wandb, ... ; empty: none
SAVE_FREQ=${SAVE_FREQ:-$([[ $DEVICE == gpu ]] && echo 20 || echo -1)} # steps between checkpoints; -1: none
# ---- and in every recipe of reinforcement learning ----
ROLLOUT=${ROLLOUT:-$([[ $DEVICE == gpu ]] && echo vllm || echo hf)}
ROLLOUT_N=${ROLLOUT_N:-8}                  # sessions per prompt
TEST_FILE=${TEST_FILE:-}                   # empty: the training file, never tested
TEST_FREQ=${TEST_FREQ:-$([[ $DEVICE == gpu ]] && echo 5 || echo -1)} # steps between tests; -1: none
CRITIC_LR=${CRITIC_LR:-1e-3}               # of PPO; 1e-5 for a pretrained model
# ---------------------------------------------------------

RECIPES=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export TENSORBOARD_DIR=${TENSORBOARD_DIR:-$(realpath -m "$OUTPUT")/tensorboard}
if [[ $DEVICE == cpu ]]; then
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCH_COMPILE_DISABLE=1
fi

# Writes the tiny model with a script of the recipes, if the user names no model.
need_model() {
    if [[ -z $MODEL_PATH ]]; then
        MODEL_PATH=$OUTPUT/model
        "$PYTHON" "$RECIPES/$1" "$MODEL_PATH"
    fi
}

# Writes the toy task, if the user names no data; its file $1 is trained.
need_toy_data() {
    if [[ -z $TRAIN_FILE ]]; then
        "$PYTHON" "$RECIPES/toy_task.py" "$OUTPUT/data"
        TRAIN_FILE=$OUTPUT/data/$1
        TEST_FILE=$OUTPUT/data/test.parquet
        REWARD_FILE=$RECIPES/toy_task.py
    fi
}

# A folder as an absolute path; a model's name on a hub as it is.
model_path() {
    realpath -q "$MODEL_PATH" || echo "$MODEL_PATH"
}

# Where torchrun's processes run: scripts/cluster/launch.sh sets NNODES, NODE_RANK and HEAD_NODE.
torchrun_args() {
    WHERE=(--standalone)
    if ((NNODES > 1)); then
        if [[ -z $MODEL_PATH || -z $TRAIN_FILE ]]; then
            echo "run_qwen3_fsdp2.sh: on $NNODES nodes set MODEL_PATH and TRAIN_FILE to a disk that they share" >&2
            exit 2
        fi
        WHERE=(--nnodes="$NNODES" --node-rank="$NODE_RANK" --master-addr="$HEAD_NODE" --master-port="${MASTER_PORT:-29400}")
    fi
}

critic_args() {
    CRITIC=(
        critic.model.path="$(model_path)"
        critic.optim.lr="$CRITIC_LR"
        critic.ppo_max_token_len_per_gpu="$MAX_TOKENS"
    )
}

# What every trainer of verl reads: names, loggers, checkpoints. A checkpoint also holds the model as a Hugging Face folder.
trainer_args() {
    local recipe=$1 checkpoint=$2
    TRAINER=(
        trainer.project_name="$PROJECT"
        trainer.experiment_name="${EXPERIMENT:-$recipe}"
        trainer.logger="[console${LOGGER:+,$LOGGER}]"
        trainer.save_freq="$SAVE_FREQ"
        trainer.default_local_dir="$OUTPUT/checkpoints"
        "$checkpoint.save_contents=[model,optimizer,extra,hf_model]"
    )
}

# Runs verl's main_ppo, by tree_rl.train, with the config $2 of the recipe $1; what follows are overrides.
run_main_ppo() {
    local recipe=$1 config=$2 given
    shift 2
    if [[ -z $TEST_FILE ]]; then
        TEST_FREQ=-1
    fi
    trainer_args "$recipe" actor_rollout_ref.actor.checkpoint
    given=(
        data.train_files="$(realpath "$TRAIN_FILE")"
        data.val_files="$(realpath "${TEST_FILE:-$TRAIN_FILE}")"
        data.train_batch_size="$TRAIN_BATCH_SIZE"
        data.max_prompt_length="$PROMPT_LENGTH"
        data.max_response_length="$RESPONSE_LENGTH"
        actor_rollout_ref.model.path="$(model_path)"
        actor_rollout_ref.actor.optim.lr="$LR"
        actor_rollout_ref.actor.ppo_mini_batch_size="$MINI_BATCH_SIZE"
        actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$MAX_TOKENS"
        actor_rollout_ref.rollout.name="$ROLLOUT"
        actor_rollout_ref.rollout.n="$ROLLOUT_N"
        actor_rollout_ref.rollout.tensor_model_parallel_size=1
        actor_rollout_ref.rollout.gpu_memory_utilization=0.5
        machine="$DEVICE"
        trainer.n_gpus_per_node="$NGPUS"
        trainer.nnodes="$NNODES"
        trainer.total_training_steps="$STEPS"
        trainer.total_epochs=1000
        trainer.val_before_train=false
        trainer.test_freq="$TEST_FREQ"
        "${TRAINER[@]}"
    )
    if [[ -n ${REWARD_FILE:-} ]]; then
        given+=(reward.custom_reward_function.path="$(realpath "$REWARD_FILE")")
    fi
    "$PYTHON" -m tree_rl.train --config-path "$RECIPES/$recipe" --config-name "$config" "${given[@]}" "$@"
}
