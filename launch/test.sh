#!/usr/bin/env bash
# Sets up the environment, then runs lint, types, import contracts and all tests, with the browser tests of the report's page
# if a browser is found. The tests marked `sglang` run meanwhile in SGLang's environment (docs/how_to/rollout.md), which is set up
# first if needed; their output follows that of the other stages. Everything takes about 20 minutes on two cores.
#
#   bash launch/test.sh                     everything, as in CI
#   RELEASE=1 bash launch/test.sh           also the tests marked `release`, for which CI runs cheaper ones
#   bash launch/test.sh --fast              lint, types, contracts, and the tests without worker processes
#   SGLANG=0 bash launch/test.sh            without SGLang
#   SGLANG=only bash launch/test.sh         only SGLang's tests
#   BROWSER=/opt/chrome bash launch/test.sh the browser tests in that browser; BROWSER=0: none; default: the first browser
#                                           of Chromium's family on PATH; see launch/browser.sh
#   CUDA_HOST=1 bash launch/test.sh         only the tests of torch's CUDA host code, without a GPU, in an environment of
#                                           their own with a CUDA build of torch (5 GB); not part of the other runs
#   CLUSTER=1 bash launch/test.sh           only the launcher on real sshd and SLURM, between three hosts on this machine; needs
#                                           root and Debian's openssh-server, slurm-wlm, munge, iproute2 and gcc (25 minutes)
#   bash launch/test.sh tests/models -x     arguments go to pytest; SGLang and the browser are skipped then
#
# A failed test does not hide those of other stages. Ctrl-C ends all of them.
set -euo pipefail
trap 'exit 130' INT  # pytest ends with a code of its own, after which the next stage would begin
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
source "$MEGARL_ROOT/launch/background_stage.sh"
select=()
if [ "${1:-}" = --fast ]; then
  shift
  select=(-m "not slow and not browser")
fi
sglang="${SGLANG:-$([ $# -eq 0 ] && [ ${#select[@]} -eq 0 ] && echo 1 || echo 0)}"
case "$sglang" in 0 | 1 | only) ;; *) echo "SGLANG=$sglang, expected 0, 1 or only" >&2; exit 2 ;; esac

# One process: its engines compute while the other tests wait. First the tests that share engines, then whole runs.
test_sglang() {
  local code=0 folder
  source "$MEGARL_ROOT/launch/sglang_cpu.sh"
  ensure_sglang_environment || return 1
  for folder in tests/rollout tests/e2e; do
    python -m pytest -m sglang "$folder" || code=$?
  done
  return "$code"
}

if [ "${CUDA_HOST:-0}" = 1 ]; then
  source "$MEGARL_ROOT/launch/cuda_host.sh"
  ensure_cuda_host_environment
  cd "$MEGARL_ROOT"
  exec python -m pytest tests/cuda_host "$@"
fi
ensure_environment
cd "$MEGARL_ROOT"
if [ "${CLUSTER:-0}" = 1 ]; then exec python -m pytest tests/testbed "$@"; fi
status=0 missing=""
if [ "$sglang" = only ]; then
  test_sglang || status=$?
  exit "$status"
fi
if [ "$sglang" = 1 ]; then start_stage test_sglang; fi

MYPYPATH=tests:tools mypy -p megarl -p support &  # takes as long as the other checks together
types=$!
# The first import of a package compiles it, which can exceed the time limits of some tests of trackers.
python -c "import mlflow, swanlab, torch.utils.tensorboard, wandb" &
compiled=$!
ruff check .
ruff format --check .
lint-imports
python tools/check_structure.py > /dev/null || python tools/check_structure.py
wait "$types"
wait "$compiled"
if [ $# -eq 0 ] && [ ${#select[@]} -eq 0 ]; then
  source "$MEGARL_ROOT/launch/browser.sh"
  if browser="$(find_browser)"; then
    echo "== The report's page in a browser: $browser ($("$browser" --version 2>/dev/null))"
    BROWSER="$browser" python -m pytest -m browser tests/ops/report || status=$?
  else
    missing="== NOT RUN: the tests of the report's page in a browser (pytest -m browser): no browser found; see above"
  fi
fi
# Four workers: they wait for processes half of the time. Tests of a file share slow fixtures, so they stay together. Files
# keep their order: the longest come first (tests/conftest.py).
python -m pytest -n 4 --dist loadfile --no-loadscope-reorder ${select[@]+"${select[@]}"} "$@" || status=$?
if [ -n "$missing" ]; then echo "$missing" >&2; fi
if [ "$sglang" = 1 ]; then
  echo "== The tests with SGLang, in its environment"
  finish_stage || status=$?
fi
exit "$status"
