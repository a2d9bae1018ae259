# Checks the requirements of llama.cpp's CUDA backend, whose own CMake files fail with less precise messages.

# Programs load the libraries of the toolkit of the build, unless other ones are beside ours or already loaded.
function(subkv_find_cuda_libraries target)
    set_property(TARGET ${target} APPEND PROPERTY INSTALL_RPATH "${SUBKV_CUDA_LIBRARY_DIR}")
endfunction()

# The toolkit of pip's packages: sets `found` to the folder that they share, or to "". It comes before another toolkit,
# because nobody installs nvcc in a Python environment for anything else, and a system's may be too old for the GPU.
function(subkv_find_pip_toolkit found)
    find_package(Python3 3.10 COMPONENTS Interpreter REQUIRED)
    # pip's isolated build environment hides the packages of the user's environment from imports, but not their folder
    execute_process(
        COMMAND ${Python3_EXECUTABLE} -c
            "import site, sysconfig; print(sysconfig.get_path('platlib'), site.getusersitepackages(), sep=';', end='')"
        OUTPUT_VARIABLE folders
        COMMAND_ERROR_IS_FATAL ANY)
    foreach(folder IN LISTS folders)
        file(GLOB compilers ${folder}/nvidia/cu[0-9]*/bin/nvcc)
        if(compilers)
            list(SORT compilers COMPARE NATURAL ORDER DESCENDING)
            list(GET compilers 0 compiler)
            get_filename_component(folder ${compiler}/../.. ABSOLUTE)
            set(${found} ${folder} PARENT_SCOPE)
            return()
        endif()
    endforeach()
    set(${found} "" PARENT_SCOPE)
endfunction()

# A toolkit in the usual form, of links to pip's packages, which have no lib64 and no libNAME.so without a version.
function(subkv_link_pip_toolkit packages folder)
    file(REMOVE_RECURSE ${folder})
    file(MAKE_DIRECTORY ${folder}/bin ${folder}/lib64)
    foreach(part include nvvm)
        file(CREATE_LINK ${packages}/${part} ${folder}/${part} SYMBOLIC)
    endforeach()
    file(GLOB programs ${packages}/bin/*) # of which nvcc finds the rest beside the path that it is started by
    foreach(program IN LISTS programs)
        get_filename_component(name ${program} NAME)
        file(CREATE_LINK ${program} ${folder}/bin/${name} SYMBOLIC)
    endforeach()
    find_library(SUBKV_CUDA_DRIVER NAMES cuda libcuda.so.1) # some packages of the driver have no libcuda.so
    file(GLOB libraries ${packages}/lib/lib*.a ${packages}/lib/lib*.so*)
    if(SUBKV_CUDA_DRIVER)
        list(APPEND libraries ${SUBKV_CUDA_DRIVER})
    endif()
    foreach(library IN LISTS libraries)
        get_filename_component(name ${library} NAME)
        string(REGEX REPLACE "\\.so\\..*" ".so" name ${name})
        file(CREATE_LINK ${library} ${folder}/lib64/${name} SYMBOLIC)
    endforeach()
endfunction()

# By default llama.cpp compiles for the GPUs of this machine. Call this after llama.cpp has enabled CUDA.
function(subkv_check_cuda_architectures architectures)
    if(architectures STREQUAL "native" AND NOT CMAKE_CUDA_ARCHITECTURES_NATIVE MATCHES "^[0-9]")
        message(FATAL_ERROR "CMAKE_CUDA_ARCHITECTURES: expected the architectures to compile for, because this machine has "
            "no GPU to ask; for example -DCMAKE_CUDA_ARCHITECTURES=90, or several: \"75;86;90\"")
    endif()
endfunction()

if(NOT GGML_CUDA)
    return()
endif()

set(SUBKV_PIP_TOOLKIT "")
set(folder ${CMAKE_BINARY_DIR}/cuda)
set(named "${CUDAToolkit_ROOT}$ENV{CUDAToolkit_ROOT}${CMAKE_CUDA_COMPILER}$ENV{CUDACXX}") # by the user, or last time
if(CMAKE_HOST_SYSTEM_NAME STREQUAL "Linux" AND NOT CMAKE_CROSSCOMPILING
        AND (named STREQUAL "" OR named STREQUAL "${folder}/bin/nvcc"))
    subkv_find_pip_toolkit(SUBKV_PIP_TOOLKIT)
endif()
if(SUBKV_PIP_TOOLKIT)
    set(CUDAToolkit_ROOT ${folder})
    subkv_link_pip_toolkit(${SUBKV_PIP_TOOLKIT} ${folder})
    message(STATUS "CUDA toolkit of pip's packages: ${SUBKV_PIP_TOOLKIT}")
endif()
find_package(CUDAToolkit QUIET)
if(NOT CUDAToolkit_NVCC_EXECUTABLE)
    message(FATAL_ERROR "GGML_CUDA: expected NVIDIA's CUDA toolkit with nvcc beside this Python, on the PATH, in CUDACXX "
        "or below /usr/local/cuda, found none; install it with `pip install --group cuda` (pip 25.1 or newer), name it "
        "with -DCUDAToolkit_ROOT=DIR, or leave out -DGGML_CUDA=ON")
endif()
if(NOT TARGET CUDA::cublas)
    message(FATAL_ERROR "GGML_CUDA: expected cuBLAS with its link libcublas.so in the CUDA toolkit, found none in "
        "${CUDAToolkit_LIBRARY_DIR}")
endif()
if(NOT TARGET CUDA::cuda_driver AND NOT GGML_CUDA_NO_VMM)
    message(FATAL_ERROR "GGML_CUDA: expected libcuda.so, the driver's or in the CUDA toolkit's folder stubs, found none "
        "in ${CUDAToolkit_LIBRARY_DIR}; -DGGML_CUDA_NO_VMM=ON does without it")
endif()

if(SUBKV_PIP_TOOLKIT)
    set(SUBKV_CUDA_LIBRARY_DIR ${SUBKV_PIP_TOOLKIT}/lib)
else()
    set(SUBKV_CUDA_LIBRARY_DIR ${CUDAToolkit_LIBRARY_DIR})
endif()

# one toolkit for headers, libraries and compiler, on the PATH or not
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    set(CMAKE_CUDA_COMPILER ${CUDAToolkit_NVCC_EXECUTABLE} CACHE FILEPATH "nvcc")
endif()
