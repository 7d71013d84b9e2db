#!/usr/bin/env bash
# DPO on trees. Without arguments it trains a tiny model on a CPU; see README.md.
set -euo pipefail

# ---- user-adjustable, besides what recipes/launcher.sh lists ----
TRAIN_FILE=${TRAIN_FILE:-}                 # parquet with `prompt`, `chosen`, `rejected`; empty: the toy task
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-16}   # pairs per optimizer step
MAX_LENGTH=${MAX_LENGTH:-1024}
BETA=${BETA:-0.1}
LR=${LR:-1e-3}                             # for the tiny model; 1e-6 for a pretrained one
EPOCHS=${EPOCHS:-4}
OUTPUT=${OUTPUT:-outputs/dpo}
# -----------------------------------------------------------------

# shellcheck source=recipes/launcher.sh
source "$(dirname "${BASH_SOURCE[0]}")/../launcher.sh"
torchrun_args
need_model tiny_model.py
need_toy_data dpo.parquet
trainer_args dpo checkpoint

"$PYTHON" -m torch.distributed.run "${WHERE[@]}" --nproc-per-node="$NGPUS" -m tree_rl.train dpo \
    data.train_files="$(realpath "$TRAIN_FILE")" \
    data.train_batch_size="$TRAIN_BATCH_SIZE" \
    data.max_length="$MAX_LENGTH" \
    data.max_token_len_per_gpu="$MAX_TOKENS" \
    data.num_workers=0 \
    model.path="$(model_path)" \
    dpo.beta="$BETA" \
    optim.lr="$LR" \
    machine="$DEVICE" \
    trainer.total_epochs="$EPOCHS" \
    "${TRAINER[@]}" \
    trainer.resume_mode="$([[ $SAVE_FREQ == -1 ]] && echo disable || echo auto)" \
    "$@"
