// basis_requests.cpp: instead of adaptive bases, in a build with -DSUBKV_ADAPT=OFF.
#include "basis_source.h"
#include "error.h"
#include "layout_keys.h"

#include <string>

namespace subkv {

MakeBases bases_of(const std::string & adapt, const char * key) {
    if (adapt != "none") {
        refuse(key, "none, since this build has no adaptive bases (-DSUBKV_ADAPT=OFF)", "'" + shortened(adapt) + "'");
    }
    return [](const Layout &, const Window &, const CacheDesc &) { return std::make_unique<BasisSource>(); };
}

} // namespace subkv
