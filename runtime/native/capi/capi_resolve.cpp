// capi_resolve.cpp: subkv_resolve.
#include "capi.h"
#include "ggml.h"
#include "resolve.h"

using namespace subkv;

namespace {

std::string text(const char * given) {
    return given ? given : "";
}

CacheRequest asked(const subkv_cache_request & given) {
    CacheRequest out;
    out.model      = text(given.model);
    out.type       = text(given.type);
    out.type_k     = text(given.type_k);
    out.type_v     = text(given.type_v);
    out.bases      = text(given.bases);
    out.bits       = given.bits;
    out.memory     = given.memory;
    out.sidecar    = given.sidecar;
    out.derive     = given.derive;
    out.slides     = given.slides ? Slides(given.slides) : nullptr;
    out.n_sink     = given.n_sink;
    out.n_recent   = given.n_recent;
    out.n_rollback = given.n_rollback;
    out.adapt      = text(given.adapt);
    return out;
}

CacheChoice chosen(const subkv_cache_request & given) {
    return given.model ? resolve(asked(given)) : choose_type(asked(given));
}

int32_t ggml_type_of(const std::string & name) {
    for (int32_t type = 0; type < GGML_TYPE_COUNT; ++type) {
        const char * known = ggml_type_name((ggml_type) type);
        if (known && name == known) {
            return type;
        }
    }
    return GGML_TYPE_F16; // of a coded cache
}

} // namespace

extern "C" bool subkv_resolve(const subkv_cache_request * request, subkv_cache_choice * out) {
    return guarded("model", [&] {
        thread_local CacheChoice choice;
        subkv_cache_choice &     given = not_null(out, "subkv_resolve: out");
        choice                         = chosen(not_null(request, "subkv_resolve: request"));
        given                          = { choice.type_k.c_str(),
                                           choice.type_v.c_str(),
                                           ggml_type_of(choice.type_k),
                                           ggml_type_of(choice.type_v),
                                           choice.automatic,
                                           choice.source,
                                           choice.path.c_str(),
                                           choice.layout ? new_layout(choice.layout) : nullptr,
                                           choice.bits,
                                           choice.bits_default,
                                           choice.n_sink,
                                           choice.n_recent,
                                           choice.n_rollback,
                                           choice.adapt.c_str(),
                                           choice.words.c_str(),
                                           choice.gain.c_str() };
        choice.layout.reset(); // the caller has it
    });
}
