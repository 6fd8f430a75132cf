# Sourced by the cluster scripts. Each script selects a configuration. These variables set its inputs and its cluster:
#
#   MODEL     Hugging Face folder of the policy, at the same path on every node
#   DATA      training data (docs/how_to/data.md)
#   VAL_DATA  held-out data; without it, no validation.  TEST_FREQ  steps between validations, 20 unless set
#   REWARD    name of a reward function (docs/how_to/rewards.md); selected by data_source unless set
#   HOSTS     hosts to reach by ssh: host1,host2,... or a file; the first is the head. Unset inside a SLURM
#             allocation and on one machine
#   SUBMIT    sbatch: print a batch script, or submit it with LAUNCH="--submit --sbatch=--time=2-0"
#   RESTARTS  restarts after failures, 3 unless set; each resumes from the newest checkpoint
#   OUTPUT    folder for the checkpoints, on a file system that all nodes share; outputs/<name>/checkpoints unless set
#   LAUNCH    further options of `megarl launch`, see docs/how_to/launch.md
#   PYTHON    interpreter with megarl, here and on the nodes; python unless set
#
# Arguments are overrides KEY=VALUE; --cfg job prints the configuration and starts nothing.
MEGARL_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# need NAME MEANING: ends the script if a variable is not set.
need() {
  if [ -z "${!1:-}" ]; then
    echo "$(basename "$0"): $1 is not set; it is $2. Example: $1=... bash $0; the variables are listed in its first lines" >&2
    exit 2
  fi
}

# run_on_cluster CONFIG OVERRIDE...: runs the launcher from the repository's root.
run_on_cluster() {
  need MODEL "the Hugging Face folder of the policy"
  need DATA "the training data"
  local python="${PYTHON:-python}" place=() more=() job=(train --config-name "$1")
  job+=(actor_rollout_ref.model.path="$MODEL" data.train_files="$DATA" ${OUTPUT:+"trainer.default_local_dir=$OUTPUT"})
  job+=(${VAL_DATA:+data.val_files="$VAL_DATA" trainer.test_freq="${TEST_FREQ:-20}"} ${REWARD:+reward.name="$REWARD"})
  job+=("${@:2}")
  command -v "$python" >/dev/null || { echo "$(basename "$0"): $python is not found; set PYTHON to an interpreter with megarl" >&2; exit 2; }
  cd "$MEGARL_ROOT"
  case " $* " in *" --cfg "* | *" -c "*) exec "$python" -m megarl.cli "${job[@]}" ;; esac
  if [ -n "${HOSTS:-}" ]; then place=(--hosts "$HOSTS"); fi
  if [ -n "${SUBMIT:-}" ]; then place=(--on "$SUBMIT"); fi
  read -r -a more <<<"${LAUNCH:-}" || true
  exec "$python" -m megarl.ops.launch ${place[@]+"${place[@]}"} --max-restarts "${RESTARTS:-3}" ${more[@]+"${more[@]}"} "${job[@]}"
}
