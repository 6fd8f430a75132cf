# Sourced by the launch scripts: creates .venv in the root of the repository on first use and installs the pinned dependencies.
# PYTHON selects an interpreter (default: the first of python3.11, python3.12 and python3 with a supported version).

MEGARL_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export MEGARL_ROOT

_fits() { command -v "$1" >/dev/null 2>&1 && "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1; }

_find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3}; do
    if _fits "$candidate"; then echo "$candidate"; return 0; fi
  done
  echo "megarl needs Python 3.11 or 3.12 (tried: ${PYTHON:-python3.11, python3.12, python3}); set PYTHON to an interpreter" >&2
  return 1
}

# _pip ENVIRONMENT ARGUMENT...: installs packages in their pinned versions.
_pip() {
  "$1/bin/python" -m pip --disable-pip-version-check --quiet install -c "$MEGARL_ROOT/launch/constraints.txt" "${@:2}"
}

# _ensure NAME DESCRIPTION INSTALL PYTHON FILE...: puts an environment in the root of the repository first on PATH. The
# function PYTHON prints the interpreter, and the function INSTALL fills the environment. An existing environment is reused
# if the FILEs have not changed.
_ensure() {
  local venv="$MEGARL_ROOT/$1" description="$2" install="$3" python="$4" pins
  pins="$(cd "$MEGARL_ROOT" && cat "${@:5}" | cksum)"
  if [ ! -f "$venv/.megarl-pins" ] || [ "$(cat "$venv/.megarl-pins")" != "$pins" ]; then
    python="$("$python")" || return 1
    echo "Setting up $venv with $("$python" --version): $description, once" >&2
    rm -f "$venv/.megarl-pins"
    { "$python" -m venv "$venv" && "$install" "$venv"; } ||
      { echo "Setting up $venv failed; see the messages above" >&2; return 1; }
    echo "$pins" >"$venv/.megarl-pins"
  fi
  # Dozens of processes import the package: compile it once.
  unset PYTHONDONTWRITEBYTECODE
  # One thread per process: more threads are slower on few cores.
  export PATH="$venv/bin:$PATH" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
}

_install_megarl() {
  # Install torch first: as a dependency of another package it would add gigabytes of CUDA libraries.
  _pip "$1" torch && _pip "$1" setuptools && _pip "$1" --no-build-isolation -e "$MEGARL_ROOT[dev]"
}

ensure_environment() {
  _ensure .venv "megarl, about two minutes" _install_megarl _find_python launch/constraints.txt setup.py
}

# Transformer Engine's extension is built from source, with the environment's torch. It needs CUDA's compiler.
_install_megarl_gpu() {
  _pip "$1" torch && _pip "$1" setuptools wheel ninja pybind11 && _pip "$1" --no-build-isolation -e "$MEGARL_ROOT[gpu]"
}

ensure_gpu_environment() {
  _ensure .venv-gpu "megarl with SGLang and Transformer Engine" _install_megarl_gpu _find_python \
    launch/constraints.txt setup.py
}
