// adapt_text.h: how bases follow the text, as users write it: `none`, `v`, `kv,length=512,gain=0.9`.
#pragma once

#include "chunked.h"

#include <string>

namespace subkv {

// Names that `text` leaves out get their defaults. Throws Invalid.
ChunkRequest parse_adapt(const std::string & text);

} // namespace subkv
