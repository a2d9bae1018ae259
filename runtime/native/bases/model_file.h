// model_file.h: reads the content hash of a model from its files and finds its bases, without loading the model
// (converter/FORMAT.md §1.1, python/subkv/format/store.py).
#pragma once

#include <string>

namespace subkv {

// FORMAT.md §1.1: 64 lower-case hex digits. Reads metadata, tensor tables and samples of the tensors. `path`: the first
// file of a split model. Throws Invalid for another file of the split, or if a file is missing.
std::string model_content(const std::string & path);

// The output path of `convert --sidecar`: DIR/M.subkv-sidecar.gguf for DIR/M.gguf and for DIR/M-00001-of-00002.gguf.
std::string sidecar_beside(const std::string & model);

// The user's folder of sidecars, $XDG_CACHE_HOME/subkv/sidecars or ~/.cache/subkv/sidecars; "": no home folder.
std::string sidecar_store();

// Throws Invalid if the system cannot tell.
bool file_exists(const std::string & path);

// The first file of the store, by name, that ends with -DIGITS and `ending`; DIGITS are the first 12 of `content`; "":
// none. Throws Invalid if the store exists but cannot be read.
std::string stored_sidecar(const std::string & content, const std::string & ending);

constexpr const char * CALIBRATED   = ".gguf";         // endings in the store: calibrated by `convert`
constexpr const char * FROM_WEIGHTS = ".weights.gguf"; // derived from the weights, no calibration

// Throws Invalid unless the sidecar at `path` names this content hash as its model.
void check_sidecar(const std::string & path, const std::string & content);

} // namespace subkv
