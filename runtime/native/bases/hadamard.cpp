// hadamard.cpp: see hadamard.h. Sylvester's doubling and Paley's two constructions.
#include "hadamard.h"

#include <map>
#include <mutex>

namespace subkv {

namespace {

using Signs = std::vector<int8_t>; // [n][n], or empty if no construction has this order

bool is_prime(int n) {
    for (int i = 2; i * i <= n; ++i) {
        if (n % i == 0) {
            return false;
        }
    }
    return n > 1;
}

// [q + 1][q + 1] of Legendre symbols of index differences modulo q, after a first row of 1 and a first column of
// `sign`.
Signs bordered(int q, int8_t sign) {
    Signs squares((size_t) q, -1);
    for (int i = 1; i < q; ++i) {
        squares[(size_t) (i * i % q)] = 1;
    }
    squares[0]   = 0;
    const auto n = (size_t) q + 1;
    Signs      out(n * n, 0);
    for (size_t i = 1; i < n; ++i) {
        out[i]     = 1;
        out[i * n] = sign;
        for (size_t j = 1; j < n; ++j) {
            out[i * n + j] = squares[(j + (size_t) q - i) % (size_t) q];
        }
    }
    return out;
}

// The Kronecker product of [m][m] and [2][2].
Signs doubled(const Signs & of, size_t m, const int8_t with[2][2]) {
    Signs out(4 * m * m);
    for (size_t i = 0; i < 2 * m; ++i) {
        for (size_t j = 0; j < 2 * m; ++j) {
            out[i * 2 * m + j] = (int8_t) (of[i / 2 * m + j / 2] * with[i % 2][j % 2]);
        }
    }
    return out;
}

Signs hadamard(int n) {
    if (n == 1) {
        return { 1 };
    }
    const auto  size = (size_t) n, m = size / 2;
    const Signs half = n % 2 == 0 ? hadamard(n / 2) : Signs();
    if (!half.empty()) {
        Signs out(size * size);
        for (size_t i = 0; i < size; ++i) {
            for (size_t j = 0; j < size; ++j) {
                const int8_t sign = half[i % m * m + j % m];
                out[i * size + j] = i >= m && j >= m ? (int8_t) -sign : sign;
            }
        }
        return out;
    }
    if (n % 4 == 0 && (n - 1) % 4 == 3 && is_prime(n - 1)) {
        Signs out = bordered(n - 1, -1);
        for (size_t i = 0; i < size; ++i) {
            ++out[i * size + i];
        }
        return out;
    }
    if (n % 4 == 0 && (n / 2 - 1) % 4 == 1 && is_prime(n / 2 - 1)) {
        constexpr int8_t DIAGONAL[2][2] = { { 1, -1 }, { -1, -1 } };
        constexpr int8_t OTHERS[2][2]   = { { 1, 1 }, { 1, -1 } };
        Signs            unit(m * m, 0);
        for (size_t i = 0; i < m; ++i) {
            unit[i * m + i] = 1;
        }
        Signs       out  = doubled(unit, m, DIAGONAL);
        const Signs rest = doubled(bordered(n / 2 - 1, 1), m, OTHERS);
        for (size_t i = 0; i < out.size(); ++i) {
            out[i] = (int8_t) (out[i] + rest[i]);
        }
        return out;
    }
    return {};
}

} // namespace

const std::vector<HadamardBlock> & spreading(int n) {
    static std::mutex                                mutex;
    static std::map<int, std::vector<HadamardBlock>> known;
    const std::lock_guard<std::mutex>                lock(mutex);
    auto &                                           blocks = known[n];
    for (int rest = blocks.empty() ? n : 0; rest > 0; rest -= blocks.back().n) {
        int   size = rest;
        Signs sign = hadamard(size);
        while (sign.empty()) {
            size -= 8;
            sign = hadamard(size);
        }
        blocks.push_back({ size, std::move(sign) });
    }
    return blocks;
}

} // namespace subkv
