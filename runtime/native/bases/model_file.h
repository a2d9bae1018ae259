// model_file.h: identifies a model by its files, without loading it (converter/FORMAT.md §1.1).
#pragma once

#include <string>

namespace subkv {

// FORMAT.md §1.1: 64 lower-case hex digits. Reads metadata, tensor tables and samples of the tensors. `path`: the first
// file of a split model. Throws Invalid for another file of the split, or if a file is missing.
std::string model_content(const std::string & path);

// The name of a model's file without `.gguf` and without the number of a split model's file.
std::string model_stem(const std::string & model);

bool ends_with(const std::string & text, const std::string & tail);

} // namespace subkv
