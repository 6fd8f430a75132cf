#!/usr/bin/env bash
# Asynchronous GRPO on a dense 32B model with long reasoning: 8 nodes of 8 GPUs with 80 GB, 4 of them for generation.
#
#   MODEL=/shared/Qwen2.5-32B DATA=/shared/data/train.parquet HOSTS=hosts.txt bash launch/run_32b_async.sh
#   ... bash launch/run_32b_async.sh trainer.total_epochs=1 --cfg job
#
# launch/cluster.sh describes all variables.
# configs/run_32b_async.yaml gives a reason for each value.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/cluster.sh"
run_on_cluster run_32b_async "$@"
