#!/usr/bin/env bash
# GRPO on a dense 7B model that learns to ask a search engine: one node of 8 GPUs with 80 GB. The same in small, from
# nothing on a laptop and with a retrieval server started for it, is launch/search_agent.sh.
#
#   MODEL=/shared/Qwen2.5-7B-Instruct DATA=/shared/nq/train.parquet RETRIEVER=http://search:8000/retrieve HOSTS=hosts.txt bash launch/run_search_agent.sh
#   ... bash launch/run_search_agent.sh trainer.total_epochs=1 --cfg job
#
# RETRIEVER  address of a server that the head node reaches: `megarl retrieval-server`, or any with its protocol
# All other settings are described in launch/cluster.sh.
# Why each value is what it is stands in configs/run_search_agent.yaml.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/cluster.sh"
need RETRIEVER "the address of a retrieval server, such as http://search:8000/retrieve"
run_on_cluster run_search_agent retriever.url="$RETRIEVER" "$@"
