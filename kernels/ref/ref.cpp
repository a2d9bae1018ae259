// ref.cpp: the table of the reference version.
#include "rows.h"

namespace subkv {

const Ops & ops_ref() {
    static const Ops table = { "ref",
                               ref::encode,
                               ref::dequantize,
                               ref::project,
                               ref::reconstruct,
                               ref::attend,
                               ref::attend_exact,
                               ref::moment,
                               ref::to_half,
                               ref::pack_recent,
                               ref::unpack_recent,
                               0.0f };
    return table;
}

} // namespace subkv
