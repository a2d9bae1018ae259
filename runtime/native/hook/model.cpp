// model.cpp: where a loaded model came from. Part of libllama.
#include "llama-subkv-model.h"

#include "llama-model-loader.h"
#include "llama-model.h"

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

// Sources by the address of their model. Every model is loaded by one function, which replaces the entry of an earlier
// model at the address.
static std::mutex                                               sources_mutex;
static std::map<const llama_model *, llama_subkv::model_source> sources;

void llama_subkv::record_source(const llama_model & model, const std::string & path,
                                const llama_model_loader & loader) {
    std::map<std::string, std::string> sorted;
    for (const auto & [key, value] : loader.kv_overrides) {
        const bool text = value.tag == LLAMA_KV_OVERRIDE_TYPE_STR;
        sorted[key] =
            std::to_string((int) value.tag) + " " +
            (text ? std::string(value.val_str, strnlen(value.val_str, sizeof(value.val_str))) :
                    std::to_string(value.tag == LLAMA_KV_OVERRIDE_TYPE_BOOL ? value.val_bool : value.val_i64));
    }
    model_source source = { path, "", {} };
    for (const auto & file : loader.files) {
        subkv::FileStamp stamp;
        if (!subkv::stamp_of(file->file_id(), stamp)) {
            source.files.clear();
            break;
        }
        source.files.push_back(stamp);
    }
    for (const auto & [key, value] : sorted) {
        source.overrides += key + " " + value + "\n";
    }
    const std::lock_guard lock(sources_mutex);
    sources.insert_or_assign(&model, std::move(source));
}

const llama_subkv::model_source & llama_subkv::source_of(const llama_model & model) {
    static const model_source none;
    const std::lock_guard     lock(sources_mutex);
    const auto                found = sources.find(&model);
    return found == sources.end() ? none : found->second;
}
