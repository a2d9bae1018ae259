# Headers and the CMake package `subkv`, for C and C++ programs.
include(CMakePackageConfigHelpers)

configure_package_config_file(${CMAKE_SOURCE_DIR}/cmake/subkvConfig.cmake.in ${CMAKE_BINARY_DIR}/package/subkvConfig.cmake
    INSTALL_DESTINATION ${SUBKV_CMAKE_DESTINATION}
    PATH_VARS SUBKV_LIB_DESTINATION SUBKV_INCLUDE_DESTINATION
    NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/package/subkvConfigVersion.cmake COMPATIBILITY SameMinorVersion)

# llama.h, llama-cpp.h and what they include; ggml-cpp.h for the fuzz targets
set(headers ${SUBKV_LLAMA_CPP_TREE}/include/llama.h ${SUBKV_LLAMA_CPP_TREE}/include/llama-cpp.h)
foreach(name ggml ggml-alloc ggml-backend ggml-cpp ggml-cpu ggml-opt gguf)
    list(APPEND headers ${SUBKV_LLAMA_CPP_TREE}/ggml/include/${name}.h)
endforeach()

install(FILES ${CMAKE_SOURCE_DIR}/runtime/native/include/subkv.h ${CMAKE_SOURCE_DIR}/runtime/native/include/subkv_store.h ${headers}
    DESTINATION ${SUBKV_INCLUDE_DESTINATION} COMPONENT subkv)
install(FILES ${CMAKE_BINARY_DIR}/package/subkvConfig.cmake ${CMAKE_BINARY_DIR}/package/subkvConfigVersion.cmake
    DESTINATION ${SUBKV_CMAKE_DESTINATION} COMPONENT subkv)
if(NOT SKBUILD) # a wheel has them in its metadata
    install(FILES ${CMAKE_SOURCE_DIR}/LICENSE ${CMAKE_SOURCE_DIR}/THIRD_PARTY.md
        DESTINATION ${CMAKE_INSTALL_DATAROOTDIR}/licenses/subkv COMPONENT subkv)
endif()
# auditwheel copies libgomp into portable wheels; a wheel for Windows contains all run-time libraries of the compiler.
if(SKBUILD AND NOT GGML_NATIVE AND (MINGW OR CMAKE_SYSTEM_NAME STREQUAL "Linux"))
    set(licenses ${CMAKE_SOURCE_DIR}/cmake/licenses/libgomp.txt)
    if(MINGW)
        list(APPEND licenses ${CMAKE_SOURCE_DIR}/cmake/licenses/libwinpthread.txt)
    endif()
    install(FILES ${licenses} DESTINATION ${SKBUILD_METADATA_DIR}/licenses COMPONENT subkv)
endif()
