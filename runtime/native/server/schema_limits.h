// schema_limits.h: limits of the JSON schemas of a request. Part of libsubkv-server.
#pragma once

#include "json.h"

namespace llama_subkv_server {

// Throws std::invalid_argument if a schema in a request (json_schema, response_format, the parameters of tools) has
// references to itself that nest more than 100 levels deep, more than 20,000 parts after the expansion of lists of types,
// names of more than 4,096 bytes along a path, or more than 500 optional properties in an object. llama.cpp copies parts
// for each type of a list, and makes a grammar whose size grows with the square of the number of optional properties.
void check_schemas(const common_json & request);

} // namespace llama_subkv_server
