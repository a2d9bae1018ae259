// device.h: the first Vulkan device of this machine, for tests and measurements: buffers mapped by the host, and
// dispatches in one command buffer with a barrier after each.
#pragma once

#include "subkv/vulkan_dispatch.h"

#include <vulkan/vulkan.h>

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

struct Allocation {
    VkBuffer       buffer;
    VkDeviceMemory memory;
    uint8_t *      data;
    size_t         size;
};

class Device {
public:
    // validate: enables the Khronos layer and its synchronisation validation. integer_dot: enables this feature, else
    // none. Throws std::runtime_error.
    Device(bool validate, bool integer_dot);

    Device(const Device &)             = delete;
    Device & operator=(const Device &) = delete;

    const std::string & name() const { return name_; }
    uint32_t            max_range() const { return max_range_; } // maximum binding in bytes

    // Memory of a new buffer, `before` bytes after its start; filled with 0xAA.
    void * allocate(size_t size, size_t before);
    void   free(void * data);

    // The buffer that holds an address.
    const Allocation & of(const void * address) const;

    void         begin();
    const char * record(const subkv::vulkan::Dispatch & dispatch); // buffers: Allocation
    const char * copy(const void * from, const void * to, size_t size);
    const char * finish();  // runs the recorded commands
    void         abandon(); // discards them

    // Time of the commands recorded between start_timer() and stop_timer(), with cold caches; milliseconds.
    void   start_timer();
    void   stop_timer();
    double elapsed() const;

    bool        barriers   = true;
    uint32_t    n_messages = 0; // messages of the validation layer
    std::string last_message;

private:
    struct Pipeline {
        VkDescriptorSetLayout set;
        VkPipelineLayout      layout;
        VkPipeline            pipeline;
    };

    void     create_instance(bool validate);
    void     find_device();
    void     create_device(bool integer_dot);
    void     create_commands();          // and what they need: descriptors, a timer
    uint32_t mapped_memory_type() const; // on the device if the host can map all of it, so that times are realistic

    const Pipeline & pipeline(const subkv::vulkan::Dispatch & dispatch);

    void barrier();

    std::string      name_;
    uint32_t         max_range_;
    double           period_;             // ns per tick of the device's clock
    void *           junk_     = nullptr; // written before a timed run to evict the caches
    VkQueryPool      timer_    = VK_NULL_HANDLE;
    VkInstance       instance_ = VK_NULL_HANDLE;
    VkPhysicalDevice physical_ = VK_NULL_HANDLE;
    VkDevice         device_   = VK_NULL_HANDLE;
    VkQueue          queue_    = VK_NULL_HANDLE;
    VkCommandPool    commands_ = VK_NULL_HANDLE;
    VkCommandBuffer  buffer_   = VK_NULL_HANDLE;
    VkDescriptorPool sets_     = VK_NULL_HANDLE;
    uint32_t         memory_type_;

    std::map<uintptr_t, Allocation>                                      allocations_; // by their first byte
    std::map<std::tuple<const uint32_t *, uint32_t, uint32_t>, Pipeline> pipelines_;
};
