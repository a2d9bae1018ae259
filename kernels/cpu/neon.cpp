// neon.cpp: the NEON table.
#include "versions.h"

#if defined(SUBKV_ARM64)

#    include "attend_tiles.h"
#    include "encode.h"
#    include "exact_keys.h"
#    include "linear.h"
#    include "neon.h"
#    include "recent_rows.h"

namespace subkv {

constexpr auto NEON_TO_HALF = cpu::to_half<neon::Lanes>;

const Ops ops_neon = { "neon",
                       cpu::encode<neon::Lanes>,
                       cpu::dequantize<neon::Lanes>,
                       cpu::project<neon::Lanes>,
                       cpu::reconstruct<neon::Lanes>,
                       neon::attend,
                       cpu::attend_exact<neon::Lanes>,
                       cpu::moment<neon::Lanes>,
                       NEON_TO_HALF,
                       cpu::pack_recent<NEON_TO_HALF>,
                       cpu::unpack_recent<NEON_TO_HALF>,
                       1.0f / cpu::LARGEST };

} // namespace subkv

#endif
