// barriers.cpp: preloaded, it restricts the validation layer's checks to the barriers around dispatches of libsubkv's
// shaders. It adds a barrier between the backend's dispatches, because their matrix products bind all memory after their
// result and the layer assumes that they write it. SUBKV_LIBRARY: the library that contains the SPIR-V of these shaders.
// SUBKV_LOSE removes the barriers after their dispatches, to show that the layer reports missing barriers.
#include <vulkan/vulkan.h>

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <mutex>
#include <set>
#include <string>

namespace {

constexpr size_t END = 256; // bytes of a module that tell it: the backend adds capabilities at its beginning

PFN_vkGetInstanceProcAddr    get_instance;
PFN_vkGetDeviceProcAddr      get_device;
PFN_vkCreateShaderModule     create_module;
PFN_vkCreateComputePipelines create_pipelines;
PFN_vkCmdBindPipeline        bind_pipeline;
PFN_vkCmdDispatch            dispatch;
PFN_vkCmdPipelineBarrier     barrier;
std::set<VkShaderModule>     modules;
std::set<VkPipeline>         pipelines;
std::mutex                   mutex;         // pipelines are made by several threads
bool                         bound = false; // is a pipeline of ours
enum { NONE, OURS, OTHER } last    = NONE;  // dispatch

const std::string & library() {
    static const std::string bytes = [] {
        std::ifstream file(std::getenv("SUBKV_LIBRARY"), std::ios::binary);
        return std::string(std::istreambuf_iterator<char>(file), {});
    }();
    return bytes;
}

VkResult VKAPI_CALL our_module(VkDevice device, const VkShaderModuleCreateInfo * info,
                               const VkAllocationCallbacks * with, VkShaderModule * made) {
    const VkResult result = create_module(device, info, with, made);
    const char *   end    = (const char *) info->pCode + info->codeSize;
    if (memmem(library().data(), library().size(), end - std::min(END, info->codeSize),
               std::min(END, info->codeSize))) {
        const std::lock_guard<std::mutex> guard(mutex);
        modules.insert(*made);
    }
    return result;
}

VkResult VKAPI_CALL our_pipelines(VkDevice device, VkPipelineCache cache, uint32_t n,
                                  const VkComputePipelineCreateInfo * info, const VkAllocationCallbacks * with,
                                  VkPipeline * made) {
    const VkResult                    result = create_pipelines(device, cache, n, info, with, made);
    const std::lock_guard<std::mutex> guard(mutex);
    for (uint32_t i = 0; i < n; ++i) {
        if (modules.count(info[i].stage.module)) {
            pipelines.insert(made[i]);
        } else {
            pipelines.erase(made[i]);
        }
    }
    return result;
}

void VKAPI_CALL our_bind(VkCommandBuffer buffer, VkPipelineBindPoint point, VkPipeline pipeline) {
    const std::lock_guard<std::mutex> guard(mutex);
    bound = pipelines.count(pipeline) != 0;
    bind_pipeline(buffer, point, pipeline);
}

void VKAPI_CALL our_dispatch(VkCommandBuffer buffer, uint32_t x, uint32_t y, uint32_t z) {
    if (!bound && last == OTHER) {
        VkMemoryBarrier all = {};
        all.sType           = VK_STRUCTURE_TYPE_MEMORY_BARRIER;
        all.srcAccessMask = all.dstAccessMask = VK_ACCESS_MEMORY_READ_BIT | VK_ACCESS_MEMORY_WRITE_BIT;
        const VkPipelineStageFlags stages     = VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT | VK_PIPELINE_STAGE_TRANSFER_BIT;
        barrier(buffer, stages, stages, 0, 1, &all, 0, nullptr, 0, nullptr);
    }
    last = bound ? OURS : OTHER;
    dispatch(buffer, x, y, z);
}

void VKAPI_CALL our_barrier(VkCommandBuffer buffer, VkPipelineStageFlags from, VkPipelineStageFlags to,
                            VkDependencyFlags flags, uint32_t n, const VkMemoryBarrier * memory, uint32_t n_buffers,
                            const VkBufferMemoryBarrier * buffers, uint32_t n_images,
                            const VkImageMemoryBarrier * images) {
    static const bool lose = std::getenv("SUBKV_LOSE") != nullptr;
    if (!lose || last != OURS) {
        barrier(buffer, from, to, flags, n, memory, n_buffers, buffers, n_images, images);
    }
}

PFN_vkVoidFunction VKAPI_CALL our_get_device(VkDevice device, const char * name);

// This file's function of that name, which calls `found`; else `found`.
PFN_vkVoidFunction ours(const char * name, PFN_vkVoidFunction found) {
    const auto take = [&](const char * hooked, auto & next, auto * function) {
        if (std::strcmp(name, hooked) == 0 && found) {
            next  = (std::remove_reference_t<decltype(next)>) found;
            found = (PFN_vkVoidFunction) function;
        }
    };
    take("vkGetDeviceProcAddr", get_device, our_get_device);
    take("vkCreateShaderModule", create_module, our_module);
    take("vkCreateComputePipelines", create_pipelines, our_pipelines);
    take("vkCmdBindPipeline", bind_pipeline, our_bind);
    take("vkCmdDispatch", dispatch, our_dispatch);
    take("vkCmdPipelineBarrier", barrier, our_barrier);
    return found;
}

PFN_vkVoidFunction VKAPI_CALL our_get_device(VkDevice device, const char * name) {
    return ours(name, get_device(device, name));
}

} // namespace

extern "C" VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL vkGetInstanceProcAddr(VkInstance instance, const char * name) {
    if (!get_instance) {
        void * loader = dlopen("libvulkan.so.1", RTLD_NOW);
        get_instance  = (PFN_vkGetInstanceProcAddr) dlsym(loader, "vkGetInstanceProcAddr");
    }
    return ours(name, get_instance(instance, name));
}
