# Checks the requirements of llama.cpp's CUDA backend, whose own CMake files fail with less precise messages.

# Programs load the libraries of the toolkit of the build, unless other ones are beside ours or already loaded.
function(subkv_find_cuda_libraries target)
    set_property(TARGET ${target} APPEND PROPERTY INSTALL_RPATH "${CUDAToolkit_LIBRARY_DIR}")
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

find_package(CUDAToolkit QUIET)
if(NOT CUDAToolkit_NVCC_EXECUTABLE)
    message(FATAL_ERROR "GGML_CUDA: expected NVIDIA's CUDA toolkit with nvcc on the PATH, in CUDACXX or below "
        "/usr/local/cuda, found none; install it, name it with -DCUDAToolkit_ROOT=DIR, or leave out -DGGML_CUDA=ON")
endif()
if(NOT TARGET CUDA::cublas)
    message(FATAL_ERROR "GGML_CUDA: expected cuBLAS with its link libcublas.so in the CUDA toolkit, found none in "
        "${CUDAToolkit_LIBRARY_DIR}")
endif()
if(NOT TARGET CUDA::cuda_driver AND NOT GGML_CUDA_NO_VMM)
    message(FATAL_ERROR "GGML_CUDA: expected libcuda.so, the driver's or in the CUDA toolkit's folder stubs, found none "
        "in ${CUDAToolkit_LIBRARY_DIR}; -DGGML_CUDA_NO_VMM=ON does without it")
endif()

# one toolkit for headers, libraries and compiler, on the PATH or not
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    set(CMAKE_CUDA_COMPILER ${CUDAToolkit_NVCC_EXECUTABLE} CACHE FILEPATH "nvcc")
endif()
