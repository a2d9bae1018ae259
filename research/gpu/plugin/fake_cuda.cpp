// fake_cuda.cpp: libcuda, libcudart and libcublas in one library, for a CUDA backend that others built, on a machine without
// a GPU: device memory is host memory, kernels do nothing, calls are counted, and work of two streams that no event orders
// ends the process. So the numbers are nonsense, and the calls and their order are those of a GPU (README.md).
#include <cublas_names.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#undef cudaGetDeviceProperties

namespace {

#define COUNTED(X)                                                                                                     \
    X(kernels)                                                                                                         \
    X(graphs) X(records) X(waits) X(captures) X(instantiations) X(updates) X(copies) X(synchronizations) X(captured)

#define X(name) std::atomic<long> name{ 0 };
COUNTED(X)
#undef X

// Numbers of works, in the order in which the host starts them: of the last one, and of the last one that it waited for.
uint64_t   last = 0, host = 0;
std::mutex mutex;

struct Stream {
    uint64_t seen      = 0;
    bool     capturing = false;
};

struct Event {
    uint64_t seen = 0;
};

Stream legacy, per_thread;

Stream & stream_of(const void * stream) {
    return stream == nullptr || stream == cudaStreamLegacy ? legacy :
           stream == cudaStreamPerThread                   ? per_thread :
                                                             *(Stream *) stream;
}

void start_work(const void * stream, std::atomic<long> & count) {
    Stream & s = stream_of(stream);
    if (s.capturing) {
        ++captured;
        return;
    }
    ++count;
    const std::lock_guard<std::mutex> lock(mutex);
    if (std::max(s.seen, host) != last) {
        std::fprintf(stderr, "fake CUDA: work that no event orders after earlier work of another stream\n");
        std::abort();
    }
    s.seen = ++last;
}

void wait_for(const void * stream) {
    ++synchronizations;
    const std::lock_guard<std::mutex> lock(mutex);
    host = std::max(host, stream_of(stream).seen);
}

cudaError_t copy(void * to, const void * from, size_t n, const void * stream) {
    start_work(stream, copies);
    std::memcpy(to, from, n);
    return cudaSuccess;
}

thread_local int current = 0;

} // namespace

extern "C" {

// Writes the counts since the last call.
void fake_cuda_report(const char * title) {
    std::fprintf(stderr, "fake CUDA: %s:", title);
#define X(name) std::fprintf(stderr, " %ld " #name ",", name.exchange(0));
    COUNTED(X)
#undef X
    std::fprintf(stderr, "\n");
}

//
// kernels
//

void ** __cudaRegisterFatBinary(void *) {
    static void * handle = nullptr;
    return &handle;
}
void __cudaRegisterFatBinaryEnd(void **) {}
void __cudaUnregisterFatBinary(void **) {}
void __cudaRegisterFunction(void **, const char *, char *, const char *, int, uint3 *, uint3 *, dim3 *, dim3 *, int *) {
}
void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}

thread_local struct {
    dim3         grid, block;
    size_t       shared;
    cudaStream_t stream;
} pushed;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    pushed = { grid, block, shared, stream };
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 * grid, dim3 * block, size_t * shared, void * stream) {
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared;
    *(cudaStream_t *) stream = pushed.stream;
    return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t * kernel, const void * function) {
    *kernel = (cudaKernel_t) function;
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void **, size_t, cudaStream_t stream) {
    start_work(stream, kernels);
    return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t * config, const void *, void **) {
    start_work(config->stream, kernels);
    return cudaSuccess;
}
cudaError_t cudaLaunchCooperativeKernel(const void *, dim3, dim3, void **, size_t, cudaStream_t stream) {
    start_work(stream, kernels);
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes * a, const void *) {
    *a                    = {};
    a->maxThreadsPerBlock = 1024;
    a->numRegs            = 64;
    a->ptxVersion = a->binaryVersion = 90;
    return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) {
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int * n, const void *, int, size_t, unsigned) {
    *n = 2;
    return cudaSuccess;
}

//
// the device
//

cudaError_t cudaGetDeviceCount(int * n) {
    *n = 1;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int * device) {
    *device = current;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    current = device;
    return cudaSuccess;
}
cudaError_t cudaSetDeviceFlags(unsigned) {
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int * can, int, int) {
    *can = 0;
    return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
    return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char * id, int n, int) {
    std::snprintf(id, (size_t) n, "0000:01:00.0");
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int * value, cudaDeviceAttr attr, int) {
    *value = attr == cudaDevAttrMultiProcessorCount          ? 132 :
             attr == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 232448 :
                                                               1;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp * p, int) {
    *p = {};
    std::strcpy(p->name, "fake");
    p->totalGlobalMem              = (size_t) 8 << 30;
    p->multiProcessorCount         = 132;
    p->sharedMemPerBlock           = 48 << 10;
    p->sharedMemPerBlockOptin      = 227 << 10;
    p->warpSize                    = 32;
    p->major                       = 9;
    p->maxThreadsPerBlock          = 1024;
    p->l2CacheSize                 = 50 << 20;
    p->regsPerMultiprocessor       = 65536;
    p->maxThreadsPerMultiProcessor = 2048;
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t * free, size_t * total) {
    *free = *total = (size_t) 8 << 30;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    ++synchronizations;
    const std::lock_guard<std::mutex> lock(mutex);
    host = last;
    return cudaSuccess;
}
const char * cudaGetErrorString(cudaError_t) {
    return "fake error";
}
cudaError_t cudaGetLastError() {
    return cudaSuccess;
}
cudaError_t cudaPeekAtLastError() {
    return cudaSuccess;
}

//
// memory
//

cudaError_t cudaMalloc(void ** p, size_t n) {
    *p = std::aligned_alloc(256, (n + 255) / 256 * 256 + 256);
    std::memset(*p, 0, n);
    return cudaSuccess;
}
cudaError_t cudaMallocManaged(void ** p, size_t n, unsigned) {
    return cudaMalloc(p, n);
}
cudaError_t cudaMallocHost(void ** p, size_t n) {
    return cudaMalloc(p, n);
}
cudaError_t cudaHostAlloc(void ** p, size_t n, unsigned) {
    return cudaMalloc(p, n);
}
cudaError_t cudaFree(void * p) {
    std::free(p);
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void * p) {
    return cudaFree(p);
}
cudaError_t cudaHostGetDevicePointer(void ** device, void * p, unsigned) {
    *device = p;
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void *, size_t, unsigned) {
    return cudaErrorNotSupported;
}
cudaError_t cudaHostUnregister(void *) {
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void * to, const void * from, size_t n, cudaMemcpyKind, cudaStream_t stream) {
    return copy(to, from, n, stream);
}
cudaError_t cudaMemcpyPeerAsync(void * to, int, const void * from, int, size_t n, cudaStream_t stream) {
    return copy(to, from, n, stream);
}
cudaError_t cudaMemcpy2DAsync(void * to, size_t pitch, const void * from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream) {
    start_work(stream, copies);
    for (size_t i = 0; i < height; ++i) {
        std::memcpy((char *) to + i * pitch, (const char *) from + i * from_pitch, width);
    }
    return cudaSuccess;
}
cudaError_t cudaMemset(void * p, int value, size_t n) {
    std::memset(p, value, n);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void * p, int value, size_t n, cudaStream_t stream) {
    start_work(stream, copies);
    std::memset(p, value, n);
    return cudaSuccess;
}

//
// streams, events, graphs
//

cudaError_t cudaStreamCreateWithFlags(cudaStream_t * stream, unsigned) {
    *stream = (cudaStream_t) new Stream;
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    delete (Stream *) stream;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    wait_for(stream);
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    ++waits;
    const std::lock_guard<std::mutex> lock(mutex);
    Stream &                          s = stream_of(stream);
    s.seen                              = std::max(s.seen, ((Event *) event)->seen);
    return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t * event, unsigned) {
    *event = (cudaEvent_t) new Event;
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete (Event *) event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    ++records;
    const std::lock_guard<std::mutex> lock(mutex);
    ((Event *) event)->seen = stream_of(stream).seen;
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    ++synchronizations;
    const std::lock_guard<std::mutex> lock(mutex);
    host = std::max(host, ((Event *) event)->seen);
    return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    ++captures;
    stream_of(stream).capturing = true;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t * graph) {
    stream_of(stream).capturing = false;
    *graph                      = (cudaGraph_t) &last;
    return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus * status) {
    *status = stream_of(stream).capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t) {
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t * exec, cudaGraph_t, unsigned long long) {
    ++instantiations;
    *exec = (cudaGraphExec_t) &host;
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) {
    return cudaSuccess;
}
cudaError_t cudaGraphExecUpdate(cudaGraphExec_t, cudaGraph_t, cudaGraphExecUpdateResultInfo *) {
    ++updates;
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t stream) {
    start_work(stream, graphs);
    return cudaSuccess;
}

//
// the driver
//

CUresult cuGetErrorString(CUresult, const char ** text) {
    *text = "fake error";
    return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice * device, int i) {
    *device = i;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int * value, CUdevice_attribute, CUdevice) {
    *value = 0; // no virtual memory for the backend's pools
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext * context, CUdevice) {
    *context = (CUcontext) &current;
    return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext) {
    return CUDA_SUCCESS;
}
CUresult cuCtxSynchronize() {
    return (CUresult) cudaDeviceSynchronize();
}
CUresult cuStreamCreate(CUstream * stream, unsigned) {
    return (CUresult) cudaStreamCreateWithFlags(stream, 0);
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
    return (CUresult) cudaStreamWaitEvent(stream, event, 0);
}
// A plug-in records an event after kernels on its own stream, which an emulation has run.
CUresult cuEventRecord(CUevent event, CUstream stream) {
    std::atomic<long> ours{ 0 };
    start_work(stream, ours);
    return (CUresult) cudaEventRecord(event, stream);
}
CUresult cuMemGetAllocationGranularity(size_t * n, const CUmemAllocationProp *, CUmemAllocationGranularity_flags) {
    *n = 2 << 20;
    return CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr * base, size_t size, size_t, CUdeviceptr, unsigned long long) {
    void * p = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *base    = (CUdeviceptr) p;
    return p == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr base, size_t size) {
    munmap((void *) base, size);
    return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long) {
    return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) {
    return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr base, size_t size, const CUmemAccessDesc *, size_t) {
    return mprotect((void *) base, size, PROT_READ | PROT_WRITE) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemUnmap(CUdeviceptr base, size_t size) {
    return mmap((void *) base, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) ==
                   MAP_FAILED ?
               CUDA_ERROR_INVALID_VALUE :
               CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle) {
    return CUDA_SUCCESS;
}
CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t n) {
    std::memcpy((void *) to, (const void *) from, n);
    return CUDA_SUCCESS;
}
CUresult cuMemsetD8(CUdeviceptr at, unsigned char value, size_t n) {
    std::memset((void *) at, value, n);
    return CUDA_SUCCESS;
}

#define X(name)                                                                                                        \
    int name() {                                                                                                       \
        return 0;                                                                                                      \
    }
CUBLAS(X)
#undef X

} // extern "C"
