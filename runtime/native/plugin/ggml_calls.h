#pragma once

#include <string>

namespace subkv::plugin {

// Binds ggml's functions to those of the library that contains the address `caller`, with its dependencies, or, if it
// is nullptr, to those that the process shows to all libraries. Returns "", or why it cannot, as the end of a sentence
// about the ggml.
std::string bind_ggml(const void * caller);

} // namespace subkv::plugin
