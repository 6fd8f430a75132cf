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

# _pip ENVIRONMENT ARGUMENT...: installs by the pinned versions.
_pip() {
  "$1/bin/python" -m pip --disable-pip-version-check --quiet install -c "$MEGARL_ROOT/launch/constraints.txt" "${@:2}"
}

# _ensure NAME WHAT INSTALL PYTHON FILE...: an environment in the repository's root, first on PATH; made with PYTHON by
# INSTALL, a function that is given its folder, unless one stands that was made from the same files.
_ensure() {
  local venv="$MEGARL_ROOT/$1" what="$2" install="$3" python="$4" pins
  pins="$(cd "$MEGARL_ROOT" && cat "${@:5}" | cksum)"
  if [ ! -f "$venv/.megarl-pins" ] || [ "$(cat "$venv/.megarl-pins")" != "$pins" ]; then
    python="$("$python")" || return 1
    echo "Setting up $venv with $("$python" --version): $what, once" >&2
    rm -f "$venv/.megarl-pins"
    { "$python" -m venv "$venv" && "$install" "$venv"; } ||
      { echo "Setting up $venv failed; see the messages above" >&2; return 1; }
    echo "$pins" >"$venv/.megarl-pins"
  fi
  # One thread per process: on few cores more are slower.
  export PATH="$venv/bin:$PATH" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
}

_install_megarl() {
  # torch first and alone: pulled in by another package it would bring gigabytes of CUDA libraries.
  _pip "$1" torch && _pip "$1" setuptools && _pip "$1" --no-build-isolation -e "$MEGARL_ROOT[dev]"
}

ensure_environment() {
  _ensure .venv "megarl, about two minutes" _install_megarl _find_python launch/constraints.txt setup.py
}
