#!/usr/bin/env bash
# Tree SFT. Without arguments it trains a tiny model on a CPU; see README.md.
set -euo pipefail

# ---- user-adjustable, besides what recipes/launcher.sh lists ----
TRAIN_FILE=${TRAIN_FILE:-}                 # parquet with `messages`; empty: the toy task of recipes/toy_task.py
GROUP_KEY=${GROUP_KEY:-conversation}       # column that names the conversation of a row; null if there is none
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-16}   # rows per optimizer step
MAX_LENGTH=${MAX_LENGTH:-1024}
LR=${LR:-1e-3}                             # for the tiny model; 1e-5 for a pretrained one
EPOCHS=${EPOCHS:-4}
OUTPUT=${OUTPUT:-outputs/sft}
# -----------------------------------------------------------------

# shellcheck source=recipes/launcher.sh
source "$(dirname "${BASH_SOURCE[0]}")/../launcher.sh"
torchrun_args
need_model tiny_model.py
need_toy_data sft.parquet
trainer_args sft checkpoint

"$PYTHON" -m torch.distributed.run "${WHERE[@]}" --nproc-per-node="$NGPUS" -m tree_rl.sft \
    --config-path "$RECIPES/sft" --config-name tree_sft \
    data.train_files="$(realpath "$TRAIN_FILE")" \
    data.group_key="$GROUP_KEY" \
    data.train_batch_size="$TRAIN_BATCH_SIZE" \
    data.max_length="$MAX_LENGTH" \
    data.max_token_len_per_gpu="$MAX_TOKENS" \
    data.num_workers=0 \
    model.path="$(model_path)" \
    optim.lr="$LR" \
    machine="sft_$DEVICE" \
    trainer.total_epochs="$EPOCHS" \
    "${TRAINER[@]}" \
    trainer.resume_mode="$([[ $SAVE_FREQ == -1 ]] && echo disable || echo auto)" \
    "$@"
