// llama-subkv.h: the functions that the patched llama.cpp sources call. They are compiled into libllama, and do nothing
// unless the cache has a hook (contract/cache_hook.h).
#pragma once

#include "llama-subkv-graph.h"
#include "llama-subkv-memory.h"
#include "llama-subkv-model.h"
#include "llama-subkv-sequences.h"
#include "llama-subkv-state.h"
