# Sourced after environment.sh for rollouts with SGLang on a machine without a GPU: creates .venv-sglang in the root of the
# repository and puts it first on PATH. It contains SGLang (1.3 GB, half a minute, once) and also sees the packages of .venv,
# such as megarl and torch.

# Dependencies of `import sglang` and its server, in addition to the packages installed without dependencies.
_SGLANG_NEEDS="aiohttp requests tqdm fastapi uvicorn>=0.51 uvloop pyzmq>=25.1.2 orjson pybase64 pydantic python-multipart
  setproctitle sentencepiece tiktoken interegular partial_json_parser prometheus-client>=0.20.0 msgspec pillow IPython
  zstandard xxhash packaging distro dill loguru gguf openai jsonschema soundfile"

_site_packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

_venv_python() { echo "$MEGARL_ROOT/.venv/bin/python"; }

# SGLang and the packages that would bring CUDA libraries are installed without their dependencies. Triton is imported only.
# Packages that .venv lacks have SGLang's versions.
_install_sglang() {
  local pins="$MEGARL_ROOT/megarl/pins"
  echo "import site; site.addsitedir('$(_site_packages "$MEGARL_ROOT/.venv")')" >"$(_site_packages "$1")/megarl.pth" || return 1
  awk -F '==' 'NR == FNR {pinned[$1]; next} !($1 in pinned)' "$pins/default.txt" "$pins/sglang.txt" >"$1/sglang.txt"
  _pip_with sglang "$1" --no-deps sglang xgrammar apache-tvm-ffi compressed-tensors &&
    "$1/bin/python" -m pip --disable-pip-version-check --quiet install --no-compile --no-deps triton==3.9.0 &&
    _pip "$1" -c "$1/sglang.txt" $_SGLANG_NEEDS
}

ensure_sglang_environment() {
  ensure_environment || return 1
  _ensure .venv-sglang "SGLang, half a minute" _install_sglang _venv_python \
    megarl/pins/default.txt megarl/pins/sglang.txt launch/sglang_cpu.sh
}
