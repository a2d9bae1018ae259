# Checks the requirements of llama.cpp's Vulkan backend and of our shaders, with more precise messages than llama.cpp's.

# SPIR-V of all .comp files of a folder as C initializers; out: the names of these files.
function(subkv_compile_shaders folder to out)
    file(MAKE_DIRECTORY ${to})
    file(GLOB shaders CONFIGURE_DEPENDS ${folder}/*.comp)
    file(GLOB included CONFIGURE_DEPENDS ${folder}/*.glsl)
    foreach(shader IN LISTS shaders)
        get_filename_component(name ${shader} NAME_WE)
        add_custom_command(OUTPUT ${to}/${name}.inc
            COMMAND ${Vulkan_GLSLC_EXECUTABLE} -O --target-env=vulkan1.1 -Werror -mfmt=c -o ${to}/${name}.inc ${shader}
            DEPENDS ${shader} ${included}
            VERBATIM)
        list(APPEND made ${to}/${name}.inc)
    endforeach()
    set(${out} ${made} PARENT_SCOPE)
endfunction()

# The patched file includes one of our headers. Older Vulkan headers lack a name that it uses.
function(subkv_prepare_ggml_vulkan target)
    target_include_directories(${target} PRIVATE ${CMAKE_SOURCE_DIR}/kernels/include)
    target_include_directories(${target} BEFORE PRIVATE ${CMAKE_SOURCE_DIR}/cmake/vulkan)
    target_compile_options(${target} PRIVATE ${SUBKV_PORTABLE_OPTIONS})
endfunction()

if(NOT GGML_VULKAN)
    return()
endif()

if(GGML_CUDA OR SUBKV_EMULATE_CUDA)
    message(FATAL_ERROR "GGML_VULKAN: expected a build for one kind of GPU, found GGML_CUDA or SUBKV_EMULATE_CUDA, too")
endif()
find_package(Vulkan COMPONENTS glslc QUIET)
find_package(SPIRV-Headers CONFIG QUIET)
set(missing "")
foreach(needed IN ITEMS "Vulkan_INCLUDE_DIR|Vulkan's headers (Debian: libvulkan-dev)"
                        "Vulkan_LIBRARY|Vulkan's loader (Debian: libvulkan-dev)"
                        "Vulkan_GLSLC_EXECUTABLE|glslc (Debian: glslc)"
                        "SPIRV-Headers_FOUND|the SPIR-V headers (Debian: spirv-headers)")
    string(REPLACE "|" ";" needed "${needed}")
    list(GET needed 0 found)
    list(GET needed 1 what)
    if(NOT ${found})
        list(APPEND missing "${what}")
    endif()
endforeach()
if(missing)
    list(JOIN missing ", " missing)
    message(FATAL_ERROR "GGML_VULKAN: expected Vulkan's headers and loader, glslc and the SPIR-V headers, "
        "did not find ${missing}")
endif()
