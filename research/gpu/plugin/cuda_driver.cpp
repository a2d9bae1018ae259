// cuda_driver.cpp: the functions of libcuda.so.1, which the process's CUDA backend has loaded. Its device is the current one
// of the process's CUDA runtime.
#include "driver.h"

#include <cuda.h>
#include <dlfcn.h>

#include <map>
#include <mutex>

namespace subkv::plugin {

namespace {

#define FUNCTIONS(X)                                                                                                   \
    X(cuDeviceGet)                                                                                                     \
    X(cuDevicePrimaryCtxRetain)                                                                                        \
    X(cuCtxSetCurrent)                                                                                                 \
    X(cuCtxSynchronize)                                                                                                \
    X(cuStreamCreate)                                                                                                  \
    X(cuStreamWaitEvent)                                                                                               \
    X(cuEventRecord)                                                                                                   \
    X(cuMemGetAllocationGranularity)                                                                                   \
    X(cuMemAddressReserve)                                                                                             \
    X(cuMemAddressFree)                                                                                                \
    X(cuMemCreate)                                                                                                     \
    X(cuMemMap)                                                                                                        \
    X(cuMemSetAccess)                                                                                                  \
    X(cuMemUnmap)                                                                                                      \
    X(cuMemRelease)                                                                                                    \
    X(cuMemcpy)                                                                                                        \
    X(cuMemsetD8)

#define TEXT_(x) #x
#define TEXT(x)  TEXT_(x) // with the version that cuda.h gives the function
#define X(name)  decltype(&::name) name;

struct Cuda {
    FUNCTIONS(X)

    CUcontext           context = nullptr;
    CUmemAllocationProp memory  = {};
} cuda;
#undef X

Driver driver = {};

std::mutex                                        mutex;
std::map<uint8_t *, CUmemGenericAllocationHandle> mapped;

// Makes the device the current one of this thread.
bool enter() {
    return cuda.cuCtxSetCurrent(cuda.context) == CUDA_SUCCESS;
}

void * new_stream() {
    CUstream stream = nullptr;
    return enter() && cuda.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS ? stream : nullptr;
}

bool wait(void * stream, void * event) {
    return cuda.cuStreamWaitEvent((CUstream) stream, (CUevent) event, 0) == CUDA_SUCCESS;
}

bool record(void * event, void * stream) {
    return cuda.cuEventRecord((CUevent) event, (CUstream) stream) == CUDA_SUCCESS;
}

bool wait_for_all() {
    return enter() && cuda.cuCtxSynchronize() == CUDA_SUCCESS;
}

uint8_t * reserve(size_t size) {
    CUdeviceptr base = 0;
    return enter() && cuda.cuMemAddressReserve(&base, size, 0, 0, 0) == CUDA_SUCCESS ? (uint8_t *) base : nullptr;
}

void release(uint8_t * base, size_t size) {
    cuda.cuMemAddressFree((CUdeviceptr) base, size);
}

bool map(uint8_t * page) {
    CUmemGenericAllocationHandle handle;
    if (!enter() || cuda.cuMemCreate(&handle, driver.page, &cuda.memory, 0) != CUDA_SUCCESS) {
        return false;
    }
    CUmemAccessDesc access = {};
    access.location        = cuda.memory.location;
    access.flags           = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (cuda.cuMemMap((CUdeviceptr) page, driver.page, 0, handle, 0) != CUDA_SUCCESS) {
        cuda.cuMemRelease(handle);
        return false;
    }
    const std::lock_guard<std::mutex> lock(mutex);
    mapped[page] = handle;
    return cuda.cuMemSetAccess((CUdeviceptr) page, driver.page, &access, 1) == CUDA_SUCCESS;
}

void unmap(uint8_t * page) {
    const std::lock_guard<std::mutex> lock(mutex);
    cuda.cuMemUnmap((CUdeviceptr) page, driver.page);
    cuda.cuMemRelease(mapped.at(page));
    mapped.erase(page);
}

bool copy(void * to, const void * from, size_t n) { // of any memory: addresses are unified
    return enter() && cuda.cuMemcpy((CUdeviceptr) to, (CUdeviceptr) from, n) == CUDA_SUCCESS && wait_for_all();
}

bool fill(void * at, uint8_t value, size_t n) {
    return enter() && cuda.cuMemsetD8((CUdeviceptr) at, value, n) == CUDA_SUCCESS && wait_for_all();
}

} // namespace

const Driver * cuda_driver() {
    void * library = dlopen("libcuda.so.1", RTLD_LAZY);
    if (!library) {
        return nullptr;
    }
#define X(name)                                                                                                        \
    cuda.name = (decltype(cuda.name)) dlsym(library, TEXT(name));                                                      \
    if (!cuda.name) {                                                                                                  \
        return nullptr;                                                                                                \
    }
    FUNCTIONS(X)
#undef X
    CUdevice device           = 0;
    cuda.memory.type          = CU_MEM_ALLOCATION_TYPE_PINNED;
    cuda.memory.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    if (cuda.cuDeviceGet(&device, 0) != CUDA_SUCCESS ||
        cuda.cuDevicePrimaryCtxRetain(&cuda.context, device) != CUDA_SUCCESS ||
        cuda.cuMemGetAllocationGranularity(&driver.page, &cuda.memory, CU_MEM_ALLOC_GRANULARITY_MINIMUM) !=
            CUDA_SUCCESS) {
        return nullptr;
    }
    driver = { driver.page, new_stream, wait, record, wait_for_all, reserve, release, map, unmap, copy, fill, nullptr };
    return &driver;
}

} // namespace subkv::plugin
