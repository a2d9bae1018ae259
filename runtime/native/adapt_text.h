// adapt_text.h: how bases follow the text, as users write it: `none`, `v`, `kv,length=512,gain=0.9`.
#pragma once

#include "subkv.h"

#include <string>

namespace subkv {

// Writes `adapt` and `adaptive` of `params`: names that `text` leaves out get their defaults. Throws Invalid.
void parse_adapt(const std::string & text, subkv_cache_params & params);

} // namespace subkv
