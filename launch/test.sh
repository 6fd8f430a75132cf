#!/usr/bin/env bash
# Sets up the environment, then runs lint, types, import contracts and all tests, with the browser tests of the report's page
# if a browser is found; then the tests marked `sglang` in SGLang's environment (docs/rollout.md).
#
#   bash launch/test.sh                     everything, as in CI
#   bash launch/test.sh --fast              lint, types, contracts, and the tests without worker processes
#   SGLANG=0 bash launch/test.sh            without SGLang
#   SGLANG=only bash launch/test.sh         only SGLang's tests
#   BROWSER=/opt/chrome bash launch/test.sh the browser tests in that browser; BROWSER=0: none; default: the first browser
#                                           of Chromium's family on PATH; see launch/browser.sh
#   bash launch/test.sh tests/models -x     arguments go to pytest; SGLang and the browser are skipped then
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
select=()
if [ "${1:-}" = --fast ]; then
  shift
  select=(-m "not slow and not browser")
fi
sglang="${SGLANG:-$([ $# -eq 0 ] && [ ${#select[@]} -eq 0 ] && echo 1 || echo 0)}"
case "$sglang" in 0 | 1 | only) ;; *) echo "SGLANG=$sglang, expected 0, 1 or only" >&2; exit 2 ;; esac
ensure_environment
cd "$MEGARL_ROOT"
status=0  # a failed test does not hide those of the later stages

if [ "$sglang" != only ]; then
  mypy &  # takes as long as the other checks together
  types=$!
  # The first import of a package compiles it, which can exceed the time limits of some tests of trackers.
  python -c "import mlflow, swanlab, torch.utils.tensorboard, wandb" &
  compiled=$!
  ruff check .
  ruff format --check .
  lint-imports
  wait "$types"
  wait "$compiled"
  # Two workers: while one waits for processes to start, the other computes. Tests of a file share slow fixtures, so they
  # stay together. Files keep their order: the longest come first (tests/conftest.py).
  python -m pytest -n 2 --dist loadfile --no-loadscope-reorder ${select[@]+"${select[@]}"} "$@" || status=$?
  if [ $# -eq 0 ] && [ ${#select[@]} -eq 0 ]; then
    source "$MEGARL_ROOT/launch/browser.sh"
    if browser="$(find_browser)"; then
      echo "== The report's page in a browser: $browser ($("$browser" --version 2>/dev/null))"
      BROWSER="$browser" python -m pytest -m browser tests/ops/report || status=$?
    else
      echo "== NOT RUN: the tests of the report's page in a browser (pytest -m browser): no browser found; see above" >&2
    fi
  fi
fi
if [ "$sglang" != 0 ]; then
  source "$MEGARL_ROOT/launch/sglang_cpu.sh"
  ensure_sglang_environment
  # Two processes: one with the tests that share engines, the other with whole runs, whose output follows.
  runs="$(mktemp)"
  python -m pytest -m sglang tests/e2e >"$runs" 2>&1 &
  whole_runs=$!
  python -m pytest -m sglang tests/rollout || status=$?
  wait "$whole_runs" || status=$?
  cat "$runs"
  rm "$runs"
fi
exit "$status"
