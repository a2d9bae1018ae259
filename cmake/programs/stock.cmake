# Programs of the unpatched llama.cpp, to test the plug-in, in bin/stock beside its libllama. Files without a patch are
# compiled once for both; those of patches/upstream in vendor/ stay patched.

# STOCK_<target>: the objects of a target, compiled again where a patch changes a file (<target>-stock).
function(subkv_add_stock_objects target)
    get_target_property(folder ${target} SOURCE_DIR)
    get_target_property(sources ${target} SOURCES)
    set(objects "$<FILTER:$<TARGET_OBJECTS:${target}>,EXCLUDE,/runtime/native/>") # our part of the server
    set(changed "")
    foreach(source IN LISTS sources)
        string(REPLACE ${SUBKV_LLAMA_CPP_TREE}/ ${SUBKV_LLAMA_CPP_STOCK}/ stock ${folder}/${source})
        if(NOT source MATCHES "\\.cpp$" OR NOT EXISTS ${stock})
            continue()
        endif()
        file(SHA256 ${folder}/${source} ours)
        file(SHA256 ${stock} theirs)
        if(NOT ours STREQUAL theirs)
            list(APPEND changed ${stock})
            set(objects "$<FILTER:${objects},EXCLUDE,/${source}.o$>")
        endif()
    endforeach()
    if(changed)
        add_library(${target}-stock OBJECT ${changed})
        target_include_directories(${target}-stock PRIVATE
            ${SUBKV_LLAMA_CPP_TREE} ${SUBKV_LLAMA_CPP_TREE}/vendor ${SUBKV_LLAMA_CPP_TREE}/tools/mtmd)
        target_link_libraries(${target}-stock PRIVATE ${target} cpp-httplib)
        target_compile_options(${target}-stock PRIVATE -O0) # their time is that of libllama, which is optimized
        set(objects "${objects};$<TARGET_OBJECTS:${target}-stock>")
    endif()
    set(STOCK_${target} "${objects}" PARENT_SCOPE)
endfunction()

foreach(target llama-common server-context llama-server-impl llama-server llama-cli-impl llama-cli
        llama-completion-impl llama-completion llama-bench-impl llama-bench llama-perplexity-impl llama-perplexity)
    subkv_add_stock_objects(${target})
endforeach()
foreach(name llama-server llama-cli llama-completion llama-bench llama-perplexity)
    set(objects ${STOCK_llama-common} ${STOCK_${name}-impl} ${STOCK_${name}})
    set(parts llama-common ${name}-impl ${name})
    if(name MATCHES "server|cli")
        list(APPEND objects ${STOCK_server-context})
        list(APPEND parts server-context)
    endif()
    if(name STREQUAL "llama-cli")
        list(APPEND objects ${STOCK_llama-server-impl})
        list(APPEND parts llama-server-impl)
    endif()
    add_executable(${name}-stock-program ${objects})
    add_dependencies(${name}-stock-program ${parts} mtmd)
    target_link_libraries(${name}-stock-program PRIVATE llama-stock ggml llama-common-base llama-ui cpp-httplib
        $<TARGET_LINKER_FILE:mtmd>)
    set_target_properties(${name}-stock-program PROPERTIES
        OUTPUT_NAME ${name}
        LINKER_LANGUAGE CXX
        RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin/stock
        INSTALL_RPATH "${SUBKV_ORIGIN}:${SUBKV_ORIGIN}/..")
    target_link_options(${name}-stock-program PRIVATE ${SUBKV_SANITIZE_LINK_OPTIONS})
    install(TARGETS ${name}-stock-program RUNTIME DESTINATION ${SUBKV_LIB_DESTINATION}/stock COMPONENT subkv)
    add_dependencies(programs ${name}-stock-program)
endforeach()
