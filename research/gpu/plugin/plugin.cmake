# libggml-subkv-gpu, the prototype (README.md): with the emulated GPUs (-DSUBKV_EMULATE_CUDA=ON -DSUBKV_STOCK=ON), or with
# the kernels for CUDA (-DSUBKV_GPU_PLUGIN=ON), without llama.cpp's CUDA backend.
set(prototype ${CMAKE_SOURCE_DIR}/research/gpu/plugin)
set(sources ${SUBKV_PLUGIN_SOURCES})
list(REMOVE_ITEM sources ${SUBKV_PLUGIN_FOLDER}/plugin.cpp ${SUBKV_PLUGIN_FOLDER}/cpu_place.cpp)
file(GLOB kernels CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/kernels/cuda/*.cu)
list(APPEND sources ${prototype}/device.cpp ${CMAKE_SOURCE_DIR}/runtime/native/cuda/device_cuda.cpp ${kernels})
find_path(SUBKV_CUDA_HEADERS cuda.h HINTS /usr/local/cuda/include)
if(SUBKV_CUDA_HEADERS)
    list(APPEND sources ${prototype}/cuda_driver.cpp)
    set_source_files_properties(${prototype}/cuda_driver.cpp PROPERTIES COMPILE_OPTIONS "-isystem${SUBKV_CUDA_HEADERS}")
endif()
if(SUBKV_EMULATE_CUDA)
    list(APPEND sources ${CMAKE_SOURCE_DIR}/tests/kernels/emulated/emulated.cpp)
else()
    enable_language(CUDA)
endif()
subkv_add_plugin(ggml-subkv-gpu ${sources})
if(NOT SUBKV_EMULATE_CUDA)
    set_target_properties(ggml-subkv-gpu-objects ggml-subkv-gpu PROPERTIES
        CUDA_STANDARD 17
        CUDA_RUNTIME_LIBRARY Static # beside the one of the program's backend: both use the device's primary context
        CUDA_VISIBILITY_PRESET hidden)
endif()
