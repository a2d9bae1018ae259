// basis_requests.cpp: instead of adaptive bases, in a build with -DSUBKV_ADAPT=OFF.
#include "basis_source.h"
#include "error.h"
#include "layout_keys.h"

#include <cstdlib>
#include <string>

namespace subkv {

static MakeBases static_bases(const std::string & text, const char * key) {
    if (!text.empty() && text != "none") {
        refuse(key, "none, since this build has no adaptive bases (-DSUBKV_ADAPT=OFF)", "'" + shortened(text) + "'");
    }
    return [](const Layout &, const Window &, const CacheDesc &) { return std::make_unique<BasisSource>(); };
}

MakeBases bases_of(const subkv_cache_params & params) {
    return static_bases(params.adapt ? params.adapt : "", "adapt");
}

MakeBases bases_of_environment(const Layout & layout) {
    const char * set = std::getenv("SUBKV_ADAPT");
    return set && *set ? static_bases(set, "SUBKV_ADAPT") : static_bases(layout.adapt, "subkv.adapt");
}

} // namespace subkv
