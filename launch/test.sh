#!/usr/bin/env bash
# Sets up the environment and runs lint, types, import contracts and all tests, and those of the report's page in a browser
# where there is one; then sets up SGLang's environment and runs the tests of it that are marked `sglang` (docs/rollout.md).
#
#   bash launch/test.sh                     everything
#   SGLANG=0 bash launch/test.sh            without SGLang
#   SGLANG=only bash launch/test.sh         SGLang's alone
#   BROWSER=/opt/chrome bash launch/test.sh the tests of the report's page in that browser; BROWSER=0: in none; by default in
#                                           the first of Chromium's family that is on PATH; see launch/browser.sh
#   bash launch/test.sh tests/models -x     arguments go to pytest; SGLang and the browser are left out then
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
sglang="${SGLANG:-$([ $# -eq 0 ] && echo 1 || echo 0)}"
case "$sglang" in 0 | 1 | only) ;; *) echo "SGLANG=$sglang, expected 0, 1 or only" >&2; exit 2 ;; esac
ensure_environment
cd "$MEGARL_ROOT"

if [ "$sglang" != only ]; then
  ruff check .
  ruff format --check .
  mypy
  lint-imports
  # Two lanes: while one waits for processes to start, the other computes. A file's tests stay together, for
  # they share what is slow to start, and files keep their order, in which the longest are not the last.
  python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
  if [ $# -eq 0 ]; then
    source "$MEGARL_ROOT/launch/browser.sh"
    if browser="$(find_browser)"; then
      echo "== The report's page in a browser: $browser ($("$browser" --version 2>/dev/null))"
      BROWSER="$browser" python -m pytest -m browser tests/tracking
    else
      echo "== NOT RUN: the tests of the report's page in a browser (pytest -m browser), for want of one; see above" >&2
    fi
  fi
fi
if [ "$sglang" != 0 ]; then
  source "$MEGARL_ROOT/launch/sglang_cpu.sh"
  ensure_sglang_environment
  python -m pytest -m sglang tests/rollout tests/e2e
fi
