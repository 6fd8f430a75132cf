#!/usr/bin/env bash
# Sets up the environment and runs lint, types, import contracts and all tests. Arguments go to pytest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment
cd "$MEGARL_ROOT"

ruff check .
ruff format --check .
mypy
lint-imports
python -m pytest "$@"
