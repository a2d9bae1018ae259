// process_models.h: the model files that this process has open, which a backend is not told.
#pragma once

#include "find_bases.h"

#include <vector>

namespace subkv::plugin {

// Models that this process has opened, mapped or been given as arguments since the first call, and for which bases can be
// derived. The bases belong to a graph only if its weights are those of the file.
std::vector<StoredBases> process_models();

} // namespace subkv::plugin
