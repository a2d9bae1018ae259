// llama-subkv-usage.cpp: see llama-subkv-usage.h. Part of libllama.
#include "llama-subkv-usage.h"

#include "llama-subkv-library.h"
#include "llama-subkv-store.h"
#include "llama-subkv.h"
#include "subkv.h"

#include "llama-context.h"
#include "llama-memory-recurrent.h"

#include <mutex>
#include <sstream>

namespace {

struct held_usage {
    std::mutex        mutex;
    llama_subkv_usage usage;
};

held_usage & held() {
    static held_usage one;
    return one;
}

template <typename F> F function_of(const char * name) { // in libsubkv, which is loaded if there are coefficients
    std::string why;
    return (F) llama_subkv_find(name, why);
}

// The usage of a coded cache, from libsubkv.
void add_coded(llama_context * ctx, llama_subkv_usage & usage) {
    const auto  stats_of = function_of<decltype(&subkv_get_stats)>("subkv_get_stats");
    const auto  cpu      = function_of<decltype(&subkv_kernel_name)>("subkv_kernel_name");
    const auto  device   = function_of<decltype(&subkv_device_kernel_name)>("subkv_device_kernel_name");
    subkv_stats stats    = {};
    if (!stats_of || !cpu || !device || !stats_of(ctx, &stats)) {
        return;
    }
    for (const char * kernel : { stats.n_layer_device < stats.n_layer_coded ? cpu() : nullptr,
                                 stats.n_layer_device > 0 ? device() : nullptr }) {
        usage.kernel += (!usage.kernel.empty() && kernel ? " and " : "") + std::string(kernel ? kernel : "");
    }
    usage.type      = "subkv";
    usage.bits      = stats.bpe;
    usage.bytes     = stats.bytes_codes + stats.bytes_window + stats.bytes_chunks + stats.bytes_stock;
    usage.bytes_f16 = stats.bytes_f16;
}

void line(std::ostringstream & out, const char * name, const char * kind, const char * what, double value) {
    const bool whole = value == (double) (uint64_t) value;
    out << "# HELP subkv:" << name << " " << what << "\n# TYPE subkv:" << name << " " << kind << "\nsubkv:" << name
        << " ";
    out << (whole ? std::to_string((uint64_t) value) : std::to_string(value)) << "\n";
}

} // namespace

static void add_rows(const ggml_tensor * rows, int64_t n_embd, uint64_t & n_bytes, uint64_t & n_elements) {
    n_bytes += ggml_nbytes(rows);
    n_elements += (uint64_t) (rows->ne[1] * rows->ne[2] * n_embd);
}

llama_subkv_usage llama_subkv::usage_of(llama_context & ctx) {
    llama_subkv_usage usage;
    auto *            memory = ctx.get_memory();
    const auto        caches = caches_of(memory);
    if (!caches.base) {
        if (memory && !dynamic_cast<llama_memory_recurrent *>(memory)) {
            usage.type    = "other";
            usage.n_cells = llama_n_ctx(&ctx);
            for (const auto & [buft, size] : memory->memory_breakdown()) {
                usage.bytes += size;
            }
        }
        return usage;
    }
    usage.n_cells = (uint64_t) caches.base->get_size() * caches.base->n_stream;
    if (coded(memory)) {
        add_coded(&ctx, usage);
        return usage;
    }
    uint64_t n_elements = 0;
    for (const auto * kv : caches.all()) {
        if (!kv) {
            continue;
        }
        for (const auto & layer : kv->layers) {
            add_rows(layer.k, kv->hparams.n_embd_k_gqa(layer.il), usage.bytes, n_elements);
            usage.type = ggml_type_name(layer.k->type);
            if (layer.v) {
                add_rows(layer.v, kv->hparams.n_embd_v_gqa(layer.il), usage.bytes, n_elements);
                usage.type += layer.v->type == layer.k->type ? "" : std::string("/") + ggml_type_name(layer.v->type);
            }
        }
    }
    usage.bits      = n_elements > 0 ? 8.0 * (double) usage.bytes / (double) n_elements : 0;
    usage.bytes_f16 = 2 * n_elements;
    return usage;
}

void llama_subkv_usage_set(llama_context * ctx) {
    const auto                  usage = ctx ? llama_subkv::usage_of(*ctx) : llama_subkv_usage();
    auto &                      to    = held();
    std::lock_guard<std::mutex> lock(to.mutex);
    if (ctx) {
        to.usage = usage;
    } else {
        to.usage.freed = true;
    }
}

llama_subkv_usage llama_subkv_usage_get(void) {
    auto &                      from = held();
    std::lock_guard<std::mutex> lock(from.mutex);
    return from.usage;
}

std::string llama_subkv_usage_metrics(void) {
    const auto         usage = llama_subkv_usage_get();
    std::ostringstream out;
    const auto         gauge   = [&](auto... of) { line(out, of...); };
    const auto         counter = [&](const char * name, const char * what, uint64_t value) {
        line(out, name, "counter", what, (double) value);
    };
    gauge("kv_bytes", "gauge", "Bytes of the K/V cache", usage.freed ? 0.0 : (double) usage.bytes);
    gauge("kv_f16_bytes", "gauge", "Size of the same cache in f16, in bytes",
          usage.freed ? 0.0 : (double) usage.bytes_f16);
    gauge("kv_bits_per_element", "gauge", "Bits per K/V element", usage.bits);
    subkv_store_stats stats;
    if (llama_subkv_store_stats(stats)) {
        counter("store_hits_total", "Stored prompts read", stats.n_hits);
        counter("store_tokens_restored_total", "Tokens restored instead of evaluated", stats.n_restored);
        counter("store_prompts_written_total", "Prompts stored", stats.n_written);
        counter("store_prompts_dropped_total", "Prompts dropped: full queue or too large", stats.n_dropped);
        counter("store_prompts_damaged_total", "Damaged stored prompts", stats.n_damaged);
        counter("store_failures_total", "Failed disk operations", stats.n_failures);
        gauge("store_entries", "gauge", "Prompts in the folder at the last scan", (double) stats.n_entries);
        gauge("store_bytes", "gauge", "Bytes of the folder's files at the last scan", (double) stats.n_bytes);
    }
    return out.str();
}
