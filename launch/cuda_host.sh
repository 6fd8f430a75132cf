# Sourced after environment.sh for the tests of torch's CUDA host code on a machine without a GPU: creates .venv-cuda-host in
# the root of the repository with a CUDA build of torch (5 GB, three minutes, once), and builds a CUDA runtime whose kernels
# compute nothing (tests/cuda_host/host_runtime.c). Needs Python 3.12 and a C compiler.

_install_cuda_host() {
  _pip "$1" torch && _pip "$1" setuptools wheel && _pip "$1" --no-build-isolation -e "$MEGARL_ROOT" &&
    _pip "$1" pytest pytest-timeout hypothesis &&
    _build_cuda_host "$1"
}

# Every symbol that torch takes from the CUDA libraries and the source does not define is a function that returns 0. torch
# loads the driver library by its name.
_build_cuda_host() {
  local venv="$1" source="$MEGARL_ROOT/tests/cuda_host" folder="$1/cuda_host" site lib
  site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
  mkdir -p "$folder"
  local flags=(-O1 -w -fPIC -I"$source/include" -I"$site/nvidia/cu13/include")
  cc "${flags[@]}" -c -o "$folder/runtime.o" "$source/host_runtime.c" || return 1
  for lib in c10_cuda torch_cpu torch_cuda torch_python; do
    nm -D --undefined-only "$site/torch/lib/lib$lib.so" | awk '{print $2}' | sed 's/@.*//'
  done | grep -E '^(cuda|__cuda|cublas|cudnn|nccl|cuFile|cupti)' | sort -u >"$folder/needed"
  nm "$folder/runtime.o" | awk '$2 == "T" {print $3}' | sort -u >"$folder/defined"
  grep -vxFf "$folder/defined" "$folder/needed" | sed 's/.*/long &(void) { return 0; }/' >"$folder/rest.c"
  cc "${flags[@]}" -shared -o "$folder/libcuda_host.so" "$folder/rest.c" "$folder/runtime.o" -lpthread || return 1
  {
    echo 'int cuDeviceGetCount(int *n) { return *n = 1, 0; } int cuDriverGetVersion(int *n) { return *n = 13000, 0; }'
    echo 'int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *a) { return *f = 0, *a = 1, 0; }'
    echo 'int cuCtxGetCurrent(void **c) { return *c = (void *)64, 0; }'
    echo 'int cuGetErrorString(int e, const char **s) { return *s = "error of the CUDA runtime without a GPU", 0; }'
    grep -ohE '\bcu[A-Z][A-Za-z0-9_]+ *\(' "$site/nvidia/cu13/include/cuda.h" | tr -d ' (' | sort -u |
      grep -vxE 'cuDeviceGetCount|cuDriverGetVersion|cuDevicePrimaryCtxGetState|cuCtxGetCurrent|cuGetErrorString' |
      sed 's/.*/long &(void) { return 0; }/'
  } >"$folder/driver.c"
  cc "${flags[@]}" -shared -Wl,-soname,libcuda.so.1 -o "$folder/libcuda.so.1" "$folder/driver.c"
}

# ensure_cuda_host_environment: puts the environment first on PATH, and its runtime in place of CUDA's. Without torch's cache,
# new memory is zero, so that indices that no kernel has written are valid.
ensure_cuda_host_environment() {
  _ensure .venv-cuda-host "torch for CUDA, three minutes" _install_cuda_host _find_gpu_python \
    megarl/pins/default.txt launch/cuda_host.sh tests/cuda_host/host_runtime.c || return 1
  export CUDA_HOST_LIBRARIES="$MEGARL_ROOT/.venv-cuda-host/cuda_host"
  export LD_LIBRARY_PATH="$CUDA_HOST_LIBRARIES" LD_PRELOAD="$CUDA_HOST_LIBRARIES/libcuda_host.so"
  export PYTORCH_NO_CUDA_MEMORY_CACHING=1
}
