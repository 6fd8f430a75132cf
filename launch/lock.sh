#!/usr/bin/env bash
# Writes the constraint files in megarl/pins/ from the requirements in pyproject.toml, with uv (`pip install uv`). A version
# in a file stays unless a requirement excludes it, or an argument for `uv pip compile` frees it.
#
#   bash launch/lock.sh                                   after a change of the requirements
#   bash launch/lock.sh --upgrade-package transformers    the newest version of one package
#   bash launch/lock.sh --upgrade                         the newest versions of all
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export UV_PYTHON_DOWNLOADS=never LC_ALL=C
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# compile STACK PYTHON EXTRAS ARGUMENT...: the versions of a stack for x86-64 Linux, sorted, in $work/STACK-PYTHON.
compile() {
  local file="$work/$1-$2" extras
  extras="$(printf -- '--extra %s ' $3)"
  cp "megarl/pins/$1.txt" "$file"
  uv pip compile pyproject.toml --quiet --no-header --no-annotate --python-platform x86_64-manylinux_2_35 \
    --python-version "$2" $extras --output-file "$file" "${@:4}" >/dev/null
  sort -o "$file" "$file"
}

tools="bench code dashboard math report search sweep tensorboard wandb swanlab mlflow"
compile default 3.11 "dev gpu $tools" "$@"
compile default 3.12 "dev gpu $tools" "$@"
compile sglang 3.12 "gpu sglang $tools" "$@"
{
  cat <<'TEXT'
# Written by launch/lock.sh. CPUs, Python 3.11 and 3.12: all tests pass with these versions. GPUs with the embedded engine,
# Python 3.12: the versions meet each other's requirements; no GPU has run them.
TEXT
  {
    comm -12 "$work"/default-3.1{1,2}
    comm -23 "$work"/default-3.1{1,2} | sed 's/$/ ; python_version < "3.12"/'
    comm -13 "$work"/default-3.1{1,2} | sed 's/$/ ; python_version >= "3.12"/'
  } | sort
} >"$work/default.txt"
{
  cat <<'TEXT'
# Written by launch/lock.sh. GPUs with SGLang, Python 3.12. SGLang requires its own torch, so this file replaces default.txt.
# The versions meet each other's requirements; no GPU has run them.
TEXT
  cat "$work/sglang-3.12"
} >"$work/sglang.txt"
cp "$work"/{default,sglang}.txt megarl/pins/
