// model_file.h: what a model's files say about it without loading the model: its content digest, and where its bases are
// (converter/FORMAT.md §1.1, python/subkv/format/store.py).
#pragma once

#include <string>

namespace subkv {

// FORMAT.md §1.1: 64 lower-case hex digits. Reads metadata, tensor tables and samples of the tensors. `path` is
// the first file of a split model. Throws Invalid: another file of it, a missing one.
std::string model_content(const std::string & path);

// Where `convert --sidecar` writes: DIR/M.subkv-sidecar.gguf for DIR/M.gguf and for DIR/M-00001-of-00002.gguf.
std::string sidecar_beside(const std::string & model);

// The user's folder of sidecars, $XDG_CACHE_HOME/subkv/sidecars or ~/.cache/subkv/sidecars; "": there is no home folder.
std::string sidecar_store();

// The first file of the store, by name, that ends in -DIGITS and `ending`, DIGITS being the first 12 of `content`; "":
// none. Throws Invalid when the store exists but cannot be read.
std::string stored_sidecar(const std::string & content, const std::string & ending);

constexpr const char * CALIBRATED   = ".gguf";         // endings in the store: written by `convert`
constexpr const char * FROM_WEIGHTS = ".weights.gguf"; // derived from the weights alone

// Throws Invalid unless the sidecar at `path` says that it belongs to the model of this content.
void check_sidecar(const std::string & path, const std::string & content);

} // namespace subkv
