# Sourced after environment.sh for rollouts with SGLang on a machine without a GPU: creates .venv-sglang in the root of the
# repository and puts it first on PATH. It contains SGLang (1.3 GB, half a minute, once) and also sees the packages of .venv,
# such as megarl and torch.

# Dependencies of `import sglang` and its server, in addition to the packages installed without dependencies.
_SGLANG_NEEDS="aiohttp requests tqdm fastapi uvicorn>=0.51 uvloop pyzmq>=25.1.2 orjson pybase64 pydantic python-multipart
  setproctitle sentencepiece tiktoken interegular partial_json_parser prometheus-client>=0.20.0 msgspec pillow IPython
  zstandard xxhash packaging distro dill loguru gguf openai jsonschema soundfile"

_site_packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

_venv_python() { echo "$MEGARL_ROOT/.venv/bin/python"; }

_install_sglang() {
  local pins="$MEGARL_ROOT/launch/constraints-sglang.txt" alone
  echo "import site; site.addsitedir('$(_site_packages "$MEGARL_ROOT/.venv")')" >"$(_site_packages "$1")/megarl.pth" || return 1
  alone="$(grep -E '^(sglang|triton|xgrammar|apache-tvm-ffi|compressed-tensors)==' "$pins")"
  _pip "$1" --no-deps $alone && _pip "$1" -c "$pins" $_SGLANG_NEEDS
}

ensure_sglang_environment() {
  ensure_environment || return 1
  _ensure .venv-sglang "SGLang, half a minute" _install_sglang _venv_python \
    launch/constraints.txt setup.py launch/constraints-sglang.txt launch/sglang_cpu.sh
}
