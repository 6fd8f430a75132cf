# Shortens the documented commands for tests/e2e/test_e2e_docs.py, which sets BASH_ENV to this file: a small task, and jobs
# of one step. With MEGARL_DOCS=check, jobs end after the checks of their configuration; with MEGARL_DOCTOR=quick, the doctor
# skips its slow checks. WARM_DRIVERS is the socket of the server that forks jobs and scripts
# (tests/support/warm_drivers.py); without it they are processes of their own.

_python() { # _python [-m] PROGRAM ARGUMENT...
  if [ -z "${WARM_DRIVERS:-}" ]; then
    command python "$@"
    return
  fi
  if [ "$1" = -m ]; then shift; fi
  command python -S "$(dirname "$BASH_ENV")/../support/warm_drivers.py" "$WARM_DRIVERS" "$@"
}

_job() { # _job NAME ARGUMENT...
  local name="$1" more=()
  local rows=(data.train_batch_size=16)
  local few=("${rows[@]}" actor_rollout_ref.actor.ppo_mini_batch_size=16)
  case " $* " in
    *" --cfg "* | *" --help "*) ;;
    *"trainer.dry_run=true"*) if [ "$name" != sft ]; then more=("${few[@]}"); else more=("${rows[@]}"); fi ;;
    *)
      case "$MEGARL_DOCS $name" in
        check*) more=(--cfg job) ;;
        "step train" | "step grpo" | "step ppo" | "step distill") more=(trainer.total_training_steps=1 trainer.val_before_train=false "${few[@]}") ;;
        "step sft") more=(trainer.total_training_steps=2 "${rows[@]}") ;;
      esac
      ;;
  esac
  _python -m megarl.cli "$@" "${more[@]}"
}

megarl() {
  case "$1" in
    train | grpo | ppo | distill | sft | reward-model | preference | dpo | evaluate | generate) _job "$@" ;;
    doctor) # the slow checks at most once: those of a configuration are quick
      case "$MEGARL_DOCTOR $* " in
        *" --config-name "* | quick*" --json "*) _python -m megarl.cli "$@" --quick ;;
        *) _python -m megarl.cli "$@" ;;
      esac ;;
    *) _python -m megarl.cli "$@" ;;
  esac
}

python() {
  case "$1 ${2:-}" in
    "-m megarl") megarl "${@:3}" ;;
    "tools/make_arithmetic.py "*)
      _python "$@" --hidden 32 --layers 2 --largest 9 --num-test 20 --lessons 60 60 ;;
    "tools/make_search_task.py "*)
      _python "$@" --hidden 32 --num-test 16 --demonstrations 64 ;;
    "tools/retrieval_server.py "*) exec python "$@" ;; # in the background: a signal to the job reaches the server
    "tools/compare_runs.py "*) if [ "$MEGARL_DOCS" = step ]; then _python "$@"; else _python "$1" --help; fi ;;
    tools/*.py\ *) _python "$@" ;;
    *) command python "$@" ;;
  esac
}
