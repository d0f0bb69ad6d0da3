// A stand-in for libcuda.so.1: enough of the driver for the host side of the runtime to be tested
// without a GPU. Device memory is host memory, copies are memcpy, and a launch is recorded.
// What a kernel does, and what a real driver accepts, only a GPU can show.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int CUresult;
typedef void* handle;
#define OK 0
#define INVALID_VALUE 1
#define OUT_OF_MEMORY 2
#define NOT_INITIALIZED 3
#define NO_DEVICE 100
#define INVALID_CONTEXT 201
#define NOT_FOUND 500
#define CAPTURE_UNSUPPORTED 900
#define EXPORT __attribute__((visibility("default")))

static int env_int(const char* name, int fallback) {
  const char* text = getenv(name);
  return text ? atoi(text) : fallback;
}

// What tests read back.
EXPORT struct {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  unsigned num_attributes;
  int attribute_ids[4];
  unsigned attribute_words[4][3];
  unsigned char params[4096];
  void* function;
  int device;
  int launches;
} fake_launch;
EXPORT int fake_param_bytes = 0;
EXPORT int fake_capturing = 0;
EXPORT int fake_launch_result = 0;
EXPORT int fake_event_waits = 0, fake_event_records = 0, fake_library_loads = 0;
EXPORT int fake_is_capturing_calls = 0, fake_live_allocations = 0, fake_init_calls = 0;
EXPORT int fake_contexts_made = 0, fake_shared_attribute = 0;

static pid_t init_pid = 0;
static _Thread_local int stack[16];
static _Thread_local int depth = 0;

CUresult cuInit(unsigned flags) {
  ++fake_init_calls;
  if (init_pid != 0 && init_pid != getpid()) return NOT_INITIALIZED;
  if (env_int("FAKE_CUDA_DEVICES", 2) == 0) return NO_DEVICE;
  init_pid = getpid();
  return OK;
}
CUresult cuDriverGetVersion(int* version) {
  *version = env_int("FAKE_CUDA_VERSION", 13000);
  return OK;
}
CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = "words of the driver";
  return OK;
}
CUresult cuGetErrorName(CUresult error, const char** text) {
  *text = "NAME";
  return OK;
}
CUresult cuDeviceGetCount(int* count) {
  if (init_pid != getpid()) return NOT_INITIALIZED;
  *count = env_int("FAKE_CUDA_DEVICES", 2);
  return OK;
}
CUresult cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return OK;
}
CUresult cuDeviceGetName(char* name, int length, int device) {
  strncpy(name, "Fake GPU", length);
  return OK;
}
CUresult cuDeviceTotalMem_v2(size_t* bytes, int device) {
  *bytes = (size_t)141 << 30;
  return OK;
}
CUresult cuDeviceGetAttribute(int* value, int attribute, int device) {
  switch (attribute) {
    case 75: *value = env_int("FAKE_CUDA_MAJOR", 9); break;
    case 76: *value = env_int("FAKE_CUDA_MINOR", 0); break;
    case 16: *value = 132; break;
    case 97: *value = 232448; break;
    case 38: *value = 60 << 20; break;
    default: return INVALID_VALUE;
  }
  return OK;
}
CUresult cuDevicePrimaryCtxRetain(handle* context, int device) {
  ++fake_contexts_made;
  *context = (handle)(uintptr_t)(0x1000 + device);
  return OK;
}
CUresult cuCtxPushCurrent_v2(handle context) {
  if (depth == 16) return INVALID_VALUE;
  stack[depth++] = (int)((uintptr_t)context - 0x1000);
  return OK;
}
CUresult cuCtxPopCurrent_v2(handle* context) {
  if (depth == 0) return INVALID_CONTEXT;
  *context = (handle)(uintptr_t)(0x1000 + stack[--depth]);
  return OK;
}
CUresult cuCtxGetDevice(int* device) {
  if (depth == 0) return INVALID_CONTEXT;
  *device = stack[depth - 1];
  return OK;
}
CUresult cuCtxGetCurrent(handle* context) {
  *context = depth ? (handle)(uintptr_t)(0x1000 + stack[depth - 1]) : 0;
  return OK;
}
// CUdevResource: the type, padding to 96 bytes, then the number of SMs.
CUresult cuCtxGetDevResource(handle context, unsigned char* resource, int type) {
  int sms = env_int("FAKE_CUDA_GREEN_SMS", 132);
  memcpy(resource, &type, 4);
  memcpy(resource + 96, &sms, 4);
  return OK;
}
static _Thread_local int capture_mode = 0;
CUresult cuThreadExchangeStreamCaptureMode(int* mode) {
  int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return OK;
}
// While a capture goes on, what is not allowed in it fails unless the thread is relaxed.
static int forbidden(void) { return fake_capturing && capture_mode != 2; }
EXPORT int fake_context_depth(void) { return depth; }

CUresult cuMemAlloc_v2(uint64_t* pointer, size_t bytes) {
  if (forbidden()) return CAPTURE_UNSUPPORTED;
  if (bytes > ((size_t)1 << 33)) return OUT_OF_MEMORY;
  *pointer = (uint64_t)(uintptr_t)aligned_alloc(256, (bytes + 255) / 256 * 256);
  ++fake_live_allocations;
  return OK;
}
CUresult cuMemFree_v2(uint64_t pointer) {
  if (forbidden()) return CAPTURE_UNSUPPORTED;
  free((void*)(uintptr_t)pointer);
  --fake_live_allocations;
  return OK;
}
CUresult cuMemHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  *pointer = malloc(bytes);
  ++fake_live_allocations;
  return OK;
}
CUresult cuMemFreeHost(void* pointer) {
  if (forbidden()) return CAPTURE_UNSUPPORTED;
  free(pointer);
  --fake_live_allocations;
  return OK;
}
CUresult cuMemcpyHtoDAsync_v2(uint64_t dst, const void* src, size_t bytes, handle stream) {
  memcpy((void*)(uintptr_t)dst, src, bytes);
  return depth ? OK : INVALID_CONTEXT;
}
CUresult cuMemcpyDtoHAsync_v2(void* dst, uint64_t src, size_t bytes, handle stream) {
  memcpy(dst, (void*)(uintptr_t)src, bytes);
  return depth ? OK : INVALID_CONTEXT;
}
CUresult cuMemcpyDtoDAsync_v2(uint64_t dst, uint64_t src, size_t bytes, handle stream) {
  memcpy((void*)(uintptr_t)dst, (void*)(uintptr_t)src, bytes);
  return depth ? OK : INVALID_CONTEXT;
}
CUresult cuMemsetD8Async(uint64_t dst, unsigned char byte, size_t bytes, handle stream) {
  memset((void*)(uintptr_t)dst, byte, bytes);
  return depth ? OK : INVALID_CONTEXT;
}
CUresult cuPointerGetAttribute(void* data, int attribute, uint64_t pointer) {
  if (attribute != 9) return INVALID_VALUE;
  *(int*)data = 1;
  return OK;
}
CUresult cuStreamCreate(handle* stream, unsigned flags) {
  *stream = (handle)(uintptr_t)(0x5000 + flags);
  return OK;
}
CUresult cuStreamDestroy_v2(handle stream) { return OK; }
CUresult cuStreamSynchronize(handle stream) { return depth ? OK : INVALID_CONTEXT; }
CUresult cuStreamIsCapturing(handle stream, int* status) {
  ++fake_is_capturing_calls;
  *status = fake_capturing;
  return OK;
}
CUresult cuEventCreate(handle* event, unsigned flags) {
  *event = (handle)0x7000;
  return OK;
}
CUresult cuEventDestroy_v2(handle event) { return OK; }
CUresult cuEventRecord(handle event, handle stream) {
  ++fake_event_records;
  return OK;
}
CUresult cuStreamWaitEvent(handle stream, handle event, unsigned flags) {
  ++fake_event_waits;
  return OK;
}
CUresult cuLibraryLoadData(handle* library, const void* code, int* a, void** b, unsigned c, int* d,
                           void** e, unsigned f) {
  if (forbidden()) return CAPTURE_UNSUPPORTED;
  if (memcmp(code, "\177ELF", 4)) return INVALID_VALUE;
  *library = (handle)(uintptr_t)(0x8000 + fake_library_loads++);
  return OK;
}
CUresult cuLibraryGetKernel(handle* kernel, handle library, const char* name) {
  if (!strcmp(name, "absent")) return NOT_FOUND;
  *kernel = (handle)(uintptr_t)0x9000;
  return OK;
}
CUresult cuKernelGetFunction(handle* function, handle kernel) {
  *function = (handle)(uintptr_t)0xa000;
  return depth ? OK : INVALID_CONTEXT;
}
CUresult cuFuncLoad(handle function) { return forbidden() ? CAPTURE_UNSUPPORTED : OK; }
CUresult cuKernelSetAttribute(int attribute, int value, handle kernel, int device) {
  if (attribute != 8) return INVALID_VALUE;
  fake_shared_attribute = value;
  return OK;
}

typedef struct {
  int id;
  char pad[4];
  unsigned words[16];
} launch_attribute;
typedef struct {
  unsigned grid[3], block[3], shared_bytes;
  handle stream;
  launch_attribute* attributes;
  unsigned num_attributes;
} launch_config;

CUresult cuLaunchKernelEx(const launch_config* config, handle function, void** params, void** x) {
  if (depth == 0) return INVALID_CONTEXT;
  memcpy(fake_launch.grid, config->grid, sizeof config->grid);
  memcpy(fake_launch.block, config->block, sizeof config->block);
  fake_launch.shared_bytes = config->shared_bytes;
  fake_launch.stream = config->stream;
  fake_launch.num_attributes = config->num_attributes;
  for (unsigned i = 0; i < config->num_attributes && i < 4; ++i) {
    fake_launch.attribute_ids[i] = config->attributes[i].id;
    memcpy(fake_launch.attribute_words[i], config->attributes[i].words, 12);
  }
  memcpy(fake_launch.params, params[0], fake_param_bytes);
  fake_launch.function = function;
  fake_launch.device = stack[depth - 1];
  ++fake_launch.launches;
  return fake_launch_result;
}
// The "descriptor" is the arguments themselves, one word each, for the test to compare.
CUresult cuTensorMapEncodeTiled(uint64_t* map, int type, unsigned rank, void* address,
                                const uint64_t* dims, const uint64_t* strides, const unsigned* box,
                                const unsigned* steps, int interleave, int swizzle, int promotion,
                                int fill) {
  map[0] = (uint64_t)type | (uint64_t)rank << 8 | (uint64_t)swizzle << 16 |
           (uint64_t)promotion << 24 | (uint64_t)interleave << 32 | (uint64_t)fill << 40;
  map[1] = (uint64_t)(uintptr_t)address;
  for (unsigned i = 0; i < rank; ++i) map[2 + i] = dims[i];
  for (unsigned i = 0; i + 1 < rank; ++i) map[7 + i] = strides[i];
  for (unsigned i = 0; i < rank; ++i) map[11 + i] = (uint64_t)box[i] << 32 | steps[i];
  return OK;
}

// The bindings look every function up here, by its plain name: the _v2 form is found first.
CUresult cuGetProcAddress_v2(const char* symbol, void** pointer, int version, uint64_t flags,
                             int* status) {
  char name[128];
  static void* own = 0;
  if (!own) {
    Dl_info info;
    dladdr((void*)&cuGetProcAddress_v2, &info);
    own = dlopen(info.dli_fname, RTLD_LAZY);
  }
  snprintf(name, sizeof name, "%s_v2", symbol);
  *pointer = dlsym(own, name);
  if (!*pointer) *pointer = dlsym(own, symbol);
  if (status) *status = *pointer ? 0 : 1;
  return *pointer ? OK : NOT_FOUND;
}
