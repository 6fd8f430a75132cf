#!/usr/bin/env bash
# Trains a small vision-language model with GRPO, on two CPU cores: pictures, a warmed-up model that errs on purpose, training
# with a frozen vision tower, and answers of the trained policy. The task is to count squares; with `zoom` as first argument,
# to find the quarter of a picture whose squares count, which a later turn shows larger (examples/zoom_agent.py).
#
#   bash launch/vision.sh                                                     count squares
#   bash launch/vision.sh zoom                                                zoom in, then count
#   SEED=2 bash launch/vision.sh trainer.total_training_steps=60
#   bash launch/vision.sh async_training.mode=colocated async_training.max_staleness=1
#
# Other arguments are passed to `megarl train`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment
cd "$MEGARL_ROOT"

seed="${SEED:-1}"
name=vision tool=tools/make_squares.py
if [ "${1:-}" = zoom ]; then name=zoom tool=tools/make_zoom.py; shift; fi
task="outputs/$name/task"

echo "== 1/3  Pictures, and a model that errs (seed $seed)"
python "$tool" --out "$task" --seed "$seed"

echo "== 2/3  Reinforcement learning"
megarl train --config-name "$name" trainer.seed="$seed" trainer.hf_export_dir="outputs/$name/trained" trainer.overwrite_output=true "$@"

echo "== 3/3  Answers about held-out pictures"
if [ "$name" = vision ]; then
  python tools/count_squares.py --model outputs/vision/trained --pictures "$task/data/test.parquet"
else
  python tools/show_answers.py outputs/zoom/validation
fi
