# ccache when present. Paths below the base folder are hashed relative to it, so that another clone of the same commit
# finds its objects.
find_program(SUBKV_CCACHE ccache)
find_program(SUBKV_ENV env)
set(GGML_CCACHE OFF CACHE BOOL "done here" FORCE)
if(SUBKV_CCACHE AND SUBKV_ENV AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    set(base ${CMAKE_BINARY_DIR})
    cmake_path(IS_PREFIX CMAKE_SOURCE_DIR ${CMAKE_BINARY_DIR} NORMALIZE inside)
    if(inside)
        set(base ${CMAKE_SOURCE_DIR})
    endif()
    foreach(lang C CXX ASM CUDA)
        set(CMAKE_${lang}_COMPILER_LAUNCHER
            ${SUBKV_ENV} CCACHE_BASEDIR=${base} CCACHE_NOHASHDIR=1 ${SUBKV_CCACHE})
    endforeach()
    message(STATUS "ccache: ${SUBKV_CCACHE}, base folder ${base}")
endif()
