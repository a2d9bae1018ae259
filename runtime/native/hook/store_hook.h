// store_hook.h: the functions of libsubkv's prompt store that libllama calls. libllama looks them up by name if
// SUBKV_STORE is set.
#pragma once

#include "subkv_store.h"

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace subkv {

using StoreStates   = std::array<std::vector<uint8_t>, 2>; // of the model, of a draft model
using StoreIdentity = std::array<uint8_t, SUBKV_STORE_IDENTITY>;

struct StoreCalls {
    decltype(&subkv_last_error)         last_error;
    decltype(&subkv_store_open)         open;
    decltype(&subkv_store_room)         room;
    decltype(&subkv_store_put)          put;
    decltype(&subkv_store_flush)        flush;
    decltype(&subkv_store_get)          get;
    decltype(&subkv_store_found_prompt) found_prompt;
    decltype(&subkv_store_found_reach)  found_reach;
    decltype(&subkv_store_found_free)   found_free;
    decltype(&subkv_store_get_stats)    stats;

    // Like `put`, without a copy of the states; prompt.state is ignored.
    bool (*put_states)(subkv_store * store, const uint8_t * identity, const subkv_store_prompt * prompt,
                       StoreStates && states, bool wait);
    // Content hash (FORMAT.md §1.1) of the model at `path`. Throws nothing: "" + last_error if it cannot be read.
    std::string (*content)(const std::string & path);
    StoreIdentity (*digest)(const std::string & text); // SHA-256
};

} // namespace subkv

// A function of libsubkv that returns const subkv::StoreCalls *.
constexpr const char * SUBKV_STORE_CALLS = "subkv_store_calls";
