// usage.cpp: see llama-subkv-programs.h. Part of libllama.
#include "llama-subkv-programs.h"

#include "llama-subkv-library.h"
#include "llama-subkv-memory.h"
#include "numbers.h"

#include "llama-context.h"
#include "llama-memory-recurrent.h"

#include <algorithm>
#include <mutex>
#include <sstream>

namespace {

std::mutex            g_mutex; // guards the following
llama_subkv_usage     g_usage;
const llama_context * g_ctx = nullptr; // of g_usage

// The usage of a coded cache, from libsubkv.
void add_coded(llama_context * ctx, llama_subkv_usage & usage) {
    std::string  why;
    const auto * library = llama_subkv_library(false, why);
    subkv_stats  stats   = {};
    if (!library || !library->stats(ctx, &stats)) {
        return;
    }
    for (const char * kernel : { stats.n_layer_device < stats.n_layer_coded ? library->kernel_name() : nullptr,
                                 stats.n_layer_device > 0 ? library->device_kernel_name() : nullptr }) {
        usage.kernel += (!usage.kernel.empty() && kernel ? " and " : "") + std::string(kernel ? kernel : "");
    }
    usage.type      = "subkv";
    usage.bits      = stats.bpe;
    usage.bytes     = stats.bytes_kv + stats.bytes_bases;
    usage.bytes_f16 = stats.bytes_f16;
    usage.n_bad     = stats.n_zero_rows;
}

// A metric in the text format of Prometheus. Counters are named "_total".
void add_metric(std::ostringstream & out, const std::string & name, const char * help, double value) {
    const bool whole   = value == (double) (uint64_t) value;
    const bool counter = name.find("_total") != std::string::npos;
    out << "# HELP subkv:" << name << " " << help << "\n# TYPE subkv:" << name << (counter ? " counter" : " gauge")
        << "\nsubkv:" << name << " " << (whole ? std::to_string((uint64_t) value) : subkv::decimals(value, 6)) << "\n";
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
    usage.n_cells    = (uint64_t) caches.base->get_size() * access::n_stream(*caches.base);
    const auto sizes = row_sizes(memory);
    usage.n_coded    = sizes.n_coded;
    usage.n_sliding  = sizes.n_sliding;
    usage.n_other    = sizes.n_other;
    usage.n_swa      = sizes.n_swa;
    if (coded(memory)) {
        add_coded(&ctx, usage);
        return usage;
    }
    uint64_t n_elements = 0;
    for (const auto * kv : caches.all()) {
        if (!kv) {
            continue;
        }
        for (const auto & layer : access::layers(*kv)) {
            add_rows(layer.k, access::hparams(*kv).n_embd_k_gqa(layer.il), usage.bytes, n_elements);
            usage.type = ggml_type_name(layer.k->type);
            if (layer.v) {
                add_rows(layer.v, access::hparams(*kv).n_embd_v_gqa(layer.il), usage.bytes, n_elements);
                usage.type += layer.v->type == layer.k->type ? "" : std::string("/") + ggml_type_name(layer.v->type);
            }
        }
    }
    usage.bits      = n_elements > 0 ? 8.0 * (double) usage.bytes / (double) n_elements : 0;
    usage.bytes_f16 = 2 * n_elements;
    return usage;
}

void llama_subkv_usage_set(llama_context * ctx) {
    auto usage = ctx ? llama_subkv::usage_of(*ctx) : llama_subkv_usage();
    if (ctx) {
        usage.n_vocab = (uint32_t) llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    }
    std::lock_guard<std::mutex> lock(g_mutex);
    g_ctx = ctx;
    if (ctx) {
        g_usage = usage;
    } else {
        g_usage.freed = true;
    }
}

void llama_subkv_usage_bad(const llama_context * ctx, uint64_t n_bad) {
    if (n_bad > 0) {
        std::lock_guard<std::mutex> lock(g_mutex);
        if (ctx == g_ctx) {
            g_usage.n_bad = std::max(g_usage.n_bad, n_bad);
        }
    }
}

llama_subkv_usage llama_subkv_usage_get(void) {
    std::lock_guard<std::mutex> lock(g_mutex);
    return g_usage;
}

std::string llama_subkv_usage_metrics(void) {
    const auto         usage = llama_subkv_usage_get();
    std::ostringstream out   = subkv::plain_stream();
    const auto         add   = [&](const char * name, const char * help, auto value) {
        add_metric(out, name, help, (double) value);
    };
    add("kv_bytes", "Bytes of the K/V cache", usage.freed ? 0 : usage.bytes);
    add("kv_f16_bytes", "Size of the same cache in f16, in bytes", usage.freed ? 0 : usage.bytes_f16);
    add("kv_bits_per_element", "Bits per K/V element", usage.bits);
    add("kv_zero_rows_total", "Rows of K and V of a head that were not finite: attention to them is NaN", usage.n_bad);
    subkv_store_stats stats;
    if (llama_subkv_store_stats(stats)) {
        add("store_hits_total", "Stored prompts read", stats.n_hits);
        add("store_tokens_restored_total", "Tokens restored instead of evaluated", stats.n_restored);
        add("store_prompts_written_total", "Prompts stored", stats.n_written);
        add("store_prompts_dropped_total", "Prompts dropped: full queue or too large", stats.n_dropped);
        add("store_prompts_damaged_total", "Damaged stored prompts", stats.n_damaged);
        add("store_failures_total", "Failed disk operations", stats.n_failures);
        add("store_entries", "Prompts in the folder at the last scan", stats.n_entries);
        add("store_bytes", "Bytes of the folder's files at the last scan", stats.n_bytes);
    }
    return out.str();
}
