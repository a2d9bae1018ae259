# From zig (package ziglang) to macOS on Apple's processors, without Metal, Accelerate and BLAS (docs/wheels.md).
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_VERSION 22) # Darwin kernel of macOS 13
set(CMAKE_SYSTEM_PROCESSOR arm64)
set(zig ${CMAKE_CURRENT_LIST_DIR}/../build/zig-macos) # python cmake/zig.py aarch64-macos build/zig-macos
set(CMAKE_C_COMPILER ${zig}/cc)
set(CMAKE_CXX_COMPILER ${zig}/c++)
set(CMAKE_AR ${zig}/ar)
set(CMAKE_RANLIB ${zig}/ranlib)
# All libraries are in one folder. CMake uses @rpath only if it can read macOS's version.
set(CMAKE_INSTALL_NAME_DIR "@loader_path")
set(CMAKE_BUILD_WITH_INSTALL_NAME_DIR ON)
set(CMAKE_INSTALL_NAME_TOOL true)
set(CMAKE_STRIP true)             # zig has none

foreach(framework METAL ACCELERATE BLAS)
    set(GGML_${framework} OFF CACHE BOOL "zig has no headers of it")
endforeach()
