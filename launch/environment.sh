# Sourced by the launch scripts: creates .venv in the root of the repository on first use and installs the pinned dependencies.
# ensure_gpu_environment creates an environment for GPUs in the same way.
# PYTHON selects an interpreter (default: the first of python3.11, python3.12 and python3 with a supported version).

MEGARL_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export MEGARL_ROOT

# _has_version INTERPRETER VERSIONS: whether the interpreter has one of the versions.
_has_version() {
  command -v "$1" >/dev/null 2>&1 && "$1" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] not in '$2'.split())" >/dev/null 2>&1
}

# _find_python_of VERSIONS CANDIDATES: prints the first interpreter with one of the versions.
_find_python_of() {
  local candidate
  for candidate in ${PYTHON:-$2}; do
    if _has_version "$candidate" "$1"; then echo "$candidate"; return 0; fi
  done
  echo "this environment needs Python ${1// / or } (tried: ${PYTHON:-$2}); set PYTHON to an interpreter" >&2
  return 1
}

_find_python() { _find_python_of "3.11 3.12" "python3.11 python3.12 python3"; }

# _pip_with STACK ENVIRONMENT ARGUMENT...: installs packages in the versions of a stack. Python compiles the modules that a run
# imports: compiling all of them would double the time.
_pip_with() {
  "$2/bin/python" -m pip --disable-pip-version-check --quiet install --no-compile -c "$MEGARL_ROOT/megarl/pins/$1.txt" "${@:3}"
}

_pip() { _pip_with default "$@"; }

# _checksum FILE...: of the requirements in pyproject.toml and of the files.
_checksum() { (cd "$MEGARL_ROOT" && { sed '/^\[tool\.ruff/,$d' pyproject.toml && cat "$@"; } | cksum); }

# _ensure NAME DESCRIPTION INSTALL PYTHON FILE...: puts an environment in the root of the repository first on PATH. The
# function PYTHON prints the interpreter, and the function INSTALL fills the environment. An existing environment is reused
# if the FILEs have not changed; else one that this function made is emptied first, so that no earlier package stays.
_ensure() {
  local venv="$MEGARL_ROOT/$1" description="$2" install="$3" python="$4" pins clear=()
  pins="$(_checksum "${@:5}")"
  if [ ! -f "$venv/.megarl-pins" ] || [ "$(cat "$venv/.megarl-pins")" != "$pins" ]; then
    python="$("$python")" || return 1
    echo "Setting up $venv with $("$python" --version): $description, once" >&2
    [ ! -f "$venv/.megarl-pins" ] || clear=(--clear)
    { "$python" -m venv "${clear[@]}" "$venv" && "$install" "$venv"; } ||
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
  _ensure .venv "megarl, about two minutes" _install_megarl _find_python megarl/pins/default.txt
}

# The Megatron-Core of the GPU stacks needs Python 3.12.
_find_gpu_python() { _find_python_of "3.12" "python3.12 python3"; }

# _install_megarl_gpu PINS EXTRAS ENVIRONMENT. pip builds Transformer Engine's extension from source with the environment's
# torch and CUDA's compiler: torch and the tools of the build are installed first, and the build is not isolated.
_install_megarl_gpu() {
  _pip_with "$1" "$3" torch && _pip_with "$1" "$3" setuptools wheel ninja pybind11 &&
    _pip_with "$1" "$3" --no-build-isolation -e "$MEGARL_ROOT[$2]"
}
_install_gpu_sglang() { _install_megarl_gpu sglang gpu,sglang,code,math,report "$1"; }
_install_gpu_embedded() { _install_megarl_gpu default gpu,code,math,report "$1"; }

# ensure_gpu_environment [STACK]: the stack is named after its rollout engine, sglang (default) or embedded.
ensure_gpu_environment() {
  local stack="${1:-sglang}" pins
  case "$stack" in
    sglang) pins=sglang ;;
    embedded) pins=default ;;
    *) echo "ensure_gpu_environment $stack: unknown stack; choose sglang or embedded" >&2; return 1 ;;
  esac
  _ensure ".venv-gpu-$stack" "megarl for GPUs, engine $stack" "_install_gpu_$stack" _find_gpu_python \
    "megarl/pins/$pins.txt"
}
