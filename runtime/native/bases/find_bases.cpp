// find_bases.cpp: see find_bases.h.
#include "find_bases.h"

#include "derive.h"
#include "error.h"
#include "layout_keys.h"
#include "log_line.h"
#include "model_file.h"
#include "owner.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <new>
#include <utility>
#include <vector>

#if !defined(_WIN32)
#    include <pwd.h>
#    include <unistd.h>
#endif

namespace subkv {

namespace {

namespace fs = std::filesystem;

constexpr size_t       DIGITS      = 12; // of a content hash, in a file's name
constexpr size_t       MAX_NAME    = 100;
constexpr const char * BESIDE      = ".subkv-sidecar.gguf";
constexpr const char * CONTENT_KEY = "subkv.base.content";

constexpr const char * STORED = ".gguf"; // end of names in the store
// The ending of bases from the weights that older builds stored, and which are ignored.
constexpr const char * OF_OLDER_BUILDS = ".weights.gguf";

std::string utf8(const fs::path & path) {
    return path.u8string();
}

std::string home() {
#if defined(_WIN32)
    const char * folder = std::getenv("USERPROFILE");
    return folder ? folder : "";
#else
    if (const char * folder = std::getenv("HOME")) {
        return folder;
    }
    const passwd * user = getpwuid(getuid());
    return user && user->pw_dir ? user->pw_dir : "";
#endif
}

// Throws Invalid without a home folder.
fs::path store_folder() {
    const char * base   = std::getenv("XDG_CACHE_HOME");
    auto         folder = fs::u8path(base ? base : "");
    if (!folder.is_absolute()) {
        folder = fs::u8path(home());
        if (folder.empty()) {
            refuse("XDG_CACHE_HOME", "an absolute path, as there is no home folder",
                   base && *base ? "'" + std::string(base) + "'" : "nothing");
        }
        folder /= ".cache";
    }
    return folder / "subkv" / "sidecars";
}

// Throws Unavailable if the system cannot tell.
bool file_exists(const fs::path & path) {
    std::error_code error;
    const auto      status = fs::status(path, error);
    if (!fs::status_known(status) && error != std::errc::filename_too_long) {
        throw Unavailable(utf8(path), "a readable path", error.message());
    }
    return fs::status_known(status) && fs::exists(status);
}

// The files of a folder whose names end with `ending`, by name, or none if there is no such folder. Throws Unavailable.
std::vector<fs::path> files_of(const fs::path & folder, const std::string & ending) {
    std::vector<fs::path> files;
    std::error_code       error;
    if (!file_exists(folder) || !fs::is_directory(folder, error)) {
        return files;
    }
    auto entries = fs::directory_iterator(folder, error);
    for (const auto end = fs::directory_iterator(); !error && entries != end; entries.increment(error)) {
        if (ends_with(utf8(entries->path().filename()), ending)) {
            files.push_back(entries->path());
        }
    }
    if (error) {
        throw Unavailable(utf8(folder), "a readable folder", error.message());
    }
    std::sort(files.begin(), files.end());
    return files;
}

// Refuses a file of bases that was found, not named, if another user may have written it. The owner of `model` is
// trusted, too.
void check_owner(const std::string & path, const std::string & model) {
    const std::string others = other_writers(path, Writers::GROUP, model);
    if (!others.empty()) {
        refuse(path, "a file that only this user can write to", others);
    }
}

// The existing file of this content in the store, or else one with the model's name.
fs::path stored_path(const std::string & model, const std::string & content) {
    const auto        folder = store_folder();
    const std::string tail   = "-" + content.substr(0, DIGITS) + STORED;
    const auto        files  = files_of(folder, tail);
    if (!files.empty()) {
        return files.front();
    }
    std::string name = model_stem(model);
    for (char & c : name) {
        const bool plain = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
        c                = plain || std::strchr("_.+-", c) ? c : '_';
    }
    return folder / fs::u8path(name.substr(0, MAX_NAME) + tail);
}

fs::path named_sidecar(const std::string & model) {
    return fs::u8path(model).parent_path() / fs::u8path(model_stem(model) + BESIDE);
}

std::string content_of_sidecar(const std::string & path) {
    const gguf_context_ptr file = open_gguf(path.c_str());
    return Keys(file.get()).optional_str(CONTENT_KEY);
}

// Has another version of subkv derived these bases from the weights? The arguments are keys of FORMAT.md §1.
bool is_outdated(const std::string & generator, int64_t version, const std::string & calibration_text,
                 uint64_t calibration_tokens) {
    const bool weights = calibration_text == "weights" && calibration_tokens == 0; // a text may have this name
    return weights && (generator != DERIVED_GENERATOR || version != FORMAT_VERSION);
}

} // namespace

std::string shell_word(const std::string & word) {
    const auto plain = [](char c) {
        return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
               (c != '\0' && std::strchr("@%+=:,./-_", c));
    };
    if (!word.empty() && std::all_of(word.begin(), word.end(), plain)) {
        return word;
    }
    std::string out = "'";
    for (const char c : word) {
        out += c == '\'' ? std::string("'\"'\"'") : std::string(1, c);
    }
    return out + "'";
}

namespace {

std::string day_of(const fs::path & path) {
    using namespace std::chrono;
    std::error_code error;
    const auto      written = fs::last_write_time(path, error);
    const auto      age     = error ? nanoseconds(0) : nanoseconds(fs::file_time_type::clock::now() - written);
    const auto      time    = system_clock::to_time_t(system_clock::now() - duration_cast<system_clock::duration>(age));
    std::tm         local   = {};
#if defined(_WIN32)
    localtime_s(&local, &time);
#else
    localtime_r(&time, &local);
#endif
    char text[32];
    return std::string(text, std::strftime(text, sizeof(text), "%Y-%m-%d", &local));
}

std::string words_of(const FoundBases & found) {
    if (found.source == SUBKV_BASES_NAMED || found.source == SUBKV_BASES_EMBEDDED) {
        return words_of_file(found.path, *found.layout);
    }
    const uint64_t    n = found.layout->calibration_tokens;
    const std::string origin =
        n > 0 ? "calibrated on " + std::to_string(n) + " tokens" : "derived without a calibration";
    return origin + " for this model, " + day_of(fs::u8path(found.path)) + ", " + size_of(*found.layout) + " (" +
           found.path + ")";
}

// The search for one model. Steps set `found` and return true if a place has bases, usable or not.
class Search {
public:
    explicit Search(const BasesSearch & asked) : asked(asked), model(asked.model) {}

    FoundBases run() {
        try {
            if (!asked.named.empty()) {
                load(SUBKV_BASES_NAMED, asked.named);
            } else if (model.empty() || !(embedded() || beside() || stored() || derived())) {
                const Error none = { SUBKV_ERROR_INVALID, "",
                                     "no bases for this model; `subkv convert " +
                                         (model.empty() ? "MODEL" : shell_word(model)) + "` derives them" };
                found.error      = found.error.reason.empty() ? none : found.error;
            }
        } catch (const ModelError &) {
            throw;
        } catch (const Invalid & e) {
            found.error = e.error;
        } catch (const std::bad_alloc &) {
            found.error = { SUBKV_ERROR_UNAVAILABLE, found.path, "not enough memory to read it" };
        }
        return std::move(found);
    }

private:
    template <typename F> auto of_model(F use) {
        try {
            return use();
        } catch (const Invalid & e) {
            throw ModelError(e.error);
        }
    }

    const std::string & content() {
        if (known_content.empty()) {
            known_content = of_model([&] { return model_content(model); });
        }
        return known_content;
    }

    void load(int32_t source, const std::string & path) {
        found.source = source;
        found.path   = path;
        if (source == SUBKV_BASES_NAMED && !layout_present(path.c_str())) {
            throw Invalid("expected subkv.* keys (a converted model or a sidecar), found none in " + path);
        }
        if (source > SUBKV_BASES_EMBEDDED) {
            check_owner(path, source == SUBKV_BASES_BESIDE ? model : "");
            const std::string of = content_of_sidecar(path);
            if (of != content()) {
                refuse(path, "a sidecar of this model",
                       of.empty() ? "one that does not say which model it belongs to" : "one of another model");
            }
        }
        found.layout         = load_layout(path.c_str(), asked.budget);
        found.budget_default = asked.budget == 0.0f ? found.layout->budget : load_layout(path.c_str())->budget;
        found.words          = words_of(found);
    }

    bool embedded() {
        if (!of_model([&] { return layout_present(model.c_str()); })) {
            return false;
        }
        load(SUBKV_BASES_EMBEDDED, model);
        return true;
    }

    // The sidecar of the model's name, which must be the model's, or else one of the same content, for a renamed model.
    bool beside() {
        if (!asked.sidecar) {
            return false;
        }
        const auto path = named_sidecar(model);
        found.source    = SUBKV_BASES_BESIDE; // of an error
        found.path      = utf8(path);
        if (file_exists(path)) {
            load(SUBKV_BASES_BESIDE, utf8(path));
            return true;
        }
        found.source = SUBKV_BASES_NONE;
        found.path.clear();
        const auto            folder = path.parent_path();
        std::vector<fs::path> others;
        try {
            others = files_of(folder.empty() ? fs::path(".") : folder, BESIDE);
        } catch (const Unavailable &) { // may be entered, but not listed
            return false;
        }
        for (const auto & file : others) {
            const std::string name = utf8(folder / file.filename());
            try {
                if (content_of_sidecar(name) != content()) {
                    continue;
                }
            } catch (const ModelError &) {
                throw;
            } catch (const Invalid &) { // of which model it is, cannot be told
                continue;
            }
            load(SUBKV_BASES_BESIDE, name);
            return true;
        }
        return false;
    }

    bool stored() {
        if (!asked.sidecar) {
            return false;
        }
        fs::path path;
        try {
            path = file_exists(store_folder()) ? stored_path(model, content()) : "";
        } catch (const ModelError &) {
            throw;
        } catch (const Invalid & e) { // the home folder is missing or not this user's, so it has no files of this user
            no_store = e.error.sentence();
        }
        if (path.empty()) {
            return false;
        }
        found.source = SUBKV_BASES_STORED; // of an error
        found.path   = utf8(path);
        if (file_exists(path)) {
            load(SUBKV_BASES_STORED, found.path);
            return true;
        }
        found.source = SUBKV_BASES_NONE;
        found.path.clear();
        return false;
    }

    // From the weights, in memory.
    bool derived() {
        if (!asked.derive) {
            return false;
        }
        try {
            known_content        = known_content.empty() ? model_content(model) : known_content;
            const auto layout    = derive_layout(model, known_content, asked.budget, asked.slides);
            found.budget_default = derived_budget(model, known_content, asked.slides);
            found.source         = SUBKV_BASES_WEIGHTS;
            found.layout         = layout;
            found.words          = "from the weights, " + size_of(*layout) +
                                   (layout->budget == found.budget_default ? ", near q8_0's quality" : "") +
                                   (no_store.empty() ? "" : "; no stored bases: " + no_store);
            return true;
        } catch (const Invalid & e) {
            found.error = e.error;
            if (e.error.kind == SUBKV_ERROR_UNSUPPORTED) {
                return false;
            }
            if (e.error.kind != SUBKV_ERROR_BUDGET) {
                found.error.reason = "no bases for this model, and none can be derived from its weights: " +
                                     (e.error.key.empty() ? "" : e.error.key + ": ") + e.error.reason;
                found.error.key.clear();
                return false;
            }
        }
        found.source = SUBKV_BASES_WEIGHTS;
        return true;
    }

    const BasesSearch & asked;
    const std::string & model;
    std::string         known_content;
    std::string         no_store; // why the cache folder cannot be read, or "" if it can be
    FoundBases          found;
};

} // namespace

std::string size_of(const Layout & layout) {
    const double kld = layout.predicted, of_q8_0 = layout.predicted_q8_0;
    std::string  text =
        decimals(layout.bpe, 2) + " bits per element at " + std::to_string(layout.bpe_context) + " tokens";
    if (kld > 0.0 && of_q8_0 > 0.0) {
        text += ", predicted KLD " + number(kld, 2) + ", q8_0's " + number(of_q8_0, 2);
    }
    return text;
}

std::string words_of_file(const std::string & path, const Layout & layout) {
    const bool old = is_outdated(layout.generator, layout.version, layout.calibration_text, layout.calibration_tokens);
    return "of " + path + ", " + size_of(layout) + (old ? ", derived by another version of subkv" : "");
}

FoundBases find_bases(const BasesSearch & search) {
    return Search(search).run();
}

StoredBases bases_of_weights(const std::string & path) {
    const gguf_context_ptr file = open_gguf(path.c_str());
    const Keys             keys(file.get());
    const bool             named = !keys.optional_str(WEIGHTS_KEY).empty();
    StoredBases            found{ path, named ? keys.sha256(WEIGHTS_KEY) : "", {}, false };
    for (const auto & layer : parse_layout(keys.view("subkv.layout"), MAX_LAYERS)) {
        found.layers.push_back(layer.il);
    }
    return found;
}

std::vector<StoredBases> stored_bases() {
    std::vector<StoredBases> found;
    for (const auto & path : files_of(store_folder(), STORED)) {
        if (ends_with(utf8(path), OF_OLDER_BUILDS)) {
            continue;
        }
        const std::string others = other_writers(utf8(path), Writers::GROUP);
        if (!others.empty()) {
            log_line(utf8(path) + ": expected a file that only this user can write to, found " + others +
                     "; it is not used");
            continue;
        }
        try {
            StoredBases bases = bases_of_weights(utf8(path));
            if (!bases.weights.empty()) {
                found.push_back(std::move(bases));
            }
        } catch (const Invalid &) { // of which model it is, cannot be told
        }
    }
    return found;
}

StoredBases derivable_bases(const std::string & model) {
    StoredBases found{ model, "", derivable_layers(model), true };
    found.weights = model_weights(model, found.first_layer(), found.last_layer());
    return found;
}

} // namespace subkv

using namespace subkv;

extern "C" const char * subkv_sidecar_path(const char * model, const char * content, int32_t source) {
    return guarded<const char *>("XDG_CACHE_HOME", nullptr, [&] {
        thread_local std::string path;
        not_null(model, "subkv_sidecar_path: model");
        if (source != SUBKV_BASES_BESIDE && source != SUBKV_BASES_STORED) {
            fail("subkv_sidecar_path: source: expected %d or %d, found %d", SUBKV_BASES_BESIDE, SUBKV_BASES_STORED,
                 (int) source);
        }
        if (source == SUBKV_BASES_BESIDE) {
            path = utf8(named_sidecar(model));
            return path.c_str();
        }
        const std::string digits = &not_null(content, "subkv_sidecar_path: content");
        if (digits.size() != 64 || digits.find_first_not_of("0123456789abcdef") != std::string::npos) {
            fail("subkv_sidecar_path: content: expected 64 hex digits, found '%s'", shortened(digits).c_str());
        }
        path = utf8(stored_path(model, digits));
        return path.c_str();
    });
}

extern "C" const char * subkv_sidecar_folder(void) {
    return guarded<const char *>("XDG_CACHE_HOME", nullptr, [] {
        thread_local std::string path;
        path = utf8(store_folder());
        return path.c_str();
    });
}
