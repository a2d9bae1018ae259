// store_hook.h: what libllama takes of libsubkv's store, which it finds by name in a process that asks for one.
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
    decltype(&subkv_store_found_free)   found_free;
    decltype(&subkv_store_get_stats)    stats;

    // `put` without a copy of the states: prompt.state is not looked at.
    bool (*put_states)(subkv_store * store, const uint8_t * identity, const subkv_store_prompt * prompt,
                       StoreStates && states, bool wait);
    // FORMAT.md §1.1 of the model at `path`. Throws nothing: "" + last_error where it cannot be read.
    std::string (*content)(const std::string & path);
    StoreIdentity (*digest)(const std::string & text); // SHA-256
};

} // namespace subkv

// Of libsubkv: returns const subkv::StoreCalls *.
constexpr const char * SUBKV_STORE_CALLS = "subkv_store_calls";
