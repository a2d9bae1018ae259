// layout_keys.h: reads a GGUF and its subkv.* keys, and rejects wrong types and values outside their limits.
#pragma once

#include "error.h"
#include "ggml-cpp.h"
#include "numbers.h"

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

namespace subkv {

constexpr const char * KEYS_DIGEST = "subkv.keys.sha256";

// Opens a complete file without reading its tensors, whose shapes `tensors` receives in order. Throws Invalid.
gguf_context_ptr open_gguf(const char * path_or_null, ggml_context_ptr * tensors = nullptr);

inline uint32_t le32(const uint8_t * p) {
    return p[0] | (uint32_t) p[1] << 8 | (uint32_t) p[2] << 16 | (uint32_t) p[3] << 24;
}

bool        is_ours(const char * key);
bool        is_basis(std::string_view key); // subkv.blk.N.basis
std::string shortened(std::string s);       // for an error message

// The value of KEYS_DIGEST (converter/FORMAT.md §1.2), where the fingerprint covers the bases.
std::string keys_digest(const gguf_context * ctx, const std::string & fingerprint);

// All methods throw Invalid.
class Keys {
public:
    explicit Keys(const gguf_context * ctx);

    uint32_t u32(const std::string & key, uint32_t lo, uint32_t hi) const;
    uint64_t u64(const std::string & key) const;
    float    positive_f32(const std::string & key) const;
    bool     has(const std::string & key) const;

    uint32_t optional_u32(const std::string & key, uint32_t absent) const;

    // UTF-8 text, and must be one of `allowed`. optional_str returns "" if the key is absent.
    std::string str(const std::string & key) const;
    std::string optional_str(const std::string & key) const;
    std::string str(const std::string & key, std::initializer_list<const char *> allowed) const;
    std::string sha256(const std::string & key) const;

    // Without a copy, because a basis may be large. Valid as long as the gguf_context.
    std::string_view view(const std::string & key) const;

private:
    int64_t find(const std::string & key, gguf_type type) const;

    const gguf_context * ctx;
};

// The bits of an element of recent rows, from this key, or 16 if it is absent.
int read_recent_bits(const Keys & keys, const std::string & key);

} // namespace subkv
