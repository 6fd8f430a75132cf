# Sourced by test.sh: runs one stage in the background, next to the others. Its output is printed whole, after theirs.

_stage=""
_stage_output=""

# start_stage COMMAND...: starts a command or function in a process group of its own. The script ends it when it ends itself,
# and Ctrl-C ends both.
start_stage() {
  trap end_stage EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  _stage_output="$(mktemp)"
  set -m  # a process group of its own; without it, background processes also ignore Ctrl-C
  (
    set +m
    trap - EXIT
    trap 'exit 130' INT
    "$@"
  ) </dev/null >"$_stage_output" 2>&1 &
  _stage=$!
  set +m
}

# finish_stage: prints the output of the stage from its beginning until its end; returns its status.
finish_stage() {
  local stage="$_stage" code=0
  tail --lines=+1 --follow --sleep-interval=0.5 --pid="$stage" "$_stage_output"
  wait "$stage" || code=$?
  _stage=""
  rm -f "$_stage_output"
  return "$code"
}

# end_stage: ends all processes of a stage that still runs: as by Ctrl-C, and after 20 s by force.
end_stage() {
  local moment
  if [ -n "$_stage" ]; then
    for moment in $(seq 200); do
      if [ "$moment" = 1 ]; then kill -INT -- "-$_stage" 2>/dev/null || break; fi
      kill -0 -- "-$_stage" 2>/dev/null || break
      sleep 0.1
    done
    kill -KILL -- "-$_stage" 2>/dev/null || true
    _stage=""
  fi
  rm -f "$_stage_output"
}
