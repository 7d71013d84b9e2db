#!/usr/bin/env bash
# Tree SFT. Without arguments it trains a tiny model on a CPU; see README.md.
set -euo pipefail

# ---- user-adjustable ----
MODEL_PATH=${MODEL_PATH:-}                 # empty: a tiny Qwen3 with random weights
NGPUS=${NGPUS:-1}                          # training processes per node
NNODES=${NNODES:-1}                        # scripts/cluster/launch.sh sets this, NODE_RANK and HEAD_NODE
DEVICE=${DEVICE:-$(nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)}
TRAIN_FILE=${TRAIN_FILE:-}                 # parquet with `messages`; empty: the toy task of recipes/toy_task.py
GROUP_KEY=${GROUP_KEY:-conversation}       # column that names the conversation of a row; null if there is none
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-16}   # rows per optimizer step
MAX_LENGTH=${MAX_LENGTH:-1024}
MAX_TOKENS=${MAX_TOKENS:-16384}            # unique tokens of one micro-batch
LR=${LR:-1e-3}                             # for the tiny model; 1e-5 for a pretrained one
EPOCHS=${EPOCHS:-4}
OUTPUT=${OUTPUT:-outputs/sft}
PYTHON=${PYTHON:-python3}
# -------------------------

if ((NNODES > 1)) && [[ -z $MODEL_PATH || -z $TRAIN_FILE ]]; then
    echo "run_qwen3_fsdp2.sh: on $NNODES nodes set MODEL_PATH and TRAIN_FILE to a disk that they share" >&2
    exit 2
fi
WHERE=(--standalone)
if ((NNODES > 1)); then
    WHERE=(--nnodes="$NNODES" --node-rank="$NODE_RANK" --master-addr="$HEAD_NODE" --master-port="${MASTER_PORT:-29400}")
fi
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
RECIPES=$(dirname "$HERE")
if [[ -z $MODEL_PATH ]]; then
    MODEL_PATH=$OUTPUT/model
    "$PYTHON" "$RECIPES/tiny_model.py" "$MODEL_PATH"
fi
if [[ -z $TRAIN_FILE ]]; then
    "$PYTHON" "$RECIPES/toy_task.py" "$OUTPUT/data"
    TRAIN_FILE=$OUTPUT/data/sft.parquet
fi
[[ $DEVICE == cpu ]] && export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCH_COMPILE_DISABLE=1

DATA=(
    data.train_files="$(realpath "$TRAIN_FILE")"
    data.group_key="$GROUP_KEY"
    data.train_batch_size="$TRAIN_BATCH_SIZE"
    data.max_length="$MAX_LENGTH"
    data.max_token_len_per_gpu="$MAX_TOKENS"
    data.num_workers=0
)
MODEL=(
    model.path="$(realpath -q "$MODEL_PATH" || echo "$MODEL_PATH")"
    optim.lr="$LR"
)
TRAINER=(
    machine="sft_$DEVICE"
    trainer.total_epochs="$EPOCHS"
    trainer.default_local_dir="$OUTPUT/checkpoints"
    trainer.resume_mode=disable
)

"$PYTHON" -m torch.distributed.run "${WHERE[@]}" --nproc-per-node="$NGPUS" -m tree_rl.verl_plugin.sft \
    --config-path "$HERE" --config-name tree_sft \
    "${DATA[@]}" "${MODEL[@]}" "${TRAINER[@]}" "$@"
