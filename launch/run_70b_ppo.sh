#!/usr/bin/env bash
# PPO on a dense 70B model with a critic of its size: 16 nodes of 8 GPUs with 80 GB.
#
#   MODEL=/shared/Llama-3.3-70B-Instruct DATA=/shared/data/train.parquet HOSTS=hosts.txt bash launch/run_70b_ppo.sh
#   ... bash launch/run_70b_ppo.sh trainer.total_epochs=1 --cfg job
#
# CRITIC  Hugging Face folder that the critic begins with; MODEL unless set
# All other settings are described in launch/cluster.sh.
# Why each value is what it is stands in configs/run_70b_ppo.yaml.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/cluster.sh"
run_on_cluster run_70b_ppo ${CRITIC:+critic.model.path="$CRITIC"} "$@"
