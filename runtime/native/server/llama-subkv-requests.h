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

// Refuses a request to another host than SUBKV_ALLOW_HOST names, or from a page of another one, and sets the response.
bool refuses(const httplib::Request & request, httplib::Response & response);

// Refuses a body beyond a limit, which the response names. Numbers that the server allocates memory for are lowered to
// their limits in the body.
bool refuses(std::string & body, httplib::Response & response);

} // namespace llama_subkv_server
