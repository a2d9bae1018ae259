# Windows by MinGW-w64, included when it is the compiler.

# Headers before MinGW-w64 11 lack a structure of Windows 8 that ggml's threads use. They work without it, as on
# Windows 7.
include(CheckCSourceCompiles)
check_c_source_compiles("#include <windows.h>
int main(void) { THREAD_POWER_THROTTLING_STATE state; return (int) sizeof(state) == 0; }" SUBKV_HAS_THREAD_THROTTLING)
if(NOT SUBKV_HAS_THREAD_THROTTLING)
    get_property(targets DIRECTORY ${SUBKV_LLAMA_CPP_TREE}/ggml/src PROPERTY BUILDSYSTEM_TARGETS)
    list(FILTER targets INCLUDE REGEX "^ggml-cpu") # one target, or one per family of processors
    foreach(target IN LISTS targets)
        target_compile_definitions(${target} PRIVATE _WIN32_WINNT=0x0601)
    endforeach()
endif()

# The compiler's run-time libraries are beside ours, which must share one C++ library. Debian's contain 23 MB of debug
# data.
foreach(name libstdc++-6 libgcc_s_seh-1 libwinpthread-1)
    execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=${name}.dll
        OUTPUT_VARIABLE file OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(IS_ABSOLUTE "${file}") # else the compiler links its run time statically
        file(COPY ${file} DESTINATION ${CMAKE_RUNTIME_OUTPUT_DIRECTORY})
        set(file ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/${name}.dll)
        execute_process(COMMAND ${CMAKE_STRIP} ${file} COMMAND_ERROR_IS_FATAL ANY)
        install(FILES ${file} DESTINATION ${SUBKV_LIB_DESTINATION} COMPONENT subkv)
    endif()
endforeach()
