# libggml-subkv: the engine for a llama.cpp without our patch, which loads it as a backend (runtime/native/plugin). One
# file: the engine's objects are part of it, and ggml's functions are those of the program (ggml_calls.cpp).
set(SUBKV_PLUGIN_FOLDER ${CMAKE_SOURCE_DIR}/runtime/native/plugin)
file(GLOB SUBKV_PLUGIN_SOURCES CONFIGURE_DEPENDS ${SUBKV_PLUGIN_FOLDER}/*.cpp)
list(REMOVE_ITEM SUBKV_PLUGIN_SOURCES ${SUBKV_PLUGIN_FOLDER}/ggml_calls.cpp)

# A plug-in of these sources and of the engine.
function(subkv_add_plugin target)
    add_library(${target}-objects OBJECT ${ARGN} ${CMAKE_SOURCE_DIR}/runtime/native/adapt/none/basis_requests.cpp)
    subkv_native(${target}-objects)
    set_target_properties(${target}-objects PROPERTIES POSITION_INDEPENDENT_CODE ON)
    target_include_directories(${target}-objects PRIVATE ${SUBKV_PLUGIN_FOLDER})
    target_include_directories(${target}-objects SYSTEM PRIVATE ${SUBKV_LLAMA_CPP_TREE}/ggml/src) # a backend's interface is not public

    set(names ${CMAKE_CURRENT_BINARY_DIR}/${target}/ggml_names.inc)
    file(MAKE_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/${target})
    add_custom_command(OUTPUT ${names}
        COMMAND sh -c "list=$1 && shift && \"$@\" >\"$list.nm\" && sed -n 's/^ *U \\(gg[mu][lf]_[a-z0-9_]*\\)$/CALL(\\1)/p' \"$list.nm\" | sort -u >\"$list\""
            sh ${names} ${CMAKE_NM} -u $<TARGET_OBJECTS:subkv-core> $<TARGET_OBJECTS:${target}-objects>
        DEPENDS $<TARGET_OBJECTS:subkv-core> $<TARGET_OBJECTS:${target}-objects>
        COMMAND_EXPAND_LISTS VERBATIM)
    add_library(${target} MODULE ${SUBKV_PLUGIN_FOLDER}/ggml_calls.cpp ${names})
    subkv_native(${target})
    target_include_directories(${target} PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/${target})
    target_link_libraries(${target} PRIVATE ${target}-objects subkv-core Threads::Threads ${CMAKE_DL_LIBS})
    set_target_properties(${target} PROPERTIES PREFIX lib)
    target_link_options(${target} PRIVATE -Wl,--version-script=${CMAKE_CURRENT_SOURCE_DIR}/plugin.map
        ${SUBKV_SANITIZE_LINK_OPTIONS})
    if(NOT SUBKV_SANITIZE AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|aarch64|arm64)$") # those of ggml_calls.cpp
        target_link_options(${target} PRIVATE -Wl,--no-undefined)
    endif()
    set_property(TARGET ${target} PROPERTY LINK_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/plugin.map)
endfunction()

subkv_add_plugin(ggml-subkv ${SUBKV_PLUGIN_SOURCES} ${CMAKE_SOURCE_DIR}/runtime/native/engine/device_none.cpp)
subkv_install_library(ggml-subkv ${SUBKV_LIB_DESTINATION})
if(SUBKV_EMULATE_CUDA AND SUBKV_STOCK OR SUBKV_GPU_PLUGIN)
    include(${CMAKE_SOURCE_DIR}/research/gpu/plugin/plugin.cmake)
endif()
