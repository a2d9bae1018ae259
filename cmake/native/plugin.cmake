# libggml-subkv: the engine for a llama.cpp without our patch, which loads it as a backend (runtime/native/plugin). One
# file: the engine's objects are part of it, and ggml's functions are those of the process.
file(GLOB SUBKV_PLUGIN_SOURCES CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/runtime/native/plugin/*.cpp)
add_library(ggml-subkv MODULE
    ${SUBKV_PLUGIN_SOURCES}
    ${CMAKE_SOURCE_DIR}/runtime/native/adapt/none/basis_requests.cpp
    ${CMAKE_SOURCE_DIR}/runtime/native/engine/device_none.cpp)
subkv_native(ggml-subkv)
target_include_directories(ggml-subkv PRIVATE ${CMAKE_SOURCE_DIR}/runtime/native/plugin)
target_include_directories(ggml-subkv SYSTEM PRIVATE ${SUBKV_LLAMA_CPP_TREE}/ggml/src) # a backend's interface is not public
target_link_libraries(ggml-subkv PRIVATE subkv-core Threads::Threads ${CMAKE_DL_LIBS})
set_target_properties(ggml-subkv PROPERTIES PREFIX lib)
target_link_options(ggml-subkv PRIVATE -Wl,--version-script=${CMAKE_CURRENT_SOURCE_DIR}/plugin.map
    ${SUBKV_SANITIZE_LINK_OPTIONS})
set_property(TARGET ggml-subkv PROPERTY LINK_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/plugin.map)
subkv_install_library(ggml-subkv ${SUBKV_LIB_DESTINATION})
