#!/usr/bin/env bash
# Trains a random model on arithmetic with PPO, on two CPU cores: environment, model and data, supervised warm-up, PPO, and
# answers of the trained policy with transformers.
#
#   bash launch/quickstart.sh                                   PPO (GAE, critic, KL to the reference)
#   bash launch/quickstart.sh --config-name quickstart_grpo     GRPO
#   SEED=2 bash launch/quickstart.sh trainer.total_training_steps=20
#   ROLLOUT=sglang bash launch/quickstart.sh                    PPO with SGLang as the rollout engine (2.6 GB more)
#
# Arguments are passed to `megarl train`. The checkpoint and the models in outputs/quickstart are those of the latest
# run of this script; they replace earlier ones.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment
rollout=()
if [ "${ROLLOUT:-embedded}" = sglang ]; then
  source "$MEGARL_ROOT/launch/sglang_cpu.sh"
  ensure_sglang_environment
  rollout=(actor_rollout_ref.rollout.name=sglang)
elif [ "${ROLLOUT:-embedded}" != embedded ]; then
  echo "ROLLOUT=$ROLLOUT, expected embedded or sglang" >&2
  exit 2
fi
cd "$MEGARL_ROOT"

seed="${SEED:-1}"
task=outputs/quickstart/task
warm=outputs/quickstart/warm

echo "== 1/4  A random model and its task (seed $seed)"
python tools/make_arithmetic.py --out "$task" --seed "$seed"

echo "== 2/4  Supervised warm-up, far from solved"
megarl sft --config-name quickstart_sft trainer.seed="$seed" trainer.overwrite_output=true

echo "== 3/4  Reinforcement learning"
case " $* " in *" --config-name"*) config=() ;; *) config=(--config-name quickstart) ;; esac
kept=(trainer.save_freq=40 trainer.hf_export_dir=outputs/quickstart/trained trainer.overwrite_output=true)
megarl train "${config[@]}" trainer.seed="$seed" "${kept[@]}" "${rollout[@]}" "$@"

echo "== 4/4  The trained policy, loaded with plain transformers"
python tools/ask.py --summary outputs/quickstart/summary.json "What is 25 + 4?" "What is 17 + 38?" "What is 40 + 2?"
