#!/usr/bin/env bash
# GRPO on a dense 7B model that learns to use a search engine: one node of 8 GPUs with 80 GB. launch/search_agent.sh
# is a small version for a laptop, with its retrieval server.
#
#   MODEL=/shared/Qwen2.5-7B-Instruct DATA=/shared/nq/train.parquet RETRIEVER=http://search:8000/retrieve HOSTS=hosts.txt bash launch/run_search_agent.sh
#   ... bash launch/run_search_agent.sh trainer.total_epochs=1 --cfg job
#
# RETRIEVER  address of a retrieval server, reachable from the head: `python tools/retrieval_server.py`, or a compatible one
# launch/cluster.sh describes all other variables.
# configs/run_search_agent.yaml gives a reason for each value.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/cluster.sh"
need RETRIEVER "the address of a retrieval server, such as http://search:8000/retrieve"
run_on_cluster run_search_agent actor_rollout_ref.rollout.multi_turn.search.url="$RETRIEVER" "$@"
