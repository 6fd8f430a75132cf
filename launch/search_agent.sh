#!/usr/bin/env bash
# Trains a random model as a search agent with GRPO, on two CPU cores: a corpus of random facts, a supervised warm-up on the
# format, the retrieval server, training, and sample conversations of the trained policy.
#
#   bash launch/search_agent.sh                                      GRPO
#   SEED=2 bash launch/search_agent.sh trainer.total_training_steps=50
#   RETRIEVER_PORT=8100 bash launch/search_agent.sh                  if port 8000 is in use
#
# Arguments are passed to `megarl train`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment
cd "$MEGARL_ROOT"

seed="${SEED:-1}"
port="${RETRIEVER_PORT:-8000}"
task=outputs/search_agent/task

echo "== 1/5  A corpus, questions about it, and a random model (seed $seed)"
python tools/make_search_task.py --out "$task" --seed "$seed"

echo "== 2/5  Supervised warm-up: the format, not the facts"
megarl sft --config-name search_agent_sft trainer.seed="$seed" trainer.overwrite_output=true

echo "== 3/5  The retrieval server"
python tools/retrieval_server.py --corpus "$task/corpus.jsonl" --port "$port" &
server=$!
trap 'kill "$server" 2>/dev/null || true' EXIT
for _ in $(seq 100); do
  kill -0 "$server" || { echo "the retrieval server did not start; is port $port in use? (RETRIEVER_PORT=...)" >&2; exit 1; }
  python - "$port" 2>/dev/null <<'CHECK' && break
import sys, urllib.request
urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"http://127.0.0.1:{sys.argv[1]}/health", timeout=2)
CHECK
  sleep 0.2
done

echo "== 4/5  Reinforcement learning"
megarl train --config-name search_agent trainer.seed="$seed" trainer.overwrite_output=true \
  actor_rollout_ref.rollout.multi_turn.search.url="http://127.0.0.1:$port/retrieve" "$@"

echo "== 5/5  Conversations about held-out people, at the last validation"
python - outputs/search_agent/validation <<'SHOW'
import json, pathlib, sys
files = sorted(pathlib.Path(sys.argv[1]).glob("*.jsonl"), key=lambda file: int(file.stem))
for file in (files[0], files[-1]):
    rows = [json.loads(line) for line in file.read_text().split("\n") if line]
    correct = sum(row["score"] == 1 for row in rows)
    print(f"\nstep {file.stem}: {correct} of {len(rows)} answers are correct")
    for row in rows[:3]:
        print(f"  {row['input']}\n    {' '.join(row['output'].split())}\n    expected: {row['gts']['target']}")
SHOW
