#include "sha256.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#    include <cpuid.h>
#    include <immintrin.h>
#    define SUBKV_SHA_X86
#endif

namespace subkv {

// First 32 bits of the fractional parts of the cube roots of the first 64 primes (FIPS 180-4 §4.2.2).
static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t rotr(uint32_t x, int n) {
    return x >> n | x << (32 - n);
}

static void scalar_block(uint32_t state[8], const uint8_t * p) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i) {
        w[i] = (uint32_t) p[4 * i] << 24 | (uint32_t) p[4 * i + 1] << 16 | (uint32_t) p[4 * i + 2] << 8 | p[4 * i + 3];
    }
    for (int i = 16; i < 64; ++i) {
        const uint32_t s0 = rotr(w[i - 15], 7) ^ rotr(w[i - 15], 18) ^ w[i - 15] >> 3;
        const uint32_t s1 = rotr(w[i - 2], 17) ^ rotr(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i]              = w[i - 16] + s0 + w[i - 7] + s1;
    }
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (int i = 0; i < 64; ++i) {
        const uint32_t t1 = h + (rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25)) + ((e & f) ^ (~e & g)) + K[i] + w[i];
        const uint32_t t2 = (rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        h = g, g = f, f = e, e = d + t1;
        d = c, c = b, b = a, a = t1 + t2;
    }
    const uint32_t add[8] = { a, b, c, d, e, f, g, h };
    for (int i = 0; i < 8; ++i) {
        state[i] += add[i];
    }
}

static void scalar_blocks(uint32_t state[8], const uint8_t * p, size_t n) {
    for (; n > 0; --n, p += 64) {
        scalar_block(state, p);
    }
}

#if defined(SUBKV_SHA_X86)
static bool has_sha_instructions() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & bit_SSSE3) == 0 || (c & bit_SSE4_1) == 0) {
        return false;
    }
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & (1u << 29)) != 0;
}

// The instructions keep the state as (a, b, e, f) and (c, d, g, h), the first in the highest lane. Message words
// 4 i .. 4 i + 3 are w[i % 4].
__attribute__((target("sha,sse4.1,ssse3"))) static void sha_blocks(uint32_t state[8], const uint8_t * p, size_t n) {
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203); // big-endian words
    const __m128i dcba = _mm_loadu_si128((const __m128i *) state),
                  hgfe = _mm_loadu_si128((const __m128i *) (state + 4));
    const __m128i abcd = _mm_shuffle_epi32(dcba, 0x1b), efgh = _mm_shuffle_epi32(hgfe, 0x1b);
    __m128i       abef = _mm_unpackhi_epi64(efgh, abcd), cdgh = _mm_unpacklo_epi64(efgh, abcd);
    for (; n > 0; --n, p += 64) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i       w[4];
        for (int i = 0; i < 4; ++i) {
            w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *) (p + 16 * i)), swap);
        }
#    pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
            if (i >= 4) {
                __m128i next = _mm_sha256msg1_epu32(w[i % 4], w[(i + 1) % 4]);
                next         = _mm_add_epi32(next, _mm_alignr_epi8(w[(i + 3) % 4], w[(i + 2) % 4], 4));
                w[i % 4]     = _mm_sha256msg2_epu32(next, w[(i + 3) % 4]);
            }
            const __m128i wk = _mm_add_epi32(w[i % 4], _mm_loadu_si128((const __m128i *) (K + 4 * i)));
            cdgh             = _mm_sha256rnds2_epu32(cdgh, abef, wk);
            abef             = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(wk, 0x0e));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    const __m128i feba = _mm_shuffle_epi32(abef, 0x1b), hgdc = _mm_shuffle_epi32(cdgh, 0x1b);
    _mm_storeu_si128((__m128i *) state, _mm_unpacklo_epi64(feba, hgdc));
    _mm_storeu_si128((__m128i *) (state + 4), _mm_unpackhi_epi64(feba, hgdc));
}
#endif

void Sha256::blocks(const uint8_t * p, size_t n) {
#if defined(SUBKV_SHA_X86)
    static const auto all = has_sha_instructions() ? sha_blocks : scalar_blocks;
#else
    static const auto all = scalar_blocks;
#endif
    all(state, p, n);
}

void Sha256::update(const void * data, size_t n) {
    const uint8_t * p = (const uint8_t *) data;
    while (n > 0) {
        const size_t at = (size_t) (n_total % sizeof(buf));
        if (at == 0 && n >= sizeof(buf)) {
            const size_t whole = n / sizeof(buf);
            blocks(p, whole);
            n_total += whole * sizeof(buf);
            p += whole * sizeof(buf);
            n -= whole * sizeof(buf);
            continue;
        }
        const size_t take = std::min(n, sizeof(buf) - at);
        std::memcpy(buf + at, p, take);
        n_total += take;
        p += take;
        n -= take;
        if (at + take == sizeof(buf)) {
            blocks(buf, 1);
        }
    }
}

std::array<uint8_t, 32> Sha256::digest() {
    const uint64_t n_bits = n_total * 8;
    const uint8_t  one    = 0x80;
    const uint8_t  zero   = 0;
    update(&one, 1);
    while (n_total % 64 != 56) {
        update(&zero, 1);
    }
    uint8_t length[8];
    for (int i = 0; i < 8; ++i) {
        length[i] = (uint8_t) (n_bits >> (56 - 8 * i));
    }
    update(length, sizeof(length));

    std::array<uint8_t, 32> bytes;
    for (size_t i = 0; i < bytes.size(); ++i) {
        bytes[i] = (uint8_t) (state[i / 4] >> (24 - 8 * (i % 4)));
    }
    return bytes;
}

std::string hex_digits(const uint8_t * bytes, size_t n) {
    static const char digits[] = "0123456789abcdef";
    std::string       out;
    for (size_t i = 0; i < n; ++i) {
        out += digits[bytes[i] >> 4];
        out += digits[bytes[i] & 15];
    }
    return out;
}

} // namespace subkv
