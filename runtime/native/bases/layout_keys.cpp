// layout_keys.cpp: opens an untrusted file and reads its typed keys (layout_keys.h).
#include "layout_keys.h"

#include "printable.h"
#include "sha256.h"
#include "subkv/recent.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <unordered_set>
#include <utility>
#include <vector>

namespace subkv {

namespace {

// ggml's reader ignores tensor data that it does not load, so it accepts a file truncated there.
void check_data_section(const gguf_context * ctx, const std::string & path, uint64_t file_size) {
    const uint64_t data = gguf_get_data_offset(ctx);
    for (int64_t i = 0; i < gguf_get_n_tensors(ctx); ++i) {
        const uint64_t offset = gguf_get_tensor_offset(ctx, i);
        const uint64_t size   = gguf_get_tensor_size(ctx, i);
        if (data > file_size || offset > file_size - data || size > file_size - data - offset) {
            refuse(path, "a complete GGUF file",
                   "a truncated one: tensor '" + std::string(gguf_get_tensor_name(ctx, i)) + "' of " +
                       std::to_string(size) + " bytes ends beyond the file's " + std::to_string(file_size) + " bytes");
        }
    }
}

// Appends to a hash as a GGUF file stores it.
void add_number(Sha256 & sha, uint64_t value, size_t n_bytes) {
    uint8_t bytes[8];
    for (size_t i = 0; i < n_bytes; ++i) {
        bytes[i] = (uint8_t) (value >> (8 * i));
    }
    sha.update(bytes, n_bytes);
}

void add_text(Sha256 & sha, std::string_view text) {
    add_number(sha, text.size(), 8);
    sha.update(text.data(), text.size());
}

// Bytes of a value, or 0 for a string or an array.
size_t scalar_bytes(gguf_type type) {
    switch (type) {
        case GGUF_TYPE_UINT8:
        case GGUF_TYPE_INT8:
        case GGUF_TYPE_BOOL: return 1;
        case GGUF_TYPE_UINT16:
        case GGUF_TYPE_INT16: return 2;
        case GGUF_TYPE_UINT32:
        case GGUF_TYPE_INT32:
        case GGUF_TYPE_FLOAT32: return 4;
        case GGUF_TYPE_UINT64:
        case GGUF_TYPE_INT64:
        case GGUF_TYPE_FLOAT64: return 8;
        default: return 0;
    }
}

void add_value(Sha256 & sha, const gguf_context * ctx, int64_t i, gguf_type type) {
    if (const size_t n = scalar_bytes(type)) {
        sha.update(gguf_get_val_data(ctx, i), n);
    } else if (type == GGUF_TYPE_STRING) {
        add_text(sha, gguf_get_val_str(ctx, i));
    } else {
        const gguf_type of = gguf_get_arr_type(ctx, i);
        const size_t    n  = gguf_get_arr_n(ctx, i);
        add_number(sha, (uint64_t) of, 4);
        add_number(sha, n, 8);
        if (of != GGUF_TYPE_STRING) {
            sha.update(gguf_get_arr_data(ctx, i), n * scalar_bytes(of));
        }
        for (size_t j = 0; of == GGUF_TYPE_STRING && j < n; ++j) {
            add_text(sha, gguf_get_arr_str(ctx, i, j));
        }
    }
}

bool is_utf8(std::string_view s) {
    size_t   n    = 1;
    uint32_t code = 0;
    for (size_t i = 0; i < s.size() && n > 0; i += n) {
        n = utf8_at(s, i, code);
    }
    return n > 0;
}

} // namespace

gguf_context_ptr open_gguf(const char * path_or_null, ggml_context_ptr * tensors) {
    if (!path_or_null || !*path_or_null) {
        refuse("path", "the name of a GGUF file", "nothing");
    }
    const std::string path   = path_or_null;
    const auto        fspath = std::filesystem::u8path(path);
    std::error_code   ec;
    const auto        status = std::filesystem::status(fspath, ec);
    if (!std::filesystem::exists(status)) {
        if (ec && status.type() == std::filesystem::file_type::none) {
            throw Unavailable(path, "a GGUF file", ec.message());
        }
        refuse(path, "a GGUF file", "no such file");
    }
    if (!std::filesystem::is_regular_file(status)) {
        refuse(path, "a GGUF file",
               std::filesystem::is_directory(status) ? "a directory" : "something not a regular file");
    }
    const uint64_t size = std::filesystem::file_size(fspath, ec);
    if (ec) {
        throw Unavailable(path, "a readable GGUF file", ec.message());
    }
    std::ifstream file(fspath, std::ios::binary);
    if (!file) {
        throw Unavailable(path, "a readable GGUF file", std::strerror(errno));
    }
    // ggml reports these defects only in its log.
    uint8_t head[24] = {};
    errno            = 0;
    file.read((char *) head, sizeof(head));
    if (file.bad()) {
        throw Unavailable(path, "a readable GGUF file", std::strerror(errno != 0 ? errno : EIO));
    }
    if (file.gcount() < 4 || std::memcmp(head, "GGUF", 4) != 0) {
        refuse(path, "a GGUF file", file.gcount() == 0 ? "an empty file" : "other first bytes than 'GGUF'");
    }
    if (file.gcount() < (std::streamsize) sizeof(head)) {
        refuse(path, "a complete GGUF file", "one of " + std::to_string(size) + " bytes");
    }
    file.close();
    const uint32_t version = le32(head + 4);
    if (version < 2 || version > GGUF_VERSION) {
        refuse(path, "GGUF version 2.." + std::to_string(GGUF_VERSION), "version " + std::to_string(version));
    }
    ggml_context *   made   = nullptr;
    gguf_init_params params = { /*no_alloc =*/true, tensors ? &made : nullptr };
    errno                   = 0;
    gguf_context_ptr ctx(gguf_init_from_file(path.c_str(), params));
    const int        failed = errno;
    if (tensors) {
        tensors->reset(made);
    }
    if (!ctx && (failed == EMFILE || failed == ENFILE || failed == ENOMEM || failed == EIO || failed == EACCES)) {
        throw Unavailable(path, "a readable GGUF file", std::strerror(failed));
    }
    if (!ctx) {
        refuse(path, "complete and well-formed GGUF metadata", "a truncated or damaged header");
    }
    check_data_section(ctx.get(), path, size);
    return ctx;
}

std::string shortened(std::string s) {
    if (s.size() > 60) {
        s.resize(60);
        while (!s.empty() && ((uint8_t) s.back() & 0xc0) == 0x80) {
            s.pop_back();
        }
        if (!s.empty() && (uint8_t) s.back() >= 0xc0) {
            s.pop_back();
        }
        s += "…";
    }
    return s;
}

bool is_ours(const char * key) {
    return std::strncmp(key, "subkv.", 6) == 0;
}

bool is_basis(std::string_view key) {
    const std::string_view prefix = "subkv.blk.";
    const std::string_view suffix = ".basis";
    return key.size() > prefix.size() + suffix.size() && key.substr(0, prefix.size()) == prefix &&
           key.substr(key.size() - suffix.size()) == suffix;
}

std::string keys_digest(const gguf_context * ctx, const std::string & fingerprint) {
    std::vector<std::pair<std::string_view, int64_t>> ours;
    for (int64_t i = 0; i < gguf_get_n_kv(ctx); ++i) {
        const std::string_view key = gguf_get_key(ctx, i);
        if (is_ours(key.data()) && !is_basis(key) && key != KEYS_DIGEST) {
            ours.emplace_back(key, i);
        }
    }
    std::sort(ours.begin(), ours.end());
    Sha256 sha;
    for (const auto & [key, i] : ours) {
        const gguf_type type = gguf_get_kv_type(ctx, i);
        add_text(sha, key);
        add_number(sha, (uint64_t) type, 4);
        add_value(sha, ctx, i, type);
    }
    sha.update(fingerprint.data(), fingerprint.size());
    return sha.hex();
}

Keys::Keys(const gguf_context * ctx) : ctx(ctx) {
    // The C interface returns a key with an embedded NUL as a shorter key.
    std::unordered_set<std::string_view> seen;
    for (int64_t i = 0; i < gguf_get_n_kv(ctx); ++i) {
        const char * key = gguf_get_key(ctx, i);
        if (is_ours(key) && !seen.insert(key).second) {
            refuse(shortened(key), "the key once", "it twice");
        }
    }
}

uint32_t Keys::u32(const std::string & key, uint32_t lo, uint32_t hi) const {
    const uint32_t value = gguf_get_val_u32(ctx, find(key, GGUF_TYPE_UINT32));
    if (value < lo || value > hi) {
        refuse(key, std::to_string(lo) + ".." + std::to_string(hi), std::to_string(value));
    }
    return value;
}

uint64_t Keys::u64(const std::string & key) const {
    return gguf_get_val_u64(ctx, find(key, GGUF_TYPE_UINT64));
}

float Keys::positive_f32(const std::string & key) const {
    const float value = gguf_get_val_f32(ctx, find(key, GGUF_TYPE_FLOAT32));
    if (!std::isfinite(value) || value <= 0.0f) {
        refuse(key, "a positive finite number", number(value));
    }
    return value;
}

bool Keys::has(const std::string & key) const {
    return gguf_find_key(ctx, key.c_str()) >= 0;
}

uint32_t Keys::optional_u32(const std::string & key, uint32_t absent) const {
    return has(key) ? gguf_get_val_u32(ctx, find(key, GGUF_TYPE_UINT32)) : absent;
}

std::string Keys::optional_str(const std::string & key) const {
    return has(key) ? str(key) : std::string();
}

std::string_view Keys::view(const std::string & key) const {
    return gguf_get_val_str(ctx, find(key, GGUF_TYPE_STRING));
}

std::string Keys::str(const std::string & key) const {
    const std::string_view value = view(key);
    if (!is_utf8(value)) {
        refuse(key, "UTF-8 text", "other bytes");
    }
    return std::string(value);
}

std::string Keys::str(const std::string & key, std::initializer_list<const char *> allowed) const {
    std::string value = str(key);
    std::string names;
    for (const char * a : allowed) {
        if (value == a) {
            return value;
        }
        names += (names.empty() ? "'" : " or '") + std::string(a) + "'";
    }
    refuse(key, names, "'" + shortened(value) + "'");
}

std::string Keys::sha256(const std::string & key) const {
    std::string value = str(key);
    if (value.size() != 64 || value.find_first_not_of("0123456789abcdef") != std::string::npos) {
        refuse(key, "64 lower-case hex digits", "'" + shortened(value) + "'");
    }
    return value;
}

int64_t Keys::find(const std::string & key, gguf_type type) const {
    const int64_t id = gguf_find_key(ctx, key.c_str());
    if (id < 0) {
        refuse(key, std::string("a value of type ") + gguf_type_name(type), "no such key");
    }
    const gguf_type found = gguf_get_kv_type(ctx, id);
    if (found != type) {
        refuse(key, std::string("type ") + gguf_type_name(type), std::string("type ") + gguf_type_name(found));
    }
    return id;
}

int read_recent_bits(const Keys & keys, const std::string & key) {
    const uint32_t bits = keys.optional_u32(key, 16);
    if (bits != 16 && bits != RECENT_BITS) {
        refuse(key, std::to_string(RECENT_BITS) + " or 16", std::to_string(bits));
    }
    return (int) bits;
}

} // namespace subkv
