// model_file.h: identifies a model by its files, without loading it (converter/FORMAT.md §1.1).
#pragma once

#include "file_stamp.h"
#include "ggml-cpp.h"
#include "sha256.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace subkv {

// A digest of 64 lower-case hex digits (FORMAT.md §1.1), from metadata, tensor tables and samples of the tensors.
// `path` is the first file of a split model. Throws Invalid for another file of the split, or if a file is missing. It
// serves to find a model's bases, any of which code any model. Identities of states need model_data.
std::string model_content(const std::string & path);

// Identifies every byte of a model's metadata and tensors as it was loaded. It is the SHA-256, in 64 lower-case hex
// digits, of what model_content hashes, but with the SHA-256 (32 bytes) of every DATA_LEAF bytes of a tensor's data
// instead of samples. Renamed, split and merged files of a model have one digest. Reads all of it, with two threads.
// Throws Invalid, also if the files are not those that were loaded.
constexpr uint64_t DATA_LEAF = 4 << 20;

std::string model_data(const LoadedModel & model);

// Identifies a model by a few weights (FORMAT.md §1.3), which a program without its file has, too
// (runtime/native/plugin).
constexpr const char * WEIGHTS_KEY = "subkv.base.weights";

class WeightsDigest {
public:
    // Copies `size` bytes from byte `start` of a tensor's data.
    using Reader = std::function<void(uint64_t start, uint64_t size, void * to)>;

    // Names of the weights, some of which a model has, in the order in which they are added.
    static std::vector<std::string> names(int first_layer, int last_layer);

    void        add(const std::string & name, int type, const int64_t ne[4], uint64_t size, const Reader & read);
    std::string hex() { return any_ ? sha_.hex() : ""; } // "" if none were added; do not use the object afterwards

private:
    Sha256 sha_;
    bool   any_ = false;
};

// The digest of a model's file for bases whose first and last coded layers are these, or "" if it has none of the
// weights. Throws as model_content.
std::string model_weights(const std::string & path, int first_layer, int last_layer);

// All files of a model in order. `path` is the first one, opened as `first`. Throws Invalid.
std::vector<std::string> model_files(const std::string & path, const gguf_context * first);

// The name of a model's file without `.gguf` and without the number of a split model's file.
std::string model_stem(const std::string & model);

bool ends_with(const std::string & text, const std::string & tail);

} // namespace subkv
