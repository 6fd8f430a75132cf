#!/usr/bin/env bash
# GRPO on a mixture of experts of 30B parameters, 3B active (Qwen3-30B-A3B): 4 nodes of 8 GPUs with 80 GB.
#
#   MODEL=/shared/Qwen3-30B-A3B DATA=/shared/data/train.parquet HOSTS=hosts.txt bash launch/run_30b_a3b_grpo.sh
#   ... bash launch/run_30b_a3b_grpo.sh trainer.total_epochs=1 --cfg job
#
# launch/cluster.sh describes all variables.
# configs/run_30b_a3b_grpo.yaml gives a reason for each value.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/cluster.sh"
run_on_cluster run_30b_a3b_grpo "$@"
