// A CUDA runtime without a GPU, for torch's host code: device memory is the host's, copies are copies, a collective of one
// rank is a copy, and kernels compute nothing. launch/cuda_host.sh adds a function that returns 0 for every other symbol
// that torch takes from the CUDA libraries. The device is described as an H100.
//
// Errors as on a GPU: a synchronization during a graph capture, and a launch with an empty or too large grid.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "driver_types.h"
#include "vector_types.h"

enum { SUCCESS = 0, OUT_OF_MEMORY = 2, INVALID_CONFIGURATION = 9, INVALID_DEVICE = 101, CAPTURE_UNSUPPORTED = 900 };
enum { DEVICE_MEMORY, PINNED_MEMORY };
enum { SHARED_MEMORY = 65536, LARGE = 2 << 20 };
static const size_t GIB = 1ull << 30;

// ---- memory

#define BLOCKS (1 << 16)
static struct block {
  char *start;
  size_t size;
  int kind, fd;
} blocks[BLOCKS];
static int used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void *add_block(void *start, size_t size, int kind, int fd) {
  if (start == MAP_FAILED) return NULL;
  pthread_mutex_lock(&lock);
  int i = 0;
  while (i < used && blocks[i].start) i++;
  if (i == BLOCKS) abort();
  if (i == used) used++;
  blocks[i] = (struct block){start, size, kind, fd};
  pthread_mutex_unlock(&lock);
  return start;
}

// Zeroed memory. Large device memory is a file, which another process opens through /proc for CUDA IPC.
static int allocate(void **pointer, size_t size, int kind) {
  size = size ? (size + 4095) & ~4095ul : 4096;
  int fd = kind == DEVICE_MEMORY && size >= LARGE ? memfd_create("device", MFD_CLOEXEC) : -1;
  if (fd >= 0 && ftruncate(fd, size)) return OUT_OF_MEMORY;
  int flags = fd >= 0 ? MAP_SHARED | MAP_NORESERVE : MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  *pointer = add_block(mmap(NULL, size, PROT_READ | PROT_WRITE, flags, fd, 0), size, kind, fd);
  return *pointer ? SUCCESS : OUT_OF_MEMORY;
}

static struct block find(const void *pointer) {
  struct block found = {NULL, 0, -1, -1};
  pthread_mutex_lock(&lock);
  for (int i = 0; i < used && !found.start; i++)
    if (blocks[i].start && (char *)pointer >= blocks[i].start && (char *)pointer < blocks[i].start + blocks[i].size)
      found = blocks[i];
  pthread_mutex_unlock(&lock);
  return found;
}

static int release(void *pointer) {
  pthread_mutex_lock(&lock);
  for (int i = 0; pointer && i < used; i++)
    if (blocks[i].start == pointer) {
      munmap(blocks[i].start, blocks[i].size);
      if (blocks[i].fd >= 0) close(blocks[i].fd);
      blocks[i].start = NULL;
    }
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

static int copy(void *to, const void *from, size_t size) {
  memmove(to, from, size);
  return SUCCESS;
}

int cudaMalloc(void **p, size_t n) { return allocate(p, n, DEVICE_MEMORY); }
int cudaMallocAsync(void **p, size_t n, void *stream) { return allocate(p, n, DEVICE_MEMORY); }
int cudaHostAlloc(void **p, size_t n, unsigned flags) { return allocate(p, n, PINNED_MEMORY); }
int cudaFree(void *p) { return release(p); }
int cudaFreeAsync(void *p, void *stream) { return release(p); }
int cudaFreeHost(void *p) { return release(p); }
int cudaMemcpy(void *to, const void *from, size_t n, int kind) { return copy(to, from, n); }
int cudaMemcpyAsync(void *to, const void *from, size_t n, int kind, void *stream) { return copy(to, from, n); }
int cudaMemcpyPeerAsync(void *to, int d, const void *from, int s, size_t n, void *stream) { return copy(to, from, n); }
int cudaMemset(void *p, int value, size_t n) { return memset(p, value, n), SUCCESS; }
int cudaMemsetAsync(void *p, int value, size_t n, void *stream) { return memset(p, value, n), SUCCESS; }

int cudaMemGetInfo(size_t *free, size_t *total) {
  *free = 78 * GIB;
  *total = 79 * GIB;
  return SUCCESS;
}

int cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  struct block block = find(p);
  memset(a, 0, sizeof *a);
  a->device = block.start ? 0 : -2;
  if (!block.start) return SUCCESS;
  a->type = block.kind == DEVICE_MEMORY ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  *(block.kind == DEVICE_MEMORY ? &a->devicePointer : &a->hostPointer) = (void *)p;
  return SUCCESS;
}

struct shared {
  int pid, fd;
  size_t size;
};

int cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *p) {
  struct block block = find(p);
  struct shared shared = {getpid(), block.fd, block.size};
  memset(handle, 0, sizeof *handle);
  memcpy(handle, &shared, sizeof shared);
  return block.fd < 0 ? 1 : SUCCESS;
}

int cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t handle, unsigned flags) {
  struct shared shared;
  char path[64];
  memcpy(&shared, &handle, sizeof shared);
  snprintf(path, sizeof path, "/proc/%d/fd/%d", shared.pid, shared.fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return 1;
  *p = add_block(mmap(NULL, shared.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), shared.size, DEVICE_MEMORY, fd);
  return *p ? SUCCESS : OUT_OF_MEMORY;
}

int cudaIpcCloseMemHandle(void *p) { return release(p); }

// ---- device

int cudaGetDeviceCount(int *count) { return *count = 1, SUCCESS; }
int cudaGetDevice(int *device) { return *device = 0, SUCCESS; }
int cudaSetDevice(int device) { return device ? INVALID_DEVICE : SUCCESS; }
int cudaDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
int cudaRuntimeGetVersion(int *version) { return *version = 13000, SUCCESS; }
int cudaDeviceCanAccessPeer(int *can, int device, int peer) { return *can = 0, SUCCESS; }
int cudaDeviceGetDefaultMemPool(void **pool, int device) { return *pool = (void *)64, SUCCESS; }
int cudaDeviceGetPCIBusId(char *id, int size, int device) { return snprintf(id, size, "0000:01:00.0"), SUCCESS; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, SUCCESS; }

int cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  *p = (struct cudaDeviceProp){
      .name = "NVIDIA H100 80GB HBM3 (host code only)",
      .totalGlobalMem = 79 * GIB,
      .sharedMemPerBlock = 49152,
      .regsPerBlock = 65536,
      .warpSize = 32,
      .maxThreadsPerBlock = 1024,
      .maxThreadsDim = {1024, 1024, 64},
      .maxGridSize = {INT32_MAX, 65535, 65535},
      .major = 9,
      .multiProcessorCount = 132,
      .maxThreadsPerMultiProcessor = 2048,
      .sharedMemPerMultiprocessor = 233472,
      .sharedMemPerBlockOptin = 232448,
      .l2CacheSize = 50 << 20,
      .concurrentKernels = 1,
      .textureAlignment = 512,
      .canMapHostMemory = 1,
      .unifiedAddressing = 1,
      .regsPerMultiprocessor = 65536,
      .maxBlocksPerMultiProcessor = 32,
  };
  for (int i = 0; i < 16; i++) ((char *)&p->uuid)[i] = i + 1;
  return SUCCESS;
}

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 233472; break;
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = INT32_MAX; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrWarpSize:
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = 32; break;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1024; break;
    default: *value = 1;
  }
  return SUCCESS;
}

// ---- streams, events and graphs

static void *fresh(void) {
  static long next = 4096;
  return (void *)__sync_add_and_fetch(&next, 64);
}

static void *capturing;  // the stream; others do not join a capture here
static unsigned long long capture_id = 1;
static __thread int capture_mode;

int cudaThreadExchangeStreamCaptureMode(int *mode) {
  int before = capture_mode;
  capture_mode = *mode;
  return *mode = before, SUCCESS;
}

// During a capture a thread may wait for other streams, for the default stream (NULL) in relaxed mode only.
static int synchronize(void *stream) {
  int is_default = !stream && capture_mode != cudaStreamCaptureModeRelaxed;
  return capturing && (is_default || stream == capturing) ? CAPTURE_UNSUPPORTED : SUCCESS;
}

int cudaStreamCreate(void **stream) { return *stream = fresh(), SUCCESS; }
int cudaStreamCreateWithFlags(void **stream, unsigned flags) { return *stream = fresh(), SUCCESS; }
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int p) { return *stream = fresh(), SUCCESS; }
int cudaStreamGetPriority(void *stream, int *priority) { return *priority = 0, SUCCESS; }
int cudaStreamSynchronize(void *stream) { return synchronize(stream); }
int cudaDeviceSynchronize(void) { return capturing ? CAPTURE_UNSUPPORTED : SUCCESS; }
int cudaStreamBeginCapture(void *stream, int mode) { return capturing = stream, capture_id++, SUCCESS; }
int cudaStreamEndCapture(void *stream, void **graph) { return capturing = NULL, *graph = fresh(), SUCCESS; }
int cudaStreamIsCapturing(void *stream, int *status) { return *status = stream && stream == capturing, SUCCESS; }
int cudaGraphInstantiateWithFlags(void **exec, void *g, unsigned long long f) { return *exec = fresh(), SUCCESS; }
int cudaGraphGetNodes(void *graph, void *nodes, size_t *count) { return *count = 1, SUCCESS; }
int cudaEventCreate(void **event) { return *event = fresh(), SUCCESS; }
int cudaEventCreateWithFlags(void **event, unsigned flags) { return *event = fresh(), SUCCESS; }
int cudaEventElapsedTime(float *ms, void *start, void *end) { return *ms = 1, SUCCESS; }

int cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id, void **graph, void *dependencies,
                             void *edges, size_t *count) {
  *status = stream && stream == capturing;
  if (id) *id = capture_id;
  if (graph) *graph = (void *)capture_id;
  if (count) *count = 0;
  return SUCCESS;
}

// ---- kernels and errors

static __thread int last_error;
static __thread struct {
  dim3 grid, block;
  size_t shared;
  void *stream;
} pushed;

int cudaGetLastError(void) {
  int error = last_error;
  last_error = SUCCESS;
  return error;
}

int cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorName(int error) { return "cudaError"; }

const char *cudaGetErrorString(int error) {
  return error == CAPTURE_UNSUPPORTED     ? "operation not permitted when stream is capturing"
         : error == INVALID_CONFIGURATION ? "invalid configuration argument"
                                          : "error of the CUDA runtime without a GPU";
}

int __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  pushed.grid = grid, pushed.block = block, pushed.shared = shared, pushed.stream = stream;
  return SUCCESS;
}

int __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void **stream) {
  *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *stream = pushed.stream;
  return SUCCESS;
}

int __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) {
  int is_empty = !grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z;
  int is_too_large = grid.y > 65535 || grid.z > 65535 || (long)block.x * block.y * block.z > 1024 || shared > 232448;
  return last_error = is_empty || is_too_large ? INVALID_CONFIGURATION : SUCCESS;
}

int __cudaGetKernel(void **kernel, const void *function) { return *kernel = (void *)function, SUCCESS; }

int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *f, int n, size_t s, unsigned fl) {
  return *blocks = 2, SUCCESS;
}

int cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *function) {
  *a = (struct cudaFuncAttributes){.ptxVersion = 90, .binaryVersion = 90, .maxThreadsPerBlock = 1024, .numRegs = 32};
  a->maxDynamicSharedSizeBytes = 232448 - 4096;
  return SUCCESS;
}

int cudaGetSymbolAddress(void **p, const void *symbol) {
  static char zeros[1 << 20];
  return *p = zeros, SUCCESS;
}

void **__cudaRegisterFatBinary(void *binary) {
  static void *handle[8];
  return handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterFunction(void) {}
void __cudaRegisterVar(void) {}

// ---- driver entry points

static int nothing(void) { return SUCCESS; }
static int primary_context_state(int d, unsigned *flags, int *active) { return *flags = 0, *active = 1, SUCCESS; }
static int current_context(void **context) { return *context = (void *)64, SUCCESS; }

int cudaGetDriverEntryPointByVersion(const char *name, void **entry, unsigned v, unsigned long long f, int *result) {
  *entry = !strcmp(name, "cuDevicePrimaryCtxGetState") ? (void *)primary_context_state
           : !strcmp(name, "cuCtxGetCurrent")          ? (void *)current_context
                                                       : (void *)nothing;
  if (result) *result = 0;
  return SUCCESS;
}

// ---- cuBLAS and cuDNN

int cublasCreate_v2(void **handle) { return *handle = fresh(), SUCCESS; }
int cublasGetMathMode(void *handle, int *mode) { return *mode = 0, SUCCESS; }
int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = 0, SUCCESS; }
size_t cublasLtGetVersion(void) { return 130100; }
int cublasLtMatmulDescCreate(void **d, int compute, int scale) { return *d = fresh(), SUCCESS; }
int cublasLtMatmulPreferenceCreate(void **p) { return *p = fresh(), SUCCESS; }
int cublasLtMatrixLayoutCreate(void **l, int type, uint64_t rows, uint64_t columns, int64_t stride) {
  return *l = fresh(), SUCCESS;
}
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                   int requested, void *results, int *returned) {
  enum { RESULT_BYTES = 96 };
  memset(results, 0, RESULT_BYTES);
  return *returned = 1, SUCCESS;
}
int cudnnCreate(void **handle) { return *handle = fresh(), SUCCESS; }
size_t cudnnGetVersion(void) { return 91900; }
size_t cudnnGetCudartVersion(void) { return 13000; }
int cudnnBackendCreateDescriptor(int type, void **descriptor) { return 3000; }  // not supported: no plans here
int cudnnBackendFinalize(void *descriptor) { return 3000; }
const char *cudnnGetErrorString(int status) { return "cuDNN needs a GPU"; }

// ---- NCCL with one rank

static size_t width(int type) {
  switch (type) {
    case 0: case 1: case 10: case 11: return 1;
    case 6: case 9: return 2;
    case 2: case 3: case 7: return 4;
    default: return 8;
  }
}

static int collect(const void *from, void *to, size_t count, int type) {
  return from == to ? SUCCESS : copy(to, from, count * width(type));
}

int ncclGetVersion(int *version) { return *version = 22809, SUCCESS; }
int ncclGetUniqueId(void *id) { return memset(id, 7, 128), SUCCESS; }
int ncclCommInitRank(void **comm, int ranks, ...) { return *comm = fresh(), SUCCESS; }
int ncclCommInitRankConfig(void **comm, int ranks, ...) { return *comm = fresh(), SUCCESS; }
int ncclCommInitRankScalable(void **comm, ...) { return *comm = fresh(), SUCCESS; }
int ncclCommSplit(void *comm, int color, int key, void **part, void *config) { return *part = fresh(), SUCCESS; }
int ncclCommGetAsyncError(void *comm, int *error) { return *error = 0, SUCCESS; }
int ncclCommCount(void *comm, int *count) { return *count = 1, SUCCESS; }
int ncclCommUserRank(void *comm, int *rank) { return *rank = 0, SUCCESS; }
const char *ncclGetErrorString(int error) { return "error of the CUDA runtime without a GPU"; }
const char *ncclGetLastError(void *comm) { return ""; }
int ncclAllReduce(const void *s, void *r, size_t n, int t, int op, void *c, void *st) { return collect(s, r, n, t); }
int ncclAllGather(const void *s, void *r, size_t n, int t, void *c, void *st) { return collect(s, r, n, t); }
int ncclBroadcast(const void *s, void *r, size_t n, int t, int root, void *c, void *st) { return collect(s, r, n, t); }
int ncclReduceScatter(const void *s, void *r, size_t n, int t, int o, void *c, void *st) { return collect(s, r, n, t); }
int ncclReduce(const void *s, void *r, size_t n, int t, int o, int d, void *c, void *st) { return collect(s, r, n, t); }

static const void *sent;
int ncclSend(const void *s, size_t n, int t, int peer, void *c, void *st) { return sent = s, SUCCESS; }
int ncclRecv(void *r, size_t n, int t, int peer, void *c, void *st) {
  if (sent) copy(r, sent, n * width(t));
  return sent = NULL, SUCCESS;
}
