# Sourced after environment.sh by those who roll out with SGLang on a machine without a GPU: makes .venv-sglang in the
# repository's root, which holds megarl and the real SGLang (2.6 GB, two minutes, once), and puts it first on PATH.

# What `import sglang` and its server need, besides the packages that are installed without their dependencies.
_SGLANG_NEEDS="aiohttp requests tqdm fastapi uvicorn>=0.51 uvloop pyzmq>=25.1.2 orjson pybase64 pydantic python-multipart
  setproctitle sentencepiece tiktoken interegular partial_json_parser prometheus-client>=0.20.0 msgspec pillow IPython
  zstandard xxhash packaging distro dill loguru gguf openai jsonschema soundfile"

_install_sglang() {
  local python="$1" venv="$MEGARL_ROOT/.venv-sglang" pip alone
  "$python" -m venv "$venv"
  pip="$venv/bin/python -m pip --disable-pip-version-check --quiet install -c $MEGARL_ROOT/launch/constraints.txt"
  # torch first and alone: pulled in by another package it would bring gigabytes of CUDA libraries.
  $pip torch
  $pip setuptools
  alone="$(grep -E '^(sglang|triton|xgrammar|apache-tvm-ffi|compressed-tensors)==' "$MEGARL_ROOT/launch/constraints-sglang.txt")"
  $pip --no-deps $alone
  $pip -c "$MEGARL_ROOT/launch/constraints-sglang.txt" $_SGLANG_NEEDS
  $pip --no-build-isolation -e "$MEGARL_ROOT[dev]"
}

# Makes the environment unless one stands that was made from the same pins.
ensure_sglang_environment() {
  local stamp="$MEGARL_ROOT/.venv-sglang/.megarl-pins" pins python
  pins="$(cat "$MEGARL_ROOT"/launch/{constraints.txt,constraints-sglang.txt,sglang_cpu.sh} "$MEGARL_ROOT/setup.py" | cksum)"
  if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$pins" ]; then
    python="$(_find_python)" || return 1
    echo "Setting up $MEGARL_ROOT/.venv-sglang with $("$python" --version) and SGLang (about three minutes, once)" >&2
    rm -f "$stamp"
    _install_sglang "$python" || { echo "Setting up SGLang failed; see the messages above" >&2; return 1; }
    echo "$pins" >"$stamp"
  fi
  export PATH="$MEGARL_ROOT/.venv-sglang/bin:$PATH" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
}
