#include "device.h"

#include <cstring>
#include <stdexcept>

using subkv::vulkan::Dispatch;

namespace {

constexpr size_t JUNK = 256 << 20; // bytes, more than a device's caches

void check(VkResult result, const char * what) {
    if (result != VK_SUCCESS) {
        throw std::runtime_error(std::string(what) + ": VkResult " + std::to_string((int) result));
    }
}

VkBool32 VKAPI_PTR on_message(VkDebugUtilsMessageSeverityFlagBitsEXT, VkDebugUtilsMessageTypeFlagsEXT,
                              const VkDebugUtilsMessengerCallbackDataEXT * data, void * user) {
    auto & device = *(Device *) user;
    device.n_messages++;
    device.last_message = data->pMessage;
    return VK_FALSE;
}

} // namespace

Device::Device(bool validate, bool integer_dot) {
    create_instance(validate);
    find_device();
    create_device(integer_dot);
    create_commands();
    memory_type_ = mapped_memory_type();
}

void Device::create_instance(bool validate) {
    VkApplicationInfo app = {};
    app.sType             = VK_STRUCTURE_TYPE_APPLICATION_INFO;
    app.apiVersion        = VK_API_VERSION_1_1;

    const char * layers[]     = { "VK_LAYER_KHRONOS_validation" };
    const char * extensions[] = { VK_EXT_DEBUG_UTILS_EXTENSION_NAME };

    const VkValidationFeatureEnableEXT enabled[] = { VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT };
    VkValidationFeaturesEXT            features  = {};
    features.sType                               = VK_STRUCTURE_TYPE_VALIDATION_FEATURES_EXT;
    features.enabledValidationFeatureCount       = 1;
    features.pEnabledValidationFeatures          = enabled;

    VkInstanceCreateInfo instance = {};
    instance.sType                = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO;
    instance.pApplicationInfo     = &app;
    if (validate) {
        instance.pNext                   = &features;
        instance.enabledLayerCount       = 1;
        instance.ppEnabledLayerNames     = layers;
        instance.enabledExtensionCount   = 1;
        instance.ppEnabledExtensionNames = extensions;
    }
    check(vkCreateInstance(&instance, nullptr, &instance_), "vkCreateInstance");
    if (validate) {
        VkDebugUtilsMessengerCreateInfoEXT messenger = {};
        messenger.sType                              = VK_STRUCTURE_TYPE_DEBUG_UTILS_MESSENGER_CREATE_INFO_EXT;
        messenger.messageSeverity =
            VK_DEBUG_UTILS_MESSAGE_SEVERITY_ERROR_BIT_EXT | VK_DEBUG_UTILS_MESSAGE_SEVERITY_WARNING_BIT_EXT;
        messenger.messageType     = VK_DEBUG_UTILS_MESSAGE_TYPE_VALIDATION_BIT_EXT;
        messenger.pfnUserCallback = on_message;
        messenger.pUserData       = this;
        const auto create =
            (PFN_vkCreateDebugUtilsMessengerEXT) vkGetInstanceProcAddr(instance_, "vkCreateDebugUtilsMessengerEXT");
        VkDebugUtilsMessengerEXT created;
        check(create(instance_, &messenger, nullptr, &created), "vkCreateDebugUtilsMessengerEXT");
    }
}

void Device::find_device() {
    uint32_t n = 1;
    vkEnumeratePhysicalDevices(instance_, &n, &physical_);
    if (n == 0) {
        throw std::runtime_error("no Vulkan device");
    }
    VkPhysicalDeviceProperties properties;
    vkGetPhysicalDeviceProperties(physical_, &properties);
    name_      = properties.deviceName;
    max_range_ = properties.limits.maxStorageBufferRange;
    period_    = properties.limits.timestampPeriod;
}

void Device::create_device(bool integer_dot) {
    const float             priority = 1.0f;
    VkDeviceQueueCreateInfo queue    = {}; // queue family 0 supports compute on all known devices
    queue.sType                      = VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO;
    queue.queueCount                 = 1;
    queue.pQueuePriorities           = &priority;
    VkDeviceCreateInfo device        = {}; // shaders must not need other features
    device.sType                     = VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO;
    device.queueCreateInfoCount      = 1;
    device.pQueueCreateInfos         = &queue;

    const char *                                       dot_extension = VK_KHR_SHADER_INTEGER_DOT_PRODUCT_EXTENSION_NAME;
    VkPhysicalDeviceShaderIntegerDotProductFeaturesKHR dot           = {};
    dot.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_INTEGER_DOT_PRODUCT_FEATURES_KHR;
    if (integer_dot) {
        VkPhysicalDeviceFeatures2 all = {};
        all.sType                     = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_FEATURES_2;
        all.pNext                     = &dot;
        vkGetPhysicalDeviceFeatures2(physical_, &all);
        if (!dot.shaderIntegerDotProduct) {
            throw std::runtime_error(name_ + ": integer dot products expected, not found");
        }
        device.pNext                   = &dot;
        device.enabledExtensionCount   = 1;
        device.ppEnabledExtensionNames = &dot_extension;
    }
    check(vkCreateDevice(physical_, &device, nullptr, &device_), "vkCreateDevice");
    vkGetDeviceQueue(device_, 0, 0, &queue_);
}

void Device::create_commands() {
    VkCommandPoolCreateInfo pool = {};
    pool.sType                   = VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO;
    pool.flags                   = VK_COMMAND_POOL_CREATE_RESET_COMMAND_BUFFER_BIT;
    check(vkCreateCommandPool(device_, &pool, nullptr, &commands_), "vkCreateCommandPool");
    VkCommandBufferAllocateInfo command = {};
    command.sType                       = VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO;
    command.commandPool                 = commands_;
    command.level                       = VK_COMMAND_BUFFER_LEVEL_PRIMARY;
    command.commandBufferCount          = 1;
    check(vkAllocateCommandBuffers(device_, &command, &buffer_), "vkAllocateCommandBuffers");

    const VkDescriptorPoolSize size = { VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, 16 * subkv::vulkan::MAX_BUFFERS };
    VkDescriptorPoolCreateInfo sets = {};
    sets.sType                      = VK_STRUCTURE_TYPE_DESCRIPTOR_POOL_CREATE_INFO;
    sets.maxSets                    = 16;
    sets.poolSizeCount              = 1;
    sets.pPoolSizes                 = &size;
    check(vkCreateDescriptorPool(device_, &sets, nullptr, &sets_), "vkCreateDescriptorPool");

    VkQueryPoolCreateInfo timer = {};
    timer.sType                 = VK_STRUCTURE_TYPE_QUERY_POOL_CREATE_INFO;
    timer.queryType             = VK_QUERY_TYPE_TIMESTAMP;
    timer.queryCount            = 2;
    check(vkCreateQueryPool(device_, &timer, nullptr, &timer_), "vkCreateQueryPool");
}

uint32_t Device::mapped_memory_type() const {
    VkPhysicalDeviceMemoryProperties memory;
    vkGetPhysicalDeviceMemoryProperties(physical_, &memory);
    const VkMemoryPropertyFlags required = VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
    uint32_t                    found    = UINT32_MAX;
    for (uint32_t i = 0; i < memory.memoryTypeCount; ++i) {
        const VkMemoryType & type  = memory.memoryTypes[i];
        const bool           local = (type.propertyFlags & VK_MEMORY_PROPERTY_DEVICE_LOCAL_BIT) != 0 &&
                                     memory.memoryHeaps[type.heapIndex].size > 1ull << 30;
        if ((type.propertyFlags & required) == required && (local || found == UINT32_MAX)) {
            found = i;
            if (local) {
                break;
            }
        }
    }
    return found;
}

void * Device::allocate(size_t size, size_t before) {
    Allocation a = {};
    a.size       = before + size;

    VkBufferCreateInfo buffer = {};
    buffer.sType              = VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO;
    buffer.size               = (a.size + 3) / 4 * 4;
    buffer.usage =
        VK_BUFFER_USAGE_STORAGE_BUFFER_BIT | VK_BUFFER_USAGE_TRANSFER_SRC_BIT | VK_BUFFER_USAGE_TRANSFER_DST_BIT;
    check(vkCreateBuffer(device_, &buffer, nullptr, &a.buffer), "vkCreateBuffer");
    VkMemoryRequirements needs;
    vkGetBufferMemoryRequirements(device_, a.buffer, &needs);
    VkMemoryAllocateInfo memory = {};
    memory.sType                = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO;
    memory.allocationSize       = needs.size;
    memory.memoryTypeIndex      = memory_type_;
    check(vkAllocateMemory(device_, &memory, nullptr, &a.memory), "vkAllocateMemory");
    check(vkBindBufferMemory(device_, a.buffer, a.memory, 0), "vkBindBufferMemory");
    check(vkMapMemory(device_, a.memory, 0, VK_WHOLE_SIZE, 0, (void **) &a.data), "vkMapMemory");
    std::memset(a.data, 0xAA, a.size);
    allocations_[(uintptr_t) a.data] = a;
    return a.data + before;
}

void Device::free(void * data) {
    const Allocation a = of(data);
    vkDestroyBuffer(device_, a.buffer, nullptr);
    vkFreeMemory(device_, a.memory, nullptr);
    allocations_.erase((uintptr_t) a.data);
}

const Allocation & Device::of(const void * address) const {
    const auto next = allocations_.upper_bound((uintptr_t) address);
    if (next != allocations_.begin()) {
        const Allocation & a = std::prev(next)->second;
        if ((const uint8_t *) address < a.data + a.size) {
            return a;
        }
    }
    throw std::runtime_error("an address in no buffer");
}

const Device::Pipeline & Device::pipeline(const Dispatch & d) {
    const uint32_t first = d.n_constants > 0 ? d.constants[0] : 0, second = d.n_constants > 1 ? d.constants[1] : 0;
    Pipeline &     p = pipelines_[{ d.spirv, first, second }];
    if (p.pipeline) {
        return p;
    }
    VkDescriptorSetLayoutBinding bindings[subkv::vulkan::MAX_BUFFERS] = {};
    for (uint32_t i = 0; i < d.n_buffers; ++i) {
        bindings[i].binding         = i;
        bindings[i].descriptorType  = VK_DESCRIPTOR_TYPE_STORAGE_BUFFER;
        bindings[i].descriptorCount = 1;
        bindings[i].stageFlags      = VK_SHADER_STAGE_COMPUTE_BIT;
    }
    VkDescriptorSetLayoutCreateInfo set = {};
    set.sType                           = VK_STRUCTURE_TYPE_DESCRIPTOR_SET_LAYOUT_CREATE_INFO;
    set.bindingCount                    = d.n_buffers;
    set.pBindings                       = bindings;
    check(vkCreateDescriptorSetLayout(device_, &set, nullptr, &p.set), "vkCreateDescriptorSetLayout");

    const VkPushConstantRange  push   = { VK_SHADER_STAGE_COMPUTE_BIT, 0, 4 * d.n_push };
    VkPipelineLayoutCreateInfo layout = {};
    layout.sType                      = VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO;
    layout.setLayoutCount             = 1;
    layout.pSetLayouts                = &p.set;
    layout.pushConstantRangeCount     = 1;
    layout.pPushConstantRanges        = &push;
    check(vkCreatePipelineLayout(device_, &layout, nullptr, &p.layout), "vkCreatePipelineLayout");

    VkShaderModuleCreateInfo module = {};
    module.sType                    = VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO;
    module.codeSize                 = d.spirv_bytes;
    module.pCode                    = d.spirv;
    VkShaderModule shader;
    check(vkCreateShaderModule(device_, &module, nullptr, &shader), "vkCreateShaderModule");

    VkSpecializationMapEntry entries[subkv::vulkan::MAX_CONSTANTS];
    for (uint32_t i = 0; i < d.n_constants; ++i) {
        entries[i] = { i, 4 * i, 4 };
    }
    const VkSpecializationInfo  special = { d.n_constants, entries, 4 * d.n_constants, d.constants };
    VkComputePipelineCreateInfo create  = {};
    create.sType                        = VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO;
    create.stage.sType                  = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO;
    create.stage.stage                  = VK_SHADER_STAGE_COMPUTE_BIT;
    create.stage.module                 = shader;
    create.stage.pName                  = "main";
    create.stage.pSpecializationInfo    = &special;
    create.layout                       = p.layout;
    check(vkCreateComputePipelines(device_, VK_NULL_HANDLE, 1, &create, nullptr, &p.pipeline),
          "vkCreateComputePipelines");
    vkDestroyShaderModule(device_, shader, nullptr);
    return p;
}

void Device::begin() {
    check(vkResetDescriptorPool(device_, sets_, 0), "vkResetDescriptorPool");
    VkCommandBufferBeginInfo begin = {};
    begin.sType                    = VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO;
    check(vkBeginCommandBuffer(buffer_, &begin), "vkBeginCommandBuffer");
}

const char * Device::record(const Dispatch & d) {
    const Pipeline &            p   = pipeline(d);
    VkDescriptorSetAllocateInfo set = {};
    set.sType                       = VK_STRUCTURE_TYPE_DESCRIPTOR_SET_ALLOCATE_INFO;
    set.descriptorPool              = sets_;
    set.descriptorSetCount          = 1;
    set.pSetLayouts                 = &p.set;
    VkDescriptorSet descriptors;
    check(vkAllocateDescriptorSets(device_, &set, &descriptors), "vkAllocateDescriptorSets");
    VkDescriptorBufferInfo buffers[subkv::vulkan::MAX_BUFFERS];
    VkWriteDescriptorSet   writes[subkv::vulkan::MAX_BUFFERS] = {};
    for (uint32_t i = 0; i < d.n_buffers; ++i) {
        buffers[i]                = { ((const Allocation *) d.buffers[i])->buffer, 0, VK_WHOLE_SIZE };
        writes[i].sType           = VK_STRUCTURE_TYPE_WRITE_DESCRIPTOR_SET;
        writes[i].dstSet          = descriptors;
        writes[i].dstBinding      = i;
        writes[i].descriptorCount = 1;
        writes[i].descriptorType  = VK_DESCRIPTOR_TYPE_STORAGE_BUFFER;
        writes[i].pBufferInfo     = &buffers[i];
    }
    vkUpdateDescriptorSets(device_, d.n_buffers, writes, 0, nullptr);
    vkCmdBindPipeline(buffer_, VK_PIPELINE_BIND_POINT_COMPUTE, p.pipeline);
    vkCmdBindDescriptorSets(buffer_, VK_PIPELINE_BIND_POINT_COMPUTE, p.layout, 0, 1, &descriptors, 0, nullptr);
    vkCmdPushConstants(buffer_, p.layout, VK_SHADER_STAGE_COMPUTE_BIT, 0, 4 * d.n_push, d.push);
    vkCmdDispatch(buffer_, d.groups[0], d.groups[1], d.groups[2]);
    if (barriers) {
        barrier();
    }
    return nullptr;
}

void Device::barrier() {
    const VkPipelineStageFlags stages = VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT | VK_PIPELINE_STAGE_TRANSFER_BIT;
    VkMemoryBarrier            all    = {};
    all.sType                         = VK_STRUCTURE_TYPE_MEMORY_BARRIER;
    all.srcAccessMask                 = VK_ACCESS_MEMORY_READ_BIT | VK_ACCESS_MEMORY_WRITE_BIT;
    all.dstAccessMask                 = VK_ACCESS_MEMORY_READ_BIT | VK_ACCESS_MEMORY_WRITE_BIT;
    vkCmdPipelineBarrier(buffer_, stages, stages, 0, 1, &all, 0, nullptr, 0, nullptr);
}

const char * Device::copy(const void * from, const void * to, size_t size) {
    const VkBufferCopy all = { 0, 0, size };
    vkCmdCopyBuffer(buffer_, of(from).buffer, of(to).buffer, 1, &all);
    barrier();
    return nullptr;
}

void Device::start_timer() {
    if (!junk_) {
        junk_ = allocate(JUNK, 0);
    }
    vkCmdResetQueryPool(buffer_, timer_, 0, 2);
    vkCmdFillBuffer(buffer_, of(junk_).buffer, 0, JUNK, 0);
    barrier();
    vkCmdWriteTimestamp(buffer_, VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT, timer_, 0);
}

void Device::stop_timer() {
    vkCmdWriteTimestamp(buffer_, VK_PIPELINE_STAGE_BOTTOM_OF_PIPE_BIT, timer_, 1);
}

double Device::elapsed() const {
    uint64_t at[2];
    check(vkGetQueryPoolResults(device_, timer_, 0, 2, sizeof(at), at, sizeof(at[0]),
                                VK_QUERY_RESULT_64_BIT | VK_QUERY_RESULT_WAIT_BIT),
          "vkGetQueryPoolResults");
    return (double) (at[1] - at[0]) * period_ * 1e-6;
}

void Device::abandon() {
    vkEndCommandBuffer(buffer_);
}

const char * Device::finish() {
    check(vkEndCommandBuffer(buffer_), "vkEndCommandBuffer");
    VkSubmitInfo submit       = {};
    submit.sType              = VK_STRUCTURE_TYPE_SUBMIT_INFO;
    submit.commandBufferCount = 1;
    submit.pCommandBuffers    = &buffer_;
    check(vkQueueSubmit(queue_, 1, &submit, VK_NULL_HANDLE), "vkQueueSubmit");
    check(vkQueueWaitIdle(queue_), "vkQueueWaitIdle");
    return nullptr;
}
