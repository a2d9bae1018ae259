// llama-subkv-requests.h: limits of llama-server's requests, and their end at a shutdown. tools/server/server-http.cpp
// calls these functions; the build includes this header in front of it.
#pragma once

#include "common.h"

#include <cpp-httplib/httplib.h>

#include <string>

namespace llama_subkv_server {

// A client that neither sends nor reads for a minute (or for less, by --timeout) loses its connection. Bodies have at
// most 32 MiB. At a shutdown requests that wait for a result get 503, and streams end with an error.
void limit(httplib::Server & server, const common_params & params);

// true: another host than SUBKV_ALLOW_HOST names; the response is set.
bool refuses(const httplib::Request & request, httplib::Response & response);

// true: the body is beyond a limit; the response says which. Numbers that the server allocates memory for are lowered to
// their limits in the body.
bool refuses(std::string & body, httplib::Response & response);

} // namespace llama_subkv_server
