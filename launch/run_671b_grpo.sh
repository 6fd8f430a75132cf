#!/usr/bin/env bash
# GRPO on a mixture of experts of 671B parameters (DeepSeek-V3, R1): 32 nodes of 8 GPUs with 80 GB for training, and SGLang
# servers on further nodes.
#
#   MODEL=/shared/DeepSeek-V3-bf16 DATA=/shared/train.parquet SERVERS=http://s1:30000,http://s2:30000 HOSTS=hosts.txt bash launch/run_671b_grpo.sh
#   ... bash launch/run_671b_grpo.sh trainer.total_epochs=1 --cfg job
#
# SERVERS         addresses of SGLang servers over 32 GPUs each (--tp-size 32), started as in docs/how_to/rollout.md
# SGLANG_API_KEY  the API key that they were started with
# launch/cluster.sh describes all other variables.
#
# configs/run_671b_grpo.yaml gives a reason for each value.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/cluster.sh"
need SERVERS "the addresses of the SGLang servers, http://host:port,..."
run_on_cluster run_671b_grpo actor_rollout_ref.rollout.engine_kwargs.sglang.urls="[$SERVERS]" "$@"
