# The page that llama-server serves (targets llama-ui, llama-ui-assets): built from tools/ui by npm, if npm exists.
# Upstream's targets of these names would run npm at every build, or download the page from a hub.

set(page ${CMAKE_CURRENT_BINARY_DIR}/page)
set(ui ${SUBKV_LLAMA_CPP_TREE}/tools/ui)
set(npm "")
if(SUBKV_PAGE)
    if(CMAKE_HOST_WIN32)
        find_program(SUBKV_NPM NAMES npm.cmd npm.bat npm)
    else()
        find_program(SUBKV_NPM npm)
    endif()
    if(SUBKV_NPM)
        set(npm ${SUBKV_NPM})
    else()
        message(STATUS "llama-server gets no page: npm was not found")
    endif()
endif()

file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${ui}/*)
add_custom_command(
    OUTPUT ${page}/ui.cpp ${page}/ui.h
    COMMAND ${CMAKE_COMMAND}
        -Dnpm=${npm} -Dpage=${page} -Dtree=${SUBKV_LLAMA_CPP_TREE} -Dnumber=${LLAMA_BUILD_NUMBER}
        -P ${CMAKE_CURRENT_LIST_DIR}/page_build.cmake
    DEPENDS ${sources} ${SUBKV_LLAMA_CPP_TREE}/scripts/ui-assets.cmake
        ${CMAKE_CURRENT_LIST_DIR}/page_build.cmake ${CMAKE_CURRENT_LIST_DIR}/no_page.html
    COMMENT "Building the page of llama-server"
    VERBATIM)
add_custom_target(llama-ui-assets DEPENDS ${page}/ui.cpp ${page}/ui.h)

add_library(llama-ui STATIC EXCLUDE_FROM_ALL ${page}/ui.cpp ${page}/ui.h)
add_dependencies(llama-ui llama-ui-assets)
target_include_directories(llama-ui PUBLIC ${page})
set_target_properties(llama-ui PROPERTIES POSITION_INDEPENDENT_CODE ON)

install(FILES ${page}/page-licenses.txt DESTINATION ${SUBKV_LIB_DESTINATION}/llama.cpp COMPONENT subkv OPTIONAL)
