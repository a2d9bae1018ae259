#include "request.h"

#include "error.h"
#include "variables.h"

namespace subkv {

int32_t resume_of_environment() {
    constexpr int32_t N_RESUME = 32; // as exact as an unbroken window (docs/limits.md#edits)
    return (int32_t) number_of("SUBKV_RESUME", 0, MAX_RECENT, N_RESUME);
}

bool defer_of_environment() {
    return number_of("SUBKV_DEFER", 0, 1, 1) == 1;
}

CacheRequest::CacheRequest(std::shared_ptr<const Layout> layout, const subkv_cache_params & params) :
    layout(std::move(layout)), n_sink(params.n_sink), n_recent(params.n_recent), n_rollback(params.n_rollback),
    make_bases(bases_of(params)) {
    if (n_sink > MAX_SINK || n_recent > MAX_RECENT || n_rollback > MAX_RECENT) {
        fail("n_sink, n_recent, n_rollback: at most %d, %d, %d expected, %d, %d, %d found", MAX_SINK, MAX_RECENT,
             MAX_RECENT, n_sink, n_recent, n_rollback);
    }
    // Sensitivities include errors beyond the window only, so these bases may have any error inside it.
    const Layout & l = *this->layout;
    if ((l.basis_k == "kld-aware" || l.basis_v == "kld-aware") && n_recent >= 0 && n_recent < l.n_recent) {
        fail(
            "n_recent: at least %d expected, for which the kld-aware bases were made, %d found; convert the model with "
            "--n-recent %d",
            l.n_recent, n_recent, n_recent);
    }
    if (ops_error()) {
        fail("%s", ops_error());
    }
}

} // namespace subkv
