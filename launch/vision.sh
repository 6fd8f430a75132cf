#!/usr/bin/env bash
# Trains a small vision-language model to count squares in pictures with GRPO, on two CPU cores: pictures, a warmed-up model
# that often misses a square, training with a frozen vision tower, and answers of the trained policy.
#
#   bash launch/vision.sh                                                     GRPO
#   SEED=2 bash launch/vision.sh trainer.total_training_steps=60
#   bash launch/vision.sh async_training.mode=colocated async_training.max_staleness=1
#
# Arguments are passed to `megarl train`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment
cd "$MEGARL_ROOT"

seed="${SEED:-1}"
task=outputs/vision/task

echo "== 1/3  Pictures, and a model that misses squares (seed $seed)"
python tools/make_squares.py --out "$task" --seed "$seed"

echo "== 2/3  Reinforcement learning"
megarl train --config-name vision trainer.seed="$seed" trainer.hf_export_dir=outputs/vision/trained trainer.overwrite_output=true "$@"

echo "== 3/3  Answers about held-out pictures, with plain transformers"
python tools/count_squares.py --model outputs/vision/trained --pictures "$task/data/test.parquet"
