# Sourced by the launch scripts: makes .venv in the repository's root on first use and installs the pinned dependencies.
# Reads PYTHON (an interpreter to use; default: python3.11, python3.12, python3, the first that fits).

MEGARL_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export MEGARL_ROOT

_fits() { command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1; }

_find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
    if _fits "$candidate"; then echo "$candidate"; return 0; fi
  done
  echo "megarl needs Python 3.11 or 3.12 (looked for: ${PYTHON:-python3.11, python3.12, python3}); set PYTHON to an interpreter" >&2
  return 1
}

_install() {
  local python="$1" pip
  "$python" -m venv "$MEGARL_ROOT/.venv"
  pip="$MEGARL_ROOT/.venv/bin/python -m pip --disable-pip-version-check --quiet install -c $MEGARL_ROOT/launch/constraints.txt"
  # torch first and alone: pulled in by another package it would bring gigabytes of CUDA libraries.
  $pip torch
  $pip setuptools
  $pip --no-build-isolation -e "$MEGARL_ROOT[dev]"
}

# Makes the environment unless one stands that was made from the same pins.
ensure_environment() {
  local stamp="$MEGARL_ROOT/.venv/.megarl-pins" pins python
  pins="$(cat "$MEGARL_ROOT/launch/constraints.txt" "$MEGARL_ROOT/setup.py" | cksum)"
  if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$pins" ]; then
    python="$(_find_python)" || return 1
    echo "Setting up $MEGARL_ROOT/.venv with $("$python" --version) (about two minutes, once)" >&2
    rm -f "$stamp"
    _install "$python" || { echo "Setting up the environment failed; see the messages above" >&2; return 1; }
    echo "$pins" >"$stamp"
  fi
  # One thread per process: on few cores more are slower.
  export PATH="$MEGARL_ROOT/.venv/bin:$PATH" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
}
