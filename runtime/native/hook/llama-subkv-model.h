// llama-subkv-model.h: where a loaded model came from, and what identifies its states. Part of libllama.
#pragma once

#include "file_stamp.h"
#include "llama.h"
#include "state_identity.h"

#include <cstdint>
#include <string>
#include <vector>

class llama_kv_cache;
struct llama_model_loader;

namespace llama_subkv {

struct model_source {
    std::string path;      // of the model's first file, empty if the model was loaded from memory
    std::string overrides; // metadata that the user replaced

    std::vector<subkv::FileStamp> files; // as they were opened to load the model
};

// Records the source of a model that is being loaded, for source_of.
void record_source(const llama_model & model, const std::string & path, const llama_model_loader & loader);

const model_source & source_of(const llama_model & model);

// What the bytes of a state depend on, including the model's digest. `whole` means a state of all sequences.
subkv::StateIdentity state_identity(const llama_context & ctx, const std::string & model, bool whole);
// The types and widths of a cache's rows, as text.
std::string rows_of(const llama_kv_cache & kv, bool has_all_cells);
// Returns false if something else affects the bytes of a state, for example a LoRA adapter.
bool storable(const llama_context & ctx);
// The longest tail of a restored sequence that can be removed without a checkpoint, or -1 for any.
int64_t n_removable(const llama_context & ctx);

} // namespace llama_subkv
