# libggml-subkv: the engine for a llama.cpp without our patch, which loads it as a backend (runtime/native/plugin). One
# file: the engine's objects are part of it; ggml's functions are those of the process.
set(SUBKV_PLUGIN_FOLDERS base bases engine)
list(TRANSFORM SUBKV_PLUGIN_FOLDERS PREPEND ${CMAKE_SOURCE_DIR}/runtime/native/)
list(TRANSFORM SUBKV_PLUGIN_FOLDERS APPEND /*.cpp)
file(GLOB SUBKV_PLUGIN_SOURCES CONFIGURE_DEPENDS ${SUBKV_PLUGIN_FOLDERS})
set(SUBKV_PLUGIN_KERNELS ${SUBKV_SOURCES})
list(FILTER SUBKV_PLUGIN_KERNELS INCLUDE REGEX "/kernels/(ref|cpu)/")
file(GLOB SUBKV_PLUGIN_OWN CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/runtime/native/plugin/*.cpp)

add_library(ggml-subkv MODULE
    ${SUBKV_PLUGIN_OWN} ${SUBKV_PLUGIN_SOURCES} ${SUBKV_PLUGIN_KERNELS}
    ${CMAKE_SOURCE_DIR}/runtime/native/adapt/none/basis_requests.cpp)
subkv_native(ggml-subkv)
target_include_directories(ggml-subkv PRIVATE ${CMAKE_SOURCE_DIR}/runtime/native/plugin)
target_include_directories(ggml-subkv SYSTEM PRIVATE ${SUBKV_LLAMA_CPP_TREE}/ggml/src) # a backend's interface is not public
get_directory_property(version DIRECTORY ${SUBKV_LLAMA_CPP_TREE}/ggml DEFINITION GGML_VERSION)
target_compile_definitions(ggml-subkv PRIVATE SUBKV_GGML_VERSION="${version}")
target_link_libraries(ggml-subkv PRIVATE Threads::Threads)
set_target_properties(ggml-subkv PROPERTIES PREFIX lib)
target_link_options(ggml-subkv PRIVATE -Wl,--version-script=${CMAKE_CURRENT_SOURCE_DIR}/plugin.map
    ${SUBKV_SANITIZE_LINK_OPTIONS})
set_property(TARGET ggml-subkv PROPERTY LINK_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/plugin.map)
add_dependencies(ggml-subkv ggml)
subkv_install_library(ggml-subkv ${SUBKV_LIB_DESTINATION})
