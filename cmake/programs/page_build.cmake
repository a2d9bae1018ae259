# Makes ${page}/ui.cpp and ui.h, which hold the page of llama-server, or one that says how to get it (no_page.html); with
# the former, page-licenses.txt.
#
#   cmake -Dnpm=PROGRAM -Dpage=DIR -Dtree=LLAMA_CPP -Dnumber=N -P page_build.cmake
#
# A build must not fail without a network: if npm fails, the page is left out, and one line reports it.
cmake_minimum_required(VERSION 3.21)

set(work ${page}/npm) # the sources and npm's 700 MB, while it runs
set(dist ${page}/built/dist)
set(log ${page}/npm.log)
set(licenses ${page}/page-licenses.txt)

# Runs npm in the work folder; sets `status`, not 0 if it failed. Its output goes to the log.
function(run_npm)
    execute_process(COMMAND ${npm} ${ARGN} WORKING_DIRECTORY ${work} RESULT_VARIABLE result
        OUTPUT_VARIABLE output ERROR_VARIABLE output TIMEOUT 1800)
    string(REPLACE ";" " " arguments "${ARGN}")
    file(APPEND ${log} "npm ${arguments}\n${output}exit status: ${result}\n\n")
    set(status "${result}" PARENT_SCOPE)
endfunction()

# Sets `failed` to the npm command that failed, or to "".
function(build_page)
    set(failed "" PARENT_SCOPE)
    file(REMOVE_RECURSE ${work})
    file(COPY ${tree}/tools/ui/ DESTINATION ${work} NO_SOURCE_PERMISSIONS)
    # without a network npm retries each of a thousand packages for minutes, so one package is tested first
    execute_process(COMMAND ${npm} view vite version --fetch-retries=0 WORKING_DIRECTORY ${work}
        RESULT_VARIABLE unreachable OUTPUT_QUIET ERROR_QUIET TIMEOUT 30)
    set(cache --prefer-offline)
    if(NOT unreachable EQUAL 0)
        set(cache --offline)
    endif()
    # the packages' own install scripts are not needed
    run_npm(ci ${cache} --ignore-scripts --no-audit --no-fund)
    if(NOT status EQUAL 0)
        set(failed "npm ci" PARENT_SCOPE)
        return()
    endif()
    set(ENV{LLAMA_UI_OUT_DIR} ${dist})
    set(ENV{LLAMA_UI_VERSION} b${number})
    set(ENV{LLAMA_BUILD_NUMBER} ${number})
    run_npm(run build)
    if(NOT status EQUAL 0 OR NOT EXISTS ${dist}/index.html)
        set(failed "npm run build" PARENT_SCOPE)
        return()
    endif()
    # The page contains parts of many packages, whose licences must be distributed: those of all installed packages.
    file(GLOB texts ${work}/node_modules/*/* ${work}/node_modules/@*/*/* ${work}/src/lib/vendors/*/*)
    list(FILTER texts INCLUDE REGEX "/[Ll][Ii][Cc][Ee][Nn][CcSs][Ee][^/]*$")
    foreach(path IN LISTS texts)
        if(NOT IS_DIRECTORY ${path})
            file(READ ${path} text)
            file(RELATIVE_PATH name ${work} ${path})
            file(APPEND ${licenses} "==== ${name}\n\n${text}\n")
        endif()
    endforeach()
endfunction()

# Upstream's script turns the files of the built page, or no_page.html, into C++. It requires the other names.
function(embed)
    set(gzip ON)
    if(NOT EXISTS ${dist}/index.html)
        set(gzip OFF) # upstream refuses clients that do not accept it, such as curl
        file(MAKE_DIRECTORY ${dist})
        configure_file(${CMAKE_CURRENT_FUNCTION_LIST_DIR}/no_page.html ${dist}/index.html COPYONLY)
        foreach(name sw.js bundle.js bundle.css workbox.js)
            file(WRITE ${dist}/${name} "\n")
        endforeach()
        foreach(name manifest.webmanifest build.json version.json)
            file(WRITE ${dist}/${name} "{}\n")
        endforeach()
    endif()
    execute_process(
        COMMAND ${CMAKE_COMMAND} -DUI_SOURCE_DIR=${page}/built -DUI_BINARY_DIR=${page} -DLLAMA_SOURCE_DIR=${tree}
            -DBUILD_UI=OFF -DHF_ENABLED=OFF -DLLAMA_UI_GZIP=${gzip} -P ${tree}/scripts/ui-assets.cmake
        RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
    file(APPEND ${log} "${output}")
    set(status "${result}" PARENT_SCOPE)
endfunction()

file(MAKE_DIRECTORY ${page})
file(WRITE ${log} "")
file(REMOVE_RECURSE ${page}/built ${licenses})
set(failed "")
if(npm)
    build_page()
    file(REMOVE_RECURSE ${work})
endif()
if(NOT failed)
    embed()
    if(NOT status EQUAL 0 AND npm)
        set(failed "embedding it")
    endif()
endif()
if(failed)
    message(STATUS "llama-server gets no page: ${failed} failed, see ${log}; delete ${page}/ui.cpp to try again")
    file(REMOVE_RECURSE ${page}/built ${licenses})
    embed()
endif()
if(NOT status EQUAL 0)
    message(FATAL_ERROR "the page of llama-server: expected ui-assets.cmake to write ui.cpp, found a failure, see ${log}")
endif()
file(TOUCH ${page}/ui.cpp ${page}/ui.h) # upstream's script does not rewrite unchanged files
