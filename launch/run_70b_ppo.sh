#!/usr/bin/env bash
# PPO on a dense 70B model with a critic of its size: 16 nodes of 8 GPUs with 80 GB.
#
#   MODEL=/shared/Llama-3.3-70B-Instruct DATA=/shared/data/train.parquet HOSTS=hosts.txt bash launch/run_70b_ppo.sh
#   ... bash launch/run_70b_ppo.sh trainer.total_epochs=1 --cfg job
#
# CRITIC  Hugging Face folder of the critic's initial weights; MODEL unless set
# launch/cluster.sh describes all other variables.
# configs/run_70b_ppo.yaml gives a reason for each value.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/cluster.sh"
run_on_cluster run_70b_ppo ${CRITIC:+critic.model.path="$CRITIC"} "$@"
