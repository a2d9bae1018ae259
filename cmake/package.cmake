# What C and C++ programs need beside the libraries: headers, the CMake package `subkv`, and llama.cpp's licence.
#
# In a wheel everything lies in the folder of the Python package. `cmake --install` uses folders of our own, because our
# libllama is patched and must not replace another one below the same prefix.
include(CMakePackageConfigHelpers)

if(SKBUILD)
    set(SUBKV_LIB_DESTINATION     subkv/lib)
    set(SUBKV_INCLUDE_DESTINATION subkv/include)
    set(SUBKV_CMAKE_DESTINATION   subkv/cmake)
    set(SUBKV_LICENSE_DESTINATION subkv/licenses)
else()
    include(GNUInstallDirs)
    set(SUBKV_LIB_DESTINATION     ${CMAKE_INSTALL_LIBDIR}/subkv)
    set(SUBKV_INCLUDE_DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/subkv)
    set(SUBKV_CMAKE_DESTINATION   ${CMAKE_INSTALL_LIBDIR}/cmake/subkv)
    set(SUBKV_LICENSE_DESTINATION ${CMAKE_INSTALL_DATADIR}/licenses/subkv)
endif()

configure_package_config_file(${CMAKE_SOURCE_DIR}/cmake/subkvConfig.cmake.in ${CMAKE_BINARY_DIR}/package/subkvConfig.cmake
    INSTALL_DESTINATION ${SUBKV_CMAKE_DESTINATION}
    PATH_VARS SUBKV_LIB_DESTINATION SUBKV_INCLUDE_DESTINATION
    NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/package/subkvConfigVersion.cmake COMPATIBILITY SameMinorVersion)

# llama.h, llama-cpp.h and what they include
set(llama_cpp ${CMAKE_BINARY_DIR}/llama.cpp)
set(headers ${llama_cpp}/include/llama.h ${llama_cpp}/include/llama-cpp.h)
foreach(name ggml ggml-alloc ggml-backend ggml-cpu ggml-opt gguf)
    list(APPEND headers ${llama_cpp}/ggml/include/${name}.h)
endforeach()

install(FILES ${CMAKE_SOURCE_DIR}/runtime/native/subkv.h ${headers}
    DESTINATION ${SUBKV_INCLUDE_DESTINATION} COMPONENT subkv)
install(FILES ${CMAKE_BINARY_DIR}/package/subkvConfig.cmake ${CMAKE_BINARY_DIR}/package/subkvConfigVersion.cmake
    DESTINATION ${SUBKV_CMAKE_DESTINATION} COMPONENT subkv)
install(FILES ${llama_cpp}/LICENSE DESTINATION ${SUBKV_LICENSE_DESTINATION} RENAME llama.cpp.txt COMPONENT subkv)
