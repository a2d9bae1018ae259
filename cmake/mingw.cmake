# Windows by MinGW-w64, included when it is the compiler.

# Headers before MinGW-w64 11 lack a structure of Windows 8's that ggml's threads ask for: they do without, as they do for
# Windows 7.
include(CheckCSourceCompiles)
check_c_source_compiles("#include <windows.h>
int main(void) { THREAD_POWER_THROTTLING_STATE state; return (int) sizeof(state) == 0; }" SUBKV_HAS_THREAD_THROTTLING)
if(NOT SUBKV_HAS_THREAD_THROTTLING)
    get_property(targets DIRECTORY ${SUBKV_LLAMA_CPP_TREE}/ggml/src PROPERTY BUILDSYSTEM_TARGETS)
    list(FILTER targets INCLUDE REGEX "^ggml-cpu") # one, or one for each family of processors
    foreach(target IN LISTS targets)
        target_compile_definitions(${target} PRIVATE _WIN32_WINNT=0x0601)
    endforeach()
endif()

# The compiler's own libraries lie beside ours, which have to share one of C++. Debian's hold what debuggers read: 23 MB.
foreach(name libstdc++-6 libgcc_s_seh-1 libwinpthread-1)
    execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=${name}.dll
        OUTPUT_VARIABLE file OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(IS_ABSOLUTE "${file}") # else a compiler that links its own into every library
        file(COPY ${file} DESTINATION ${CMAKE_RUNTIME_OUTPUT_DIRECTORY})
        set(file ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/${name}.dll)
        execute_process(COMMAND ${CMAKE_STRIP} ${file} COMMAND_ERROR_IS_FATAL ANY)
        install(FILES ${file} DESTINATION ${SUBKV_LIB_DESTINATION} COMPONENT subkv)
    endif()
endforeach()
