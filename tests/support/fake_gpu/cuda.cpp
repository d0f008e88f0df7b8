// A stand-in for CUDA's driver, runtime, cuBLAS, cuDNN and NCCL: what TensorFlow asks of a GPU is
// counted, and nothing is computed. Device memory is memory of the host, copies copy, a kernel does
// nothing. A bool that the host reads is true, as "the gradients are finite" is in most steps.
//
// Functions that are not here return 0, see fake_gpu/__init__.py. FAKE_GPU_* of the environment:
// COUNT, the number of GPUs; MEMORY_MIB and BUSY_MIB, the memory of each and what others use of it;
// LAUNCH_US, how long a launch takes: streams and events then end when those of a GPU would, and
// "gaps" are the launches that came when their GPU had nothing more to do. 0: all ends at once.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>

#define API extern "C" __attribute__((visibility("default")))
#undef cudaGetDeviceProperties

static const struct {
  template <typename Result> operator Result() const { return Result(0); }
} OK;  // in the type of any library

// ---- what is counted ----

static std::mutex counts_lock;
static std::map<std::string, long> counts;

static void count(const std::string& what, long number = 1) {
  std::lock_guard<std::mutex> held(counts_lock);
  counts[what] += number;
}

static void takes_launch(void* stream);
static thread_local void* last_stream;  // that of libraries, which are not asked for theirs
API void fake_gpu_launch(const char* kernel) {
  takes_launch(last_stream);
  count("launches");
  count(std::string("kernel ") + kernel);
}

API void fake_gpu_reset() {
  std::lock_guard<std::mutex> held(counts_lock);
  counts.clear();
}

// Returns lines of a name, a tab and a number; valid until the next call.
API const char* fake_gpu_counts() {
  static std::string text;
  std::lock_guard<std::mutex> held(counts_lock);
  text.clear();
  for (auto& [name, number] : counts) text += name + "\t" + std::to_string(number) + "\n";
  return text.c_str();
}

static size_t setting(const char* name, size_t otherwise) {
  const char* value = getenv(name);
  return value ? atol(value) : otherwise;
}

static int devices() {
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) return setting("FAKE_GPU_COUNT", 1);
  int number = 0;  // "-1" and "" hide all; "0,3" shows two
  for (const char* at = visible; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : nullptr)
    number += *at >= '0' && *at <= '9';
  return number;
}

// ---- devices, contexts, handles ----

// Whatever the libraries call a handle: TensorFlow only gives it back.
static void* handle() { return calloc(1, 1024); }
template <typename Handle, typename Result = int> static auto makes(Handle* to) {
  *to = static_cast<Handle>(handle());
  return OK;
}

struct Context { int device; };
static Context contexts[64];
static thread_local Context* current = nullptr;
static CUcontext context_of(int device) {
  contexts[device].device = device;
  return reinterpret_cast<CUcontext>(&contexts[device]);
}
static int device_here() { return current ? current->device : 0; }

static int attribute(int which) {
  switch (which) {  // of an H100
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 49152;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return 232448;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return 233472;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return 1980000;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 2619000;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 5120;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return 50 << 20;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return 132;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return 2048;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return 32;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return 9;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS: return 1;
    default: return 0;
  }
}

static const char* NAME = "Stand-in for an NVIDIA H100";
static size_t memory() { return setting("FAKE_GPU_MEMORY_MIB", 8192) << 20; }
static size_t busy() { return setting("FAKE_GPU_BUSY_MIB", 0) << 20; }

API CUresult cuInit(unsigned) { return devices() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE; }
API CUresult cuDriverGetVersion(int* to) { *to = 12080; return OK; }
API CUresult cuDeviceGetCount(int* to) { *to = devices(); return OK; }
API CUresult cuDeviceGet(CUdevice* to, int index) { *to = index; return OK; }
API CUresult cuDeviceGetName(char* to, int size, CUdevice) {
  snprintf(to, size, "%s", NAME);
  return OK;
}
API CUresult cuDeviceGetUuid_v2(CUuuid* to, CUdevice device) {
  memset(to, device + 1, sizeof *to);
  return OK;
}
API CUresult cuDeviceTotalMem_v2(size_t* to, CUdevice) { *to = memory(); return OK; }
API CUresult cuDeviceGetPCIBusId(char* to, int size, CUdevice device) {
  snprintf(to, size, "0000:%02x:00.0", device + 1);
  return OK;
}
API CUresult cuDeviceComputeCapability(int* major, int* minor, CUdevice) {
  *major = 9, *minor = 0;
  return OK;
}
API CUresult cuDeviceGetAttribute(int* to, CUdevice_attribute which, CUdevice) {
  *to = attribute(which);
  return OK;
}
API CUresult cuDeviceGetP2PAttribute(int* to, CUdevice_P2PAttribute, CUdevice, CUdevice) {
  *to = 1;
  return OK;
}
API CUresult cuDeviceCanAccessPeer(int* to, CUdevice, CUdevice) { *to = 1; return OK; }
API CUresult cuDevicePrimaryCtxRetain(CUcontext* to, CUdevice device) {
  *to = context_of(device);
  return OK;
}
API CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0, *active = 1;
  return OK;
}
API CUresult cuCtxGetCurrent(CUcontext* to) {
  *to = reinterpret_cast<CUcontext>(current);
  return OK;
}
API CUresult cuCtxSetCurrent(CUcontext context) {
  current = reinterpret_cast<Context*>(context);
  return OK;
}
API CUresult cuCtxGetDevice(CUdevice* to) { *to = device_here(); return OK; }
API CUresult cuCtxGetStreamPriorityRange(int* least, int* most) {
  *least = 0, *most = -5;
  return OK;
}
API CUresult cuGetErrorName(CUresult, const char** to) { *to = "CUDA_ERROR"; return OK; }
API CUresult cuGetErrorString(CUresult, const char** to) { *to = "error"; return OK; }

API cudaError_t cudaGetDeviceCount(int* to) {
  *to = devices();
  return *to ? cudaSuccess : cudaErrorNoDevice;
}
API cudaError_t cudaGetDevice(int* to) { *to = device_here(); return OK; }
API cudaError_t cudaSetDevice(int device) {
  current = reinterpret_cast<Context*>(context_of(device));
  return OK;
}
API const char* cudaGetErrorString(cudaError_t) { return "error"; }
API const char* cudaGetErrorName(cudaError_t) { return "cudaError"; }
API cudaError_t cudaRuntimeGetVersion(int* to) { *to = 12050; return OK; }
API cudaError_t cudaDriverGetVersion(int* to) { *to = 12080; return OK; }
API cudaError_t cudaDeviceGetAttribute(int* to, cudaDeviceAttr which, int) {
  *to = attribute(which);  // the numbers are those of the driver
  return OK;
}
API cudaError_t cudaGetDeviceProperties_v2(cudaDeviceProp* to, int device) {
  memset(to, 0, sizeof *to);
  strcpy(to->name, NAME);
  to->totalGlobalMem = memory();
  to->sharedMemPerBlock = 49152;
  to->sharedMemPerBlockOptin = 232448;
  to->sharedMemPerMultiprocessor = 233472;
  to->regsPerBlock = to->regsPerMultiprocessor = 65536;
  to->warpSize = 32;
  to->maxThreadsPerBlock = to->maxThreadsDim[0] = to->maxThreadsDim[1] = 1024;
  to->maxThreadsDim[2] = 64;
  to->maxGridSize[0] = 2147483647;
  to->maxGridSize[1] = to->maxGridSize[2] = 65535;
  to->major = 9;
  to->multiProcessorCount = 132;
  to->maxThreadsPerMultiProcessor = 2048;
  to->maxBlocksPerMultiProcessor = 32;
  to->pciBusID = device + 1;
  return OK;
}
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* to, int device) {
  return cudaGetDeviceProperties_v2(to, device);
}
API cudaError_t cudaDeviceGetPCIBusId(char* to, int size, int device) {
  cuDeviceGetPCIBusId(to, size, device);
  return OK;
}
API cudaError_t cudaDeviceCanAccessPeer(int* to, int, int) { *to = 1; return OK; }

// ---- time: when what a stream was asked for ends, in microseconds ----

static double now() {
  using namespace std::chrono;
  return duration<double, std::micro>(steady_clock::now().time_since_epoch()).count();
}
static void wait_until(double end) {
  while (double left = std::max(0.0, end - now()))
    std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(left));
}
static double launch_us() {
  static double each = setting("FAKE_GPU_LAUNCH_US", 0);
  return each;
}
static std::mutex clock_lock;
static double ends[64];  // of the launches of a GPU
static double of_no_stream;
static double& end_of(void* handle) { return handle ? *static_cast<double*>(handle) : of_no_stream; }
static double ended(void* handle) {
  std::lock_guard<std::mutex> held(clock_lock);
  return end_of(handle);
}
static void merge(void* into, void* from) {
  std::lock_guard<std::mutex> held(clock_lock);
  end_of(into) = std::max(end_of(into), end_of(from));
}
static void takes(void* stream, double us, bool launch = false) {
  if (!launch_us()) return;
  std::lock_guard<std::mutex> held(clock_lock);
  double at = now(), &end = end_of(stream), &device = ends[device_here()];
  if (launch && device && device < at) count("gaps"), count("gaps us", at - device);
  end = std::max(end, at) + us;
  if (launch) device = std::max(device, end);
}

static void takes_launch(void* stream) { takes(stream, launch_us(), true); }

// ---- memory ----

struct Block { size_t bytes; int device; };
static std::mutex blocks_lock;
static std::map<uintptr_t, Block> blocks;
static size_t allocated[64];

static void* allocate(size_t bytes) {  // zeros, which take no memory before they are written
  std::lock_guard<std::mutex> held(blocks_lock);
  int device = device_here();
  if (bytes > memory() - busy() - allocated[device]) return nullptr;
  void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) return nullptr;
  blocks[reinterpret_cast<uintptr_t>(made)] = {bytes, device};
  allocated[device] += bytes;
  return made;
}

static void release(void* at) {
  std::lock_guard<std::mutex> held(blocks_lock);
  auto found = blocks.find(reinterpret_cast<uintptr_t>(at));
  if (found == blocks.end()) return;
  allocated[found->second.device] -= found->second.bytes;
  munmap(at, found->second.bytes);
  blocks.erase(found);
}

// Returns the number of the GPU whose memory an address is in, -1 for the host.
static int place(const void* pointer, uintptr_t* start = nullptr, size_t* bytes = nullptr) {
  std::lock_guard<std::mutex> held(blocks_lock);
  auto at = reinterpret_cast<uintptr_t>(pointer);
  auto after = blocks.upper_bound(at);
  if (after == blocks.begin()) return -1;
  auto& [begin, block] = *std::prev(after);
  if (at >= begin + block.bytes) return -1;
  if (start) *start = begin;
  if (bytes) *bytes = block.bytes;
  return block.device;
}

static void copy(void* to, const void* from, size_t bytes, void* stream = nullptr) {
  takes(stream, 5 + bytes / 25e3);  // 25 GB/s
  int there = place(to), here = place(from);
  const char* kind = there < 0 ? (here < 0 ? "on the host" : "to the host")
                     : here < 0 ? "to the device" : here == there ? "within" : "between";
  count(std::string("copies ") + kind);
  count(std::string("bytes ") + kind, bytes);
  count(std::string("copies ") + kind + " of " + std::to_string(bytes) + " bytes");
  memmove(to, from, bytes);
  if (there < 0 && here >= 0 && bytes == 1) *static_cast<char*>(to) = 1;  // a bool
}
static void copy_now(void* to, const void* from, size_t bytes) {
  count("synchronisations");
  wait_until(ends[device_here()]);
  copy(to, from, bytes);
}

API CUresult cuMemGetInfo_v2(size_t* unused, size_t* total) {
  std::lock_guard<std::mutex> held(blocks_lock);
  *total = memory(), *unused = *total - busy() - allocated[device_here()];
  return OK;
}
API CUresult cuMemAlloc_v2(CUdeviceptr* to, size_t bytes) {
  count("allocations");
  *to = reinterpret_cast<CUdeviceptr>(allocate(bytes));
  return *to ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
API CUresult cuMemFree_v2(CUdeviceptr at) {
  release(reinterpret_cast<void*>(at));
  return OK;
}
API CUresult cuMemHostAlloc(void** to, size_t bytes, unsigned) {
  return posix_memalign(to, 512, bytes) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
API CUresult cuMemFreeHost(void* at) { free(at); return OK; }
API CUresult cuMemGetAddressRange_v2(CUdeviceptr* start, size_t* bytes, CUdeviceptr at) {
  uintptr_t begin;
  size_t size;
  if (place(reinterpret_cast<void*>(at), &begin, &size) < 0) return CUDA_ERROR_INVALID_VALUE;
  if (start) *start = begin;
  if (bytes) *bytes = size;
  return OK;
}
API CUresult cuPointerGetAttribute(void* to, CUpointer_attribute which, CUdeviceptr at) {
  int device = place(reinterpret_cast<void*>(at));
  auto number = static_cast<int*>(to);
  if (which == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
    *number = device < 0 ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
  else if (which == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
    *number = device < 0 ? 0 : device;
  else if (which == CU_POINTER_ATTRIBUTE_CONTEXT)
    *static_cast<CUcontext*>(to) = context_of(device < 0 ? 0 : device);
  else
    *number = 0;
  return OK;
}
API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  copy_now(reinterpret_cast<void*>(to), from, bytes);
  return OK;
}
API CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  copy_now(to, reinterpret_cast<void*>(from), bytes);
  return OK;
}
API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  copy_now(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
  return OK;
}
API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  copy(reinterpret_cast<void*>(to), from, bytes, stream);
  return OK;
}
API CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  copy(to, reinterpret_cast<void*>(from), bytes, stream);
  return OK;
}
API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  copy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes, stream);
  return OK;
}
API CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  copy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes, stream);
  return OK;
}
API CUresult cuMemcpyPeerAsync(
    CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t bytes, CUstream stream) {
  copy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes, stream);
  return OK;
}
API CUresult cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t bytes, CUstream) {
  count("fills");
  memset(reinterpret_cast<void*>(at), value, bytes);
  return OK;
}
API CUresult cuMemsetD8_v2(CUdeviceptr at, unsigned char value, size_t bytes) {
  return cuMemsetD8Async(at, value, bytes, nullptr);
}
API CUresult cuMemsetD32Async(CUdeviceptr at, unsigned value, size_t number, CUstream) {
  count("fills");
  for (size_t i = 0; i < number; i++) reinterpret_cast<unsigned*>(at)[i] = value;
  return OK;
}
API CUresult cuMemsetD32_v2(CUdeviceptr at, unsigned value, size_t number) {
  return cuMemsetD32Async(at, value, number, nullptr);
}

API cudaError_t cudaMalloc(void** to, size_t bytes) {
  count("allocations");
  *to = allocate(bytes);
  return *to ? cudaSuccess : cudaErrorMemoryAllocation;
}
API cudaError_t cudaFree(void* at) { release(at); return OK; }
API cudaError_t cudaHostAlloc(void** to, size_t bytes, unsigned) {
  return posix_memalign(to, 512, bytes) ? cudaErrorMemoryAllocation : cudaSuccess;
}
API cudaError_t cudaMallocHost(void** to, size_t bytes) { return cudaHostAlloc(to, bytes, 0); }
API cudaError_t cudaFreeHost(void* at) { free(at); return OK; }
API cudaError_t cudaMemGetInfo(size_t* unused, size_t* total) {
  cuMemGetInfo_v2(unused, total);
  return OK;
}
API cudaError_t cudaMemcpyAsync(
    void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  copy(to, from, bytes, stream);
  return OK;
}
API cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  copy_now(to, from, bytes);
  return OK;
}
API cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t) {
  count("fills");
  memset(at, value, bytes);
  return OK;
}
API cudaError_t cudaMemset(void* at, int value, size_t bytes) {
  return cudaMemsetAsync(at, value, bytes, nullptr);
}
API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* to, const void* at) {
  memset(to, 0, sizeof *to);
  to->type = place(at) < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  to->devicePointer = const_cast<void*>(at);
  return OK;
}
API cudaError_t cudaGetSymbolAddress(void** to, const void*) { *to = handle(); return OK; }

// ---- streams and events: all that was asked for is done at once ----

// A callback takes locks that the caller may hold: it runs in a thread of its own.
static void later(std::function<void()> callback) {
  struct Queue {
    std::mutex lock;
    std::condition_variable filled;
    std::deque<std::function<void()>> waiting;
    void serve() {
      for (;;) {
        std::unique_lock<std::mutex> held(lock);
        filled.wait(held, [this] { return !waiting.empty(); });
        auto next = std::move(waiting.front());
        waiting.pop_front();
        held.unlock();
        next();
      }
    }
  };
  static Queue* queue = [] {
    auto made = new Queue;
    std::thread([made] { made->serve(); }).detach();
    return made;
  }();
  std::lock_guard<std::mutex> held(queue->lock);
  queue->waiting.push_back(std::move(callback));
  queue->filled.notify_one();
}

API CUresult cuStreamCreate(CUstream* to, unsigned) { return makes(to); }
API CUresult cuStreamCreateWithPriority(CUstream* to, unsigned, int) { return makes(to); }
API CUresult cuEventCreate(CUevent* to, unsigned) { return makes(to); }
API cudaError_t cudaStreamCreate(cudaStream_t* to) { return makes(to); }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t* to, unsigned) { return makes(to); }
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* to, unsigned, int) { return makes(to); }
API cudaError_t cudaEventCreate(cudaEvent_t* to) { return makes(to); }
API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* to, unsigned) { return makes(to); }

static auto waits(double end) {
  count("synchronisations");
  wait_until(end);
  return OK;
}
API CUresult cuCtxSynchronize() { return waits(ends[device_here()]); }
API CUresult cuStreamSynchronize(CUstream stream) { return waits(ended(stream)); }
API CUresult cuEventSynchronize(CUevent event) { return waits(ended(event)); }
API cudaError_t cudaDeviceSynchronize() { return waits(ends[device_here()]); }
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return waits(ended(stream)); }
API cudaError_t cudaEventSynchronize(cudaEvent_t event) { return waits(ended(event)); }
API CUresult cuEventRecord(CUevent event, CUstream stream) {
  std::lock_guard<std::mutex> held(clock_lock);
  end_of(event) = end_of(stream);
  return OK;
}
API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  merge(stream, event);
  return OK;
}
API CUresult cuEventQuery(CUevent event) {
  return ended(event) > now() ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}
API CUresult cuStreamQuery(CUstream stream) {
  return ended(stream) > now() ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

API CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* to) {
  *to = CU_STREAM_CAPTURE_STATUS_NONE;
  return OK;
}
API CUresult cuStreamGetPriority(CUstream, int* to) { *to = 0; return OK; }
API CUresult cuStreamGetCtx(CUstream, CUcontext* to) { return cuCtxGetCurrent(to); }
API CUresult cuLaunchHostFunc(CUstream stream, CUhostFn callback, void* data) {
  later([=, end = ended(stream)] { wait_until(end), callback(data); });
  return OK;
}
API CUresult cuStreamAddCallback(CUstream stream, CUstreamCallback callback, void* data, unsigned) {
  later([=, end = ended(stream)] { wait_until(end), callback(stream, CUDA_SUCCESS, data); });
  return OK;
}
API CUresult cuEventElapsedTime(float* to, CUevent, CUevent) { *to = 0.01f; return OK; }
API CUresult cuEventElapsedTime_v2(float* to, CUevent, CUevent) {
  *to = 0.01f;
  return OK;
}
API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* most) {
  *least = 0, *most = -5;
  return OK;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* to) {
  *to = cudaStreamCaptureStatusNone;
  return OK;
}

// ---- kernels ----

// A handle of a kernel is the address of its name.
static std::string& named(const std::string& name) { return *new std::string(name); }
template <typename Handle> static auto finds(Handle* to, const std::string& name) {
  *to = reinterpret_cast<Handle>(&named(name));
  return OK;
}
template <typename Handle> static auto launches(Handle kernel, void* stream) {
  last_stream = stream;
  fake_gpu_launch(reinterpret_cast<std::string*>(kernel)->c_str());
  return OK;
}

API CUresult cuModuleLoadData(CUmodule* to, const void*) { return makes(to); }
API CUresult cuModuleLoadDataEx(CUmodule* to, const void*, unsigned, CUjit_option*, void**) {
  return makes(to);
}
API CUresult cuModuleLoadFatBinary(CUmodule* to, const void*) { return makes(to); }
API CUresult cuModuleGetFunction(CUfunction* to, CUmodule, const char* name) {
  return finds(to, name);
}
API CUresult cuModuleGetGlobal_v2(CUdeviceptr* to, size_t* bytes, CUmodule, const char*) {
  size_t large = 64 << 20;  // a constant of a compiled function; its size is not said here
  if (bytes) *bytes = large;
  if (to) *to = reinterpret_cast<CUdeviceptr>(allocate(large));
  return OK;
}
API CUresult cuLibraryLoadData(CUlibrary* to, const void*, CUjit_option*, void**, unsigned,
                               CUlibraryOption*, void**, unsigned) {
  return makes(to);
}
API CUresult cuLibraryGetKernel(CUkernel* to, CUlibrary, const char* name) {
  return finds(to, name);
}
API CUresult cuKernelGetFunction(CUfunction* to, CUkernel kernel) {
  *to = reinterpret_cast<CUfunction>(kernel);
  return OK;
}
API CUresult cuFuncGetName(const char** to, CUfunction kernel) {
  *to = reinterpret_cast<std::string*>(kernel)->c_str();
  return OK;
}
API CUresult cuFuncGetAttribute(int* to, CUfunction_attribute which, CUfunction) {
  *to = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
        : which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  return OK;
}
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* to, CUfunction, int, size_t) {
  *to = 2;
  return OK;
}
API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* to, CUfunction, int, size_t, unsigned) {
  *to = 2;
  return OK;
}
API CUresult cuOccupancyMaxPotentialBlockSize(
    int* grid, int* block, CUfunction, CUoccupancyB2DSize, size_t, int) {
  *grid = 264, *block = 256;
  return OK;
}
API CUresult cuOccupancyMaxPotentialBlockSizeWithFlags(
    int* grid, int* block, CUfunction, CUoccupancyB2DSize, size_t, int, unsigned) {
  *grid = 264, *block = 256;
  return OK;
}
API CUresult cuLaunchKernel(CUfunction kernel, unsigned, unsigned, unsigned, unsigned, unsigned,
                            unsigned, unsigned, CUstream stream, void**, void**) {
  return launches(kernel, stream);
}
API CUresult cuLaunchKernelEx(const CUlaunchConfig* given, CUfunction kernel, void**, void**) {
  return launches(kernel, given->hStream);
}
API CUresult cuLaunchCooperativeKernel(CUfunction kernel, unsigned, unsigned, unsigned, unsigned,
                                       unsigned, unsigned, unsigned, CUstream stream,
                                       void**) {
  return launches(kernel, stream);
}

// What nvcc's code calls: it registers each kernel by the address of its function of the host.
static std::mutex names_lock;
static std::unordered_map<const void*, std::string>& names() {
  static auto known = new std::unordered_map<const void*, std::string>;
  return *known;
}
static std::string name_of(const void* function) {
  std::lock_guard<std::mutex> held(names_lock);
  auto found = names().find(function);
  return found == names().end() ? "unknown" : found->second;
}
static cudaError_t launches_of(const void* function, void* stream) {
  last_stream = stream;
  fake_gpu_launch(name_of(function).c_str());
  return OK;
}
struct Configuration { dim3 grid, block; size_t shared; void* stream; };
static thread_local std::deque<Configuration> configurations;

API void** __cudaRegisterFatBinary(void*) { return static_cast<void**>(handle()); }
API void __cudaRegisterFunction(void**, const char* function, char*, const char* name, ...) {
  std::lock_guard<std::mutex> held(names_lock);
  names()[function] = name;
}
API unsigned __cudaPushCallConfiguration(
    dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
API cudaError_t __cudaPopCallConfiguration(
    dim3* grid, dim3* block, size_t* shared, void* stream) {
  auto& last = configurations.back();
  *grid = last.grid, *block = last.block, *shared = last.shared;
  *static_cast<void**>(stream) = last.stream;
  configurations.pop_back();
  return OK;
}
API cudaError_t cudaLaunchKernel(
    const void* function, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launches_of(function, stream);
}
API cudaError_t cudaLaunchKernelExC(
    const cudaLaunchConfig_t* given, const void* function, void**) {
  return launches_of(function, given->stream);
}
API cudaError_t cudaLaunchCooperativeKernel(
    const void* function, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launches_of(function, stream);
}
API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* to, const void*) {
  memset(to, 0, sizeof *to);
  to->maxThreadsPerBlock = 1024, to->numRegs = 32, to->binaryVersion = to->ptxVersion = 90;
  return OK;
}
API cudaError_t cudaGetFuncBySymbol(cudaFunction_t* to, const void* symbol) {
  return finds(to, name_of(symbol));
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int* to, const void*, int, size_t) {
  *to = 2;
  return OK;
}
API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* to, const void*, int, size_t, unsigned) {
  *to = 2;
  return OK;
}
static cudaError_t not_found(void** to, cudaDriverEntryPointQueryResult* result) {
  *to = nullptr;
  if (result) *result = cudaDriverEntryPointSymbolNotFound;
  return OK;
}
API cudaError_t cudaGetDriverEntryPoint(
    const char*, void** to, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  return not_found(to, result);
}
API cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void** to, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  return not_found(to, result);
}

// ---- cuBLAS and cuDNN ----

static int version(int part, int major, int minor) {
  return part == 0 ? major : part == 1 ? minor : 0;
}
API int cublasGetVersion_v2(void*, int* to) { *to = 120503; return 0; }
API size_t cublasLtGetVersion() { return 120503; }
API size_t cublasLtGetCudartVersion() { return 12050; }
API int cublasGetProperty(int part, int* to) { *to = version(part, 12, 5); return 0; }
API int cublasLtGetProperty(int part, int* to) { *to = version(part, 12, 5); return 0; }
API int cublasGetMathMode(void*, int* to) { *to = 0; return 0; }
API int cublasGetPointerMode_v2(void*, int* to) { *to = 0; return 0; }
API int cublasGetStream_v2(void*, void** to) { *to = nullptr; return 0; }
API int cublasLtMatmulAlgoGetHeuristic(
    void*, void*, void*, void*, void*, void*, void*, int, void* to, int* found) {
  memset(to, 0, 96);  // one cublasLtMatmulHeuristicResult_t, of status 0
  *found = 1;
  return 0;
}

API size_t cudnnGetVersion() { return 90300; }
API size_t cudnnGetCudartVersion() { return 12050; }
API int cudnnGetProperty(int part, int* to) { *to = version(part, 9, 3); return 0; }
API const char* cudnnGetErrorString(int) { return "error"; }
API int cudnnBackendCreateDescriptor(int, void** to) { return makes(to); }

// Of a convolution there is one engine, with one configuration that needs no memory.
enum { HEURISTICS_RESULTS = 202, CONFIG_ENGINE = 300, CONFIG_WORKSPACE = 303 };
enum { PLAN_CONFIG = 401, PLAN_WORKSPACE = 402, ENGINE_INDEX = 1301 };
API int cudnnBackendGetAttribute(
    void*, int name, int, int64_t wanted, int64_t* found, void* to) {
  bool is_number = name == CONFIG_WORKSPACE || name == PLAN_WORKSPACE || name == ENGINE_INDEX;
  bool known = is_number || name == HEURISTICS_RESULTS || name == CONFIG_ENGINE ||
               name == PLAN_CONFIG;
  if (found) *found = known;
  if (is_number && to && wanted) *static_cast<int64_t*>(to) = name == ENGINE_INDEX;
  return 0;
}

// ---- NCCL ----

struct Rank { int of, number; };
static int ranked(void** to, int of, int number) { *to = new Rank{of, number}; return 0; }
static int collective(const char* kind, size_t elements, int type) {
  static const char* types[] = {"int8", "uint8", "int32", "uint32", "int64", "uint64",
                                "float16", "float32", "float64", "bfloat16"};
  count(std::string("nccl ") + kind + " " + std::to_string(elements) + " " + types[type]);
  fake_gpu_launch(kind);
  return 0;
}
struct Id { char bytes[128]; };
API int ncclGetVersion(int* to) { *to = 22501; return 0; }
API int ncclGetUniqueId(Id* to) { memset(to, 7, sizeof *to); return 0; }
API int ncclCommInitRank(void** to, int of, Id, int number) { return ranked(to, of, number); }
API int ncclCommInitRankConfig(void** to, int of, Id, int number, void*) {
  return ranked(to, of, number);
}
API int ncclCommInitAll(void** to, int of, const int*) {
  for (int number = 0; number < of; number++) ranked(to + number, of, number);
  return 0;
}
API int ncclCommCount(Rank* rank, int* to) { *to = rank->of; return 0; }
API int ncclCommUserRank(Rank* rank, int* to) { *to = rank->number; return 0; }
API int ncclCommGetAsyncError(void*, int* to) { *to = 0; return 0; }
API const char* ncclGetErrorString(int) { return "error"; }
API const char* ncclGetLastError(void*) { return "error"; }
API int ncclAllReduce(const void*, void*, size_t elements, int type, int, void*, void*) {
  return collective("AllReduce", elements, type);
}
API int ncclReduce(const void*, void*, size_t elements, int type, int, int, void*, void*) {
  return collective("Reduce", elements, type);
}
API int ncclBroadcast(const void*, void*, size_t elements, int type, int, void*, void*) {
  return collective("Broadcast", elements, type);
}
API int ncclAllGather(const void*, void*, size_t elements, int type, void*, void*) {
  return collective("AllGather", elements, type);
}
API int ncclReduceScatter(const void*, void*, size_t elements, int type, int, void*, void*) {
  return collective("ReduceScatter", elements, type);
}
