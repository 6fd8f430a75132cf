# Sourced by test.sh: runs one stage in the background, next to the others. Its output is printed whole, after theirs.

_lane=""
_lane_output=""

# start_lane COMMAND...: starts a command or function in a process group of its own. The script ends it when it ends itself,
# and Ctrl-C ends both.
start_lane() {
  trap end_lane EXIT
  trap 'exit 130' INT
  trap 'exit 143' TERM
  _lane_output="$(mktemp)"
  set -m  # a process group of its own; without it, background processes also ignore Ctrl-C
  (
    set +m
    trap - EXIT
    trap 'exit 130' INT
    "$@"
  ) </dev/null >"$_lane_output" 2>&1 &
  _lane=$!
  set +m
}

# finish_lane: prints the output of the lane from its beginning until its end; returns its status.
finish_lane() {
  local lane="$_lane" code=0
  tail --lines=+1 --follow --sleep-interval=0.5 --pid="$lane" "$_lane_output"
  wait "$lane" || code=$?
  _lane=""
  rm -f "$_lane_output"
  return "$code"
}

# end_lane: ends all processes of a lane that still runs: as by Ctrl-C, and after 20 s by force.
end_lane() {
  local moment
  if [ -n "$_lane" ]; then
    for moment in $(seq 200); do
      if [ "$moment" = 1 ]; then kill -INT -- "-$_lane" 2>/dev/null || break; fi
      kill -0 -- "-$_lane" 2>/dev/null || break
      sleep 0.1
    done
    kill -KILL -- "-$_lane" 2>/dev/null || true
    _lane=""
  fi
  rm -f "$_lane_output"
}
