#!/usr/bin/env bash
# GRPO on a dense 8B model: one node of 8 GPUs with 80 GB.
#
#   MODEL=/shared/Qwen3-8B DATA=/shared/data/train.parquet HOSTS=hosts.txt bash launch/run_8b_grpo.sh
#   ... bash launch/run_8b_grpo.sh trainer.total_epochs=1 --cfg job
#
# launch/cluster.sh describes all variables.
# configs/run_8b_grpo.yaml gives a reason for each value.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/cluster.sh"
run_on_cluster run_8b_grpo "$@"
