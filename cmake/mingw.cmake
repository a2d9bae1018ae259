# Windows by MinGW-w64, included when it is the compiler.

# Headers before MinGW-w64 11 lack a structure of Windows 8's that ggml's threads ask for: they do without, as they do for
# Windows 7.
include(CheckCSourceCompiles)
check_c_source_compiles("#include <windows.h>
int main(void) { THREAD_POWER_THROTTLING_STATE state; return (int) sizeof(state) == 0; }" SUBKV_HAS_THREAD_THROTTLING)
if(NOT SUBKV_HAS_THREAD_THROTTLING)
    target_compile_definitions(ggml-cpu PRIVATE _WIN32_WINNT=0x0601)
endif()

# The compiler's own libraries lie beside ours, which have to share one of C++.
foreach(name libstdc++-6 libgcc_s_seh-1 libwinpthread-1 libgomp-1)
    execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=${name}.dll
        OUTPUT_VARIABLE file OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(IS_ABSOLUTE "${file}") # else a compiler that links its own into every library
        file(COPY ${file} DESTINATION ${CMAKE_RUNTIME_OUTPUT_DIRECTORY})
        install(FILES ${file} DESTINATION ${SUBKV_LIB_DESTINATION} COMPONENT subkv)
    endif()
endforeach()
