// vulkan.hpp: the system's, and of VK_EXT_layer_settings what ggml-vulkan.cpp names and headers before 1.3.272 lack.
#pragma once

#include_next <vulkan/vulkan.hpp>

#if VK_HEADER_VERSION < 272

#    include <vector>

namespace vk {

enum class LayerSettingTypeEXT { eBool32 = 0 };

struct LayerSettingEXT {
    const char *        pLayerName;
    const char *        pSettingName;
    LayerSettingTypeEXT type;
    uint32_t            valueCount;
    const void *        pValues;
};

struct LayerSettingsCreateInfoEXT {
    explicit LayerSettingsCreateInfoEXT(const std::vector<LayerSettingEXT> & settings) :
        settingCount((uint32_t) settings.size()), pSettings(settings.data()) {}

    VkStructureType         sType = (VkStructureType) 1000496000;
    const void *            pNext = nullptr;
    uint32_t                settingCount;
    const LayerSettingEXT * pSettings;
};

} // namespace vk

#endif
