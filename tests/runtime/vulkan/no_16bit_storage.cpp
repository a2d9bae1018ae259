// no_16bit_storage.cpp: preloaded, it makes a device one without 16-bit storage.
#include <vulkan/vulkan.h>

#include <dlfcn.h>

extern "C" VKAPI_ATTR void VKAPI_CALL vkGetPhysicalDeviceFeatures2(VkPhysicalDevice            device,
                                                                   VkPhysicalDeviceFeatures2 * features) {
    static const auto next =
        (PFN_vkGetPhysicalDeviceFeatures2) dlsym(dlopen("libvulkan.so.1", RTLD_NOW), "vkGetPhysicalDeviceFeatures2");
    next(device, features);
    for (auto * part = (VkBaseOutStructure *) features->pNext; part; part = part->pNext) {
        if (part->sType == VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_VULKAN_1_1_FEATURES) {
            ((VkPhysicalDeviceVulkan11Features *) part)->storageBuffer16BitAccess = VK_FALSE;
        }
    }
}
