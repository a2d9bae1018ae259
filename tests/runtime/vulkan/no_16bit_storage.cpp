// no_16bit_storage.cpp: preloaded, it hides a device's 16-bit storage. With SUBKV_CARD it also reports the device as a
// discrete graphics card.
#include <vulkan/vulkan.h>

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

namespace {

template <typename Function> Function next(const char * name) {
    static void * loader = dlopen("libvulkan.so.1", RTLD_NOW);
    return (Function) dlsym(loader, name);
}

void VKAPI_CALL properties(VkPhysicalDevice device, VkPhysicalDeviceProperties * found) {
    next<PFN_vkGetPhysicalDeviceProperties>("vkGetPhysicalDeviceProperties")(device, found);
    found->deviceType = VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU;
}

void VKAPI_CALL properties_2(VkPhysicalDevice device, VkPhysicalDeviceProperties2 * found) {
    next<PFN_vkGetPhysicalDeviceProperties2>("vkGetPhysicalDeviceProperties2")(device, found);
    found->properties.deviceType = VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU;
}

} // namespace

extern "C" VKAPI_ATTR void VKAPI_CALL vkGetPhysicalDeviceFeatures2(VkPhysicalDevice            device,
                                                                   VkPhysicalDeviceFeatures2 * features) {
    next<PFN_vkGetPhysicalDeviceFeatures2>("vkGetPhysicalDeviceFeatures2")(device, features);
    for (auto * part = (VkBaseOutStructure *) features->pNext; part; part = part->pNext) {
        if (part->sType == VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES) {
            ((VkPhysicalDeviceVulkan11Features *) part)->storageBuffer16BitAccess = VK_FALSE;
        }
    }
}

extern "C" VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL vkGetInstanceProcAddr(VkInstance instance, const char * name) {
    if (std::getenv("SUBKV_CARD") && std::strcmp(name, "vkGetPhysicalDeviceProperties") == 0) {
        return (PFN_vkVoidFunction) properties;
    }
    if (std::getenv("SUBKV_CARD") && std::strcmp(name, "vkGetPhysicalDeviceProperties2") == 0) {
        return (PFN_vkVoidFunction) properties_2;
    }
    return next<PFN_vkGetInstanceProcAddr>("vkGetInstanceProcAddr")(instance, name);
}
