// pipelines.cpp: the Vulkan driver's compiler statistics of the ops' pipelines.
//
// One line per pipeline: name, then statistics as name=value, separated by tabs. The device is the first one that is not
// a CPU; with RADV_FORCE_FAMILY, Mesa's RADV offers a card that is not installed.
#include "../../../kernels/vulkan/ops.h"

#include <vulkan/vulkan.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

using namespace subkv::vulkan;

namespace {

void check(VkResult result, const char * call) {
    if (result != VK_SUCCESS) {
        std::fprintf(stderr, "%s: VK_SUCCESS expected, %d found\n", call, (int) result);
        std::exit(1);
    }
}

class Compiler {
public:
    Compiler() {
        VkApplicationInfo app    = { VK_STRUCTURE_TYPE_APPLICATION_INFO };
        app.apiVersion           = VK_API_VERSION_1_1;
        VkInstanceCreateInfo all = { VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO };
        all.pApplicationInfo     = &app;
        VkInstance instance;
        check(vkCreateInstance(&all, nullptr, &instance), "vkCreateInstance");
        uint32_t n = 0;
        check(vkEnumeratePhysicalDevices(instance, &n, nullptr), "vkEnumeratePhysicalDevices");
        std::vector<VkPhysicalDevice> devices(n);
        check(vkEnumeratePhysicalDevices(instance, &n, devices.data()), "vkEnumeratePhysicalDevices");
        VkPhysicalDevice card = nullptr;
        for (size_t i = 0; i < devices.size() && !card; ++i) {
            VkPhysicalDeviceProperties properties;
            vkGetPhysicalDeviceProperties(devices[i], &properties);
            card = properties.deviceType == VK_PHYSICAL_DEVICE_TYPE_CPU ? nullptr : devices[i];
        }
        if (!card) {
            std::fprintf(stderr, "device: a family in RADV_FORCE_FAMILY that this Mesa knows expected, none found\n");
            std::exit(1);
        }

        VkPhysicalDevicePipelineExecutablePropertiesFeaturesKHR statistics = {
            VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PIPELINE_EXECUTABLE_PROPERTIES_FEATURES_KHR
        };
        statistics.pipelineExecutableInfo                      = VK_TRUE;
        VkPhysicalDeviceShaderIntegerDotProductFeaturesKHR dot = {
            VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_SHADER_INTEGER_DOT_PRODUCT_FEATURES_KHR
        };
        dot.shaderIntegerDotProduct      = VK_TRUE;
        statistics.pNext                 = &dot;
        const float             priority = 1.0f;
        VkDeviceQueueCreateInfo queue    = { VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO };
        queue.queueCount                 = 1;
        queue.pQueuePriorities           = &priority;
        const char *       extensions[]  = { VK_KHR_PIPELINE_EXECUTABLE_PROPERTIES_EXTENSION_NAME,
                                             VK_KHR_SHADER_INTEGER_DOT_PRODUCT_EXTENSION_NAME };
        VkDeviceCreateInfo create        = { VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO };
        create.pNext                     = &statistics;
        create.queueCreateInfoCount      = 1;
        create.pQueueCreateInfos         = &queue;
        create.enabledExtensionCount     = 2;
        create.ppEnabledExtensionNames   = extensions;
        check(vkCreateDevice(card, &create, nullptr, &device_), "vkCreateDevice");
    }

    // As in the patched backend: storage buffers in set 0, and push constants.
    void print(const std::string & name, const Dispatch & d) {
        std::vector<VkDescriptorSetLayoutBinding> bindings(d.n_buffers);
        for (uint32_t i = 0; i < d.n_buffers; ++i) {
            bindings[i] = { i, VK_DESCRIPTOR_TYPE_STORAGE_BUFFER, 1, VK_SHADER_STAGE_COMPUTE_BIT, nullptr };
        }
        VkDescriptorSetLayoutCreateInfo set_info = { VK_STRUCTURE_TYPE_DESCRIPTOR_SET_LAYOUT_CREATE_INFO };
        set_info.bindingCount                    = d.n_buffers;
        set_info.pBindings                       = bindings.data();
        VkDescriptorSetLayout set;
        check(vkCreateDescriptorSetLayout(device_, &set_info, nullptr, &set), "vkCreateDescriptorSetLayout");
        const VkPushConstantRange  push        = { VK_SHADER_STAGE_COMPUTE_BIT, 0, 4 * d.n_push };
        VkPipelineLayoutCreateInfo layout_info = { VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO };
        layout_info.setLayoutCount             = 1;
        layout_info.pSetLayouts                = &set;
        layout_info.pushConstantRangeCount     = d.n_push > 0 ? 1 : 0;
        layout_info.pPushConstantRanges        = &push;
        VkPipelineLayout layout;
        check(vkCreatePipelineLayout(device_, &layout_info, nullptr, &layout), "vkCreatePipelineLayout");
        VkShaderModuleCreateInfo module_info = { VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO };
        module_info.codeSize                 = d.spirv_bytes;
        module_info.pCode                    = d.spirv;
        VkShaderModule module;
        check(vkCreateShaderModule(device_, &module_info, nullptr, &module), "vkCreateShaderModule");

        std::vector<VkSpecializationMapEntry> entries;
        for (uint32_t i = 0; i < d.n_constants; ++i) {
            entries.push_back({ i, 4 * i, 4 });
        }
        const VkSpecializationInfo  constants = { d.n_constants, entries.data(), 4 * entries.size(), d.constants };
        VkComputePipelineCreateInfo info      = { VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO };
        info.flags                            = VK_PIPELINE_CREATE_CAPTURE_STATISTICS_BIT_KHR;
        info.stage.sType                      = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO;
        info.stage.stage                      = VK_SHADER_STAGE_COMPUTE_BIT;
        info.stage.module                     = module;
        info.stage.pName                      = "main";
        info.stage.pSpecializationInfo        = &constants;
        info.layout                           = layout;
        VkPipeline pipeline;
        check(vkCreateComputePipelines(device_, nullptr, 1, &info, nullptr, &pipeline), "vkCreateComputePipelines");
        print(name, pipeline);
    }

private:
    void print(const std::string & name, VkPipeline pipeline) {
        const auto get = (PFN_vkGetPipelineExecutableStatisticsKHR) vkGetDeviceProcAddr(
            device_, "vkGetPipelineExecutableStatisticsKHR");
        VkPipelineExecutableInfoKHR which = { VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_INFO_KHR };
        which.pipeline                    = pipeline; // a compute pipeline has one executable
        uint32_t n                        = 0;
        check(get(device_, &which, &n, nullptr), "vkGetPipelineExecutableStatisticsKHR");
        VkPipelineExecutableStatisticKHR              empty = { VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_STATISTIC_KHR };
        std::vector<VkPipelineExecutableStatisticKHR> statistics(n, empty);
        check(get(device_, &which, &n, statistics.data()), "vkGetPipelineExecutableStatisticsKHR");
        std::printf("%s", name.c_str());
        for (const auto & s : statistics) {
            if (s.format == VK_PIPELINE_EXECUTABLE_STATISTIC_FORMAT_UINT64_KHR) {
                std::printf("\t%s=%llu", s.name, (unsigned long long) s.value.u64);
            }
        }
        std::printf("\n");
    }

    VkDevice device_ = nullptr;
};

// The requested pipelines, each under the name of the first op that uses it.
using Pipelines = std::map<std::string, Dispatch>;

struct Recorder {
    Pipelines & pipelines;
    std::string head;
};

const char * record(void * recorder, const Dispatch & dispatch) {
    auto &            r    = *(Recorder *) recorder;
    const std::string name = std::string(dispatch.name).substr(sizeof("subkv_") - 1);
    r.pipelines.emplace(dispatch.n_constants > 0 ? name + r.head : name, dispatch);
    return nullptr;
}

void record_ops(Recorder to, const Layer & layer, int64_t n_tps) {
    Attend a{};
    a.layer          = layer;
    a.n_kv           = 1024;
    a.n_stream       = 1;
    a.n_tps          = n_tps;
    a.split          = 1024;
    a.n_split        = 1;
    a.mask_half      = true;
    Combine combined = {};
    combined.a       = a;
    Encode encoded{};
    encoded.layer = a.layer;
    encoded.n_tok = n_tps;
    Store stored{};
    stored.n_slots = stored.width = 64;
    Prompt prompt{};
    prompt.c          = combined;
    prompt.n_rows     = 1024 + 256 + n_tps + n_tps % 2;
    prompt.n_heads    = 8;
    const char * rows = layer.latent ? nullptr : prompt_rows(prompt, record, &to);
    const char * mask = layer.latent ? nullptr : prompt_mask(prompt, record, &to);
    const char * lost = layer.latent ? nullptr : prompt_lost(prompt, record, &to);
    for (const char * error : { encode(encoded, record, &to), attend(a, record, &to), combine(combined, record, &to),
                                store_window(stored, record, &to), rows, mask, lost }) {
        if (error) {
            std::fprintf(stderr, "%s expected\n", error);
            std::exit(1);
        }
    }
}

void record_layer(Pipelines & pipelines, int d, int group, int64_t n_tps, bool integer_dot) {
    const std::string head  = n_tps == 1 ? " G " + std::to_string(group) : " prompt";
    const Layer       layer = { {}, 8, group, d, d, d, d, 1.0f, 0.0f, integer_dot, false };
    record_ops({ pipelines, " d " + std::to_string(d) + head }, layer, n_tps);
}

} // namespace

int main() {
    Pipelines pipelines;
    for (const bool dot : { false, true }) {
        record_layer(pipelines, 64, 3, 1, dot);
        record_layer(pipelines, 128, 4, 1, dot);
        record_layer(pipelines, 128, 8, 1, dot);
        record_layer(pipelines, 64, 3, 512, dot);
        record_layer(pipelines, 128, 4, 512, dot);
    }
    record_ops({ pipelines, " d 576 G 16" }, { {}, 1, 16, 576, 512, 576, 512, 1.0f, 0.0f, false, true }, 1);
    Compiler compiler;
    for (const auto & [name, dispatch] : pipelines) {
        compiler.print(name, dispatch);
    }
}
