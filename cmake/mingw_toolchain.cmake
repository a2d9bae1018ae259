# From Debian's packages to Windows: g++-mingw-w64-x86-64-posix compiles, wine64 runs it (docs/development.md).
set(CMAKE_SYSTEM_NAME Windows)
set(CMAKE_SYSTEM_PROCESSOR x86_64)
set(CMAKE_C_COMPILER x86_64-w64-mingw32-gcc-posix)
set(CMAKE_CXX_COMPILER x86_64-w64-mingw32-g++-posix)
set(CMAKE_FIND_ROOT_PATH /usr/x86_64-w64-mingw32)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)

# ggml cannot detect another machine's processor. AVX2 is what our fast kernels need
foreach(instructions SSE42 AVX AVX2 FMA F16C BMI2)
    set(GGML_${instructions} ON CACHE BOOL "of every processor with AVX2")
endforeach()

# GCC's OpenMP waits for threads by semaphores here, at every operation: two threads decoded at a sixth of the speed of
# one. ggml's own threads spin.
set(GGML_OPENMP OFF CACHE BOOL "ggml's own threads")
