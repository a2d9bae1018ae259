#include "request.h"

#include "error.h"
#include "layout_keys.h"

#include <cerrno>
#include <cstdlib>

namespace subkv {

int32_t number_of(const char * name, int32_t most) {
    const char * text = std::getenv(name);
    if (!text || !*text) {
        return -1;
    }
    char * end        = nullptr;
    errno             = 0;
    const long number = std::strtol(text, &end, 10);
    if (*end || errno != 0 || number < 0 || number > most) {
        refuse(name, "a number from 0 to " + std::to_string(most), "'" + shortened(text) + "'");
    }
    return (int32_t) number;
}

int32_t resume_of_environment() {
    constexpr int32_t N_RESUME = 32; // as exact as an unbroken window (docs/limits.md#edits)
    const int32_t     n        = number_of("SUBKV_RESUME", MAX_RECENT);
    return n < 0 ? N_RESUME : n;
}

bool moved_of_environment() {
    return number_of("SUBKV_STORE_MOVED", 1) > 0;
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
