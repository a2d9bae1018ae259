# The pinned llama.cpp: source (cmake/llama_source.py), our patch, targets llama, ggml*, and llama-stock on request.
find_package(Python3 3.10 COMPONENTS Interpreter REQUIRED)

set(SUBKV_PIN_DIR ${CMAKE_SOURCE_DIR}/runtime/llama.cpp)
set(SUBKV_LLAMA_CPP_TREE ${CMAKE_BINARY_DIR}/llama.cpp)
set(SUBKV_LLAMA_CPP_STOCK ${CMAKE_BINARY_DIR}/llama.cpp-stock)

# A changed patch changes the tree at the next configure step; unchanged files keep their times.
file(GLOB SUBKV_PATCHES CONFIGURE_DEPENDS ${SUBKV_PIN_DIR}/patches/*/*.patch)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
    ${SUBKV_PATCHES} ${SUBKV_PIN_DIR}/VERSION
    ${CMAKE_SOURCE_DIR}/cmake/llama_source.py ${CMAKE_SOURCE_DIR}/cmake/patch_merge.py
    ${CMAKE_SOURCE_DIR}/cmake/unified_diff.py)

set(args --pin ${SUBKV_PIN_DIR} --tree ${SUBKV_LLAMA_CPP_TREE})
if(SUBKV_STOCK)
    list(APPEND args --stock ${SUBKV_LLAMA_CPP_STOCK})
endif()
if(SUBKV_PROGRAMS)
    list(APPEND args --programs)
endif()
if(SUBKV_LLAMA_CPP_SOURCE)
    get_filename_component(source "${SUBKV_LLAMA_CPP_SOURCE}" ABSOLUTE BASE_DIR ${CMAKE_SOURCE_DIR})
    list(APPEND args --source ${source})
endif()
if(SUBKV_MERGE)
    list(APPEND args --merge)
endif()
if(NOT SUBKV_UPSTREAM_FIXES)
    list(APPEND args --without upstream)
endif()
foreach(patch IN LISTS SUBKV_WITHOUT_PATCHES)
    list(APPEND args --without ${patch})
endforeach()
execute_process(
    COMMAND ${Python3_EXECUTABLE} ${CMAKE_SOURCE_DIR}/cmake/llama_source.py prepare ${args}
    RESULT_VARIABLE result
    ERROR_VARIABLE errors
    ECHO_OUTPUT_VARIABLE)
if(NOT result EQUAL 0)
    message(FATAL_ERROR "the llama.cpp source could not be prepared:\n${errors}")
endif()

foreach(part COMMON TESTS TOOLS EXAMPLES SERVER APP UI)
    set(LLAMA_BUILD_${part} OFF CACHE BOOL "not part of subkv" FORCE)
endforeach()
set(LLAMA_OPENSSL OFF CACHE BOOL "with SUBKV_PROGRAMS, HTTPS by the system's OpenSSL")
set(BUILD_SHARED_LIBS ON CACHE BOOL "subkv and llama-cpp-python bind to shared libraries" FORCE)
# The commit of the pin, not of the repository around the build folder.
set(GIT_EXE "" CACHE INTERNAL "")
set(LLAMA_BUILD_NUMBER 0)
file(STRINGS ${SUBKV_PIN_DIR}/VERSION line REGEX "^commit ")
string(REGEX REPLACE "^commit +" "" LLAMA_BUILD_COMMIT "${line}")
if(SUBKV_MERGE) # another version is named by a hash of its content, so that it does not read the pin's stored prompts
    execute_process(
        COMMAND ${Python3_EXECUTABLE} ${CMAKE_SOURCE_DIR}/cmake/llama_source.py tree-hash ${source}
        OUTPUT_VARIABLE line
        COMMAND_ERROR_IS_FATAL ANY)
    string(SUBSTRING "${line}" 0 12 line)
    set(LLAMA_BUILD_COMMIT "tree-${line}")
endif()

add_subdirectory(${SUBKV_LLAMA_CPP_TREE} ${CMAKE_BINARY_DIR}/llama.cpp-build EXCLUDE_FROM_ALL)

# libggml names the folder of loadable backends.
target_sources(ggml PRIVATE ${CMAKE_SOURCE_DIR}/runtime/native/hook/backend_folder.cpp)
target_include_directories(ggml PRIVATE ${CMAKE_SOURCE_DIR}/runtime/native/hook)

# Compiles files of llama.cpp with one of our headers in front, which declares what their patches call.
function(subkv_include_in_front target header)
    list(TRANSFORM ARGN PREPEND ${SUBKV_LLAMA_CPP_TREE}/ OUTPUT_VARIABLE files)
    set_property(SOURCE ${files} TARGET_DIRECTORY ${target} APPEND PROPERTY COMPILE_OPTIONS -include ${header})
endfunction()

# The hook is compiled into libllama: it reads llama.cpp's internals.
file(GLOB SUBKV_HOOK_SOURCES CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/runtime/native/hook/*.cpp)
list(REMOVE_ITEM SUBKV_HOOK_SOURCES ${CMAKE_SOURCE_DIR}/runtime/native/hook/backend_folder.cpp)
get_target_property(SUBKV_STOCK_SOURCES llama SOURCES)
target_sources(llama PRIVATE ${SUBKV_HOOK_SOURCES})
set(SUBKV_HOOK_FOLDERS include base contract hook)
list(TRANSFORM SUBKV_HOOK_FOLDERS PREPEND ${CMAKE_SOURCE_DIR}/runtime/native/)
target_include_directories(llama PRIVATE ${SUBKV_HOOK_FOLDERS})
set_source_files_properties(${SUBKV_HOOK_SOURCES} TARGET_DIRECTORY llama PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
subkv_include_in_front(llama llama-subkv-grammar.h src/llama-grammar.cpp)
set_property(SOURCE ${CMAKE_SOURCE_DIR}/runtime/native/hook/identity.cpp TARGET_DIRECTORY llama
    PROPERTY COMPILE_DEFINITIONS SUBKV_LLAMA_COMMIT="${LLAMA_BUILD_COMMIT}")
if(SUBKV_SANITIZE_OPTIONS)
    set_property(SOURCE ${SUBKV_HOOK_SOURCES} TARGET_DIRECTORY llama APPEND PROPERTY COMPILE_OPTIONS
        ${SUBKV_SANITIZE_OPTIONS})
    target_link_options(llama PRIVATE ${SUBKV_SANITIZE_LINK_OPTIONS})
endif()

if(TARGET ggml-vulkan)
    subkv_prepare_ggml_vulkan(ggml-vulkan)
endif()

# Plain file names without version links (libllama.so, libllama.dll), which llama-cpp-python opens.
get_property(SUBKV_LLAMA_TARGETS DIRECTORY ${SUBKV_LLAMA_CPP_TREE}/ggml/src PROPERTY BUILDSYSTEM_TARGETS)
foreach(backend IN LISTS GGML_AVAILABLE_BACKENDS)
    list(APPEND SUBKV_LLAMA_TARGETS ${backend})
endforeach()
list(APPEND SUBKV_LLAMA_TARGETS llama)
list(REMOVE_DUPLICATES SUBKV_LLAMA_TARGETS)
# Variants of the CPU backend that the compiler cannot compile stay empty and are not installed; their processors use
# the best other variant. GCC before 14 does not support ARM's SME. GCC for Windows compiles loads of AMX tiles to
# addresses of two registers of different sizes.
set(SUBKV_NOT_COMPILED "")
if(GGML_CPU_ALL_VARIANTS AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
    include(CheckCXXCompilerFlag)
    check_cxx_compiler_flag(-march=armv9.2-a+sme SUBKV_HAS_SME)
    if(NOT SUBKV_HAS_SME)
        set(SUBKV_NOT_COMPILED GGML_USE_SME)
    endif()
elseif(GGML_CPU_ALL_VARIANTS AND MINGW AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    set(SUBKV_NOT_COMPILED GGML_AMX_TILE)
endif()
if(SUBKV_NOT_COMPILED)
    file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/empty)
    file(TOUCH ${CMAKE_BINARY_DIR}/empty/empty.c)
    foreach(target IN LISTS GGML_AVAILABLE_BACKENDS)
        get_target_property(definitions ${target}-feats COMPILE_DEFINITIONS)
        if(SUBKV_NOT_COMPILED IN_LIST definitions)
            list(REMOVE_ITEM SUBKV_LLAMA_TARGETS ${target})
            set_target_properties(${target} PROPERTIES SOURCES ${CMAKE_BINARY_DIR}/empty/empty.c COMPILE_OPTIONS ""
                LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/empty)
        endif()
    endforeach()
endif()
foreach(target IN LISTS SUBKV_LLAMA_TARGETS)
    get_target_property(type ${target} TYPE)
    if(type MATCHES "^(SHARED|MODULE)_LIBRARY$")
        set_property(TARGET ${target} PROPERTY VERSION)
        set_property(TARGET ${target} PROPERTY SOVERSION)
        set_property(TARGET ${target} PROPERTY PUBLIC_HEADER)
        set_target_properties(${target} PROPERTIES UNITY_BUILD_RELOCATABLE ON)
        if(type STREQUAL "SHARED_LIBRARY") # ggml looks for its loadable backends by ggml's own names
            set_target_properties(${target} PROPERTIES PREFIX lib IMPORT_PREFIX lib)
        endif()
        subkv_install_library(${target} ${SUBKV_LIB_DESTINATION})
    endif()
endforeach()

# llama.cpp's converter of Hugging Face folders (Python) and its licence are beside the libraries (converter/hf.py).
set(SUBKV_HF_CONVERTER ${CMAKE_LIBRARY_OUTPUT_DIRECTORY}/llama.cpp)
file(REMOVE_RECURSE ${SUBKV_HF_CONVERTER})
file(COPY
    ${SUBKV_LLAMA_CPP_TREE}/LICENSE
    ${SUBKV_LLAMA_CPP_TREE}/convert_hf_to_gguf.py
    ${SUBKV_LLAMA_CPP_TREE}/conversion
    ${SUBKV_LLAMA_CPP_TREE}/gguf-py
    DESTINATION ${SUBKV_HF_CONVERTER})
install(DIRECTORY ${SUBKV_HF_CONVERTER} DESTINATION ${SUBKV_LIB_DESTINATION} COMPONENT subkv
    PATTERN "__pycache__" EXCLUDE)
