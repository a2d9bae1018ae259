# libggml-subkv: the engine for a llama.cpp without our patch, which loads it as a backend (runtime/native/plugin). One
# file: the engine's objects are part of it, and ggml's functions are those of the program (ggml_calls.cpp).
set(SUBKV_PLUGIN_FOLDER ${CMAKE_SOURCE_DIR}/runtime/native/plugin)
file(GLOB SUBKV_PLUGIN_SOURCES CONFIGURE_DEPENDS ${SUBKV_PLUGIN_FOLDER}/*.cpp)
list(REMOVE_ITEM SUBKV_PLUGIN_SOURCES ${SUBKV_PLUGIN_FOLDER}/ggml_calls.cpp)
add_library(ggml-subkv-objects OBJECT
    ${SUBKV_PLUGIN_SOURCES}
    ${CMAKE_SOURCE_DIR}/runtime/native/adapt/none/basis_requests.cpp
    ${CMAKE_SOURCE_DIR}/runtime/native/engine/device_none.cpp)
subkv_native(ggml-subkv-objects)
set_target_properties(ggml-subkv-objects PROPERTIES POSITION_INDEPENDENT_CODE ON)
target_include_directories(ggml-subkv-objects PRIVATE ${SUBKV_PLUGIN_FOLDER})
target_include_directories(ggml-subkv-objects SYSTEM PRIVATE ${SUBKV_LLAMA_CPP_TREE}/ggml/src) # a backend's interface is not public

set(names ${CMAKE_CURRENT_BINARY_DIR}/plugin/ggml_names.inc)
file(MAKE_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/plugin)
add_custom_command(OUTPUT ${names}
    COMMAND sh -c "list=$1 && shift && \"$@\" >\"$list.nm\" && sed -n 's/^ *U \\(gg[mu][lf]_[a-z0-9_]*\\)$/CALL(\\1)/p' \"$list.nm\" | sort -u >\"$list\""
        sh ${names} ${CMAKE_NM} -u $<TARGET_OBJECTS:subkv-core> $<TARGET_OBJECTS:ggml-subkv-objects>
    DEPENDS $<TARGET_OBJECTS:subkv-core> $<TARGET_OBJECTS:ggml-subkv-objects>
    COMMAND_EXPAND_LISTS VERBATIM)
add_library(ggml-subkv MODULE ${SUBKV_PLUGIN_FOLDER}/ggml_calls.cpp ${names})
subkv_native(ggml-subkv)
target_include_directories(ggml-subkv PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/plugin)
target_link_libraries(ggml-subkv PRIVATE ggml-subkv-objects subkv-core Threads::Threads ${CMAKE_DL_LIBS})
set_target_properties(ggml-subkv PROPERTIES PREFIX lib)
target_link_options(ggml-subkv PRIVATE -Wl,--version-script=${CMAKE_CURRENT_SOURCE_DIR}/plugin.map
    ${SUBKV_SANITIZE_LINK_OPTIONS})
if(NOT SUBKV_SANITIZE AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|aarch64|arm64)$") # those of ggml_calls.cpp
    target_link_options(ggml-subkv PRIVATE -Wl,--no-undefined)
endif()
set_property(TARGET ggml-subkv PROPERTY LINK_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/plugin.map)
subkv_install_library(ggml-subkv ${SUBKV_LIB_DESTINATION})
