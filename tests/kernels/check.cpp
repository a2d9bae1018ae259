// check.cpp: compares every version that this processor can run with the reference, on random layouts. It serves
// processors and systems without Python: test_elsewhere.py builds it for them and runs it in emulators. It prints the
// number of checks and exits with 1 at the first failure.
#include "subkv/ops.h"
#include "subkv/recent.h"
#include "subkv/trellis.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>
#ifdef _WIN32
#    ifndef NOMINMAX
#        define NOMINMAX
#    endif
#    include <windows.h>
#else
#    include <sys/mman.h>
#    include <unistd.h>
#endif

using namespace subkv;

namespace {

std::mt19937 random_bits(7);

float normal() {
    return std::normal_distribution<float>()(random_bits);
}

int pick(int low, int high) { // inclusive
    return std::uniform_int_distribution<int>(low, high)(random_bits);
}

uint16_t half_of(float x) {
    uint16_t h;
    ops_ref().to_half(&x, &h, 1);
    return h;
}

void require(bool holds, const char * version, const char * what, int64_t at, double actual, double expected) {
    if (!holds) {
        std::printf("%s: %s at %lld: expected %.9g, found %.9g\n", version, what, (long long) at, expected, actual);
        std::exit(1);
    }
}

// Random bands and bases; with `exact`, E is the identity, so that coefficients are the inputs in every version.
struct Head {
    HeadCodec             codec = {};
    std::vector<uint16_t> basis;
    std::vector<float>    offset;

    Head(bool value, int d, bool halves, bool exact) {
        static const int bits[] = { 2, 3, 4, 5, 6, 8, 16 };
        codec.value             = value;
        codec.row_bytes         = 1;
        codec.d                 = d;
        const int n_bands       = pick(1, 5);
        for (int left = d / 8; left > 0 && codec.n_bands < n_bands; --left) {
            const int n = 8 * pick(1, left);
            if (codec.rank + n > d) {
                break;
            }
            const int b                  = bits[pick(0, halves ? 6 : 5)];
            codec.bands[codec.n_bands++] = { n, b, codec.rank, codec.row_bytes, std::exp2(-(float) pick(0, 60) / 10) };
            codec.rank += n;
            codec.row_bytes += n * b / 8;
        }
        for (int i = 0; i < codec.rank; ++i) {
            for (int j = 0; j < d; ++j) {
                basis.push_back(half_of(exact ? (float) (i == j) : normal() / std::sqrt((float) d)));
            }
            offset.push_back(normal());
        }
        codec.path   = pick(0, 3) == 0 ? latent_path(codec) : path_of(codec);
        codec.encode = codec.decode = { basis.data() };
        codec.offset                = pick(0, 1) != 0 ? offset.data() : nullptr;
    }
};

// Pages of memory; the last one is inaccessible. nullptr: out of memory.
uint8_t * fenced(size_t size, size_t page) {
#ifdef _WIN32
    DWORD  before;
    auto * p = (uint8_t *) VirtualAlloc(nullptr, size, MEM_COMMIT | MEM_RESERVE, PAGE_READWRITE);
    return p != nullptr && VirtualProtect(p + size - page, page, PAGE_NOACCESS, &before) ? p : nullptr;
#else
    void * p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return p != MAP_FAILED && mprotect((uint8_t *) p + size - page, page, PROT_NONE) == 0 ? (uint8_t *) p : nullptr;
#endif
}

void unfence(uint8_t * p, size_t size) {
#ifdef _WIN32
    (void) size;
    VirtualFree(p, 0, MEM_RELEASE);
#else
    munmap(p, size);
#endif
}

// Random bytes that end directly before an inaccessible page.
class Fenced {
public:
    explicit Fenced(int64_t n) {
        constexpr size_t page  = 65536; // a multiple of every system's page size
        const size_t     inner = ((size_t) n + page - 1) / page * page;
        size_                  = inner + page;
        map_                   = fenced(size_, page);
        if (map_ == nullptr) {
            std::printf("check: no memory\n");
            std::exit(1);
        }
        data = map_ + inner - n;
        std::generate(data, data + n, [] { return (uint8_t) random_bits(); });
    }

    Fenced(const Fenced &)             = delete;
    Fenced & operator=(const Fenced &) = delete;

    ~Fenced() { unfence(map_, size_); }

    uint8_t * data;

private:
    uint8_t * map_;
    size_t    size_;
};

std::vector<float> normals(int64_t n) {
    std::vector<float> x((size_t) n);
    std::generate(x.begin(), x.end(), normal);
    return x;
}

std::vector<int64_t> first_cells(int64_t n) {
    std::vector<int64_t> cells((size_t) n);
    std::iota(cells.begin(), cells.end(), 0);
    return cells;
}

// End of the last tile of n cells.
int64_t tile_bytes(const HeadCodec & codec, int64_t n, int64_t stride) {
    return (n - 1) / TILE * stride + TILE * codec.row_bytes;
}

void check_encode(const Ops & ops, int d) {
    const Head           head(pick(0, 1) != 0, d, true, true);
    const HeadCodec &    codec = head.codec;
    const int64_t        n_all = 3 * TILE, n = pick(1, (int) n_all);
    const int64_t        stride = TILE * codec.row_bytes + pick(0, 70), size = tile_bytes(codec, n_all, stride);
    std::vector<float>   x     = normals(n * d);
    std::vector<int64_t> cells = first_cells(n_all);
    std::shuffle(cells.begin(), cells.end(), random_bits);
    x[0] = pick(0, 3) == 0 ? NAN : x[0];
    std::fill_n(x.begin() + (n - 1) * d, pick(0, 1) * d, 0.0f);
    const Fenced expected(size), actual(size);
    std::copy_n(expected.data, size, actual.data);
    const int64_t bad[] = { ops_ref().encode(codec, x.data(), d, n, cells.data(), expected.data, stride),
                            ops.encode(codec, x.data(), d, n, cells.data(), actual.data, stride) };
    require(bad[0] == bad[1], ops.name, "encode: rows that are not finite", 0, (double) bad[1], (double) bad[0]);
    for (int64_t i = 0; i < size; ++i) {
        require(expected.data[i] == actual.data[i], ops.name, "encode: byte", i, actual.data[i], expected.data[i]);
    }
    // every version returns the reference's coefficients, for cells in any order
    std::vector<float> c[2];
    for (int i = 0; i < 2; ++i) {
        c[i].resize((size_t) (n * codec.rank));
        (i == 0 ? ops_ref() : ops).dequantize(codec, actual.data, stride, n, cells.data(), c[i].data());
    }
    for (size_t i = 0; i < c[0].size(); ++i) {
        const bool both_nan = std::isnan(c[0][i]) && std::isnan(c[1][i]); // rows that could not be coded
        require(both_nan || std::fabs(c[1][i] - c[0][i]) <= 3e-7f * std::fabs(c[0][i]), ops.name, "dequantize",
                (int64_t) i, c[1][i], c[0][i]);
    }
}

void check_linear(const Ops & ops, int d) {
    const Head               head(false, d, false, false);
    const HeadCodec &        codec = head.codec;
    const int64_t            n     = pick(1, 20);
    const std::vector<float> x     = normals(n * d);
    std::vector<float>       y[2], o[2];
    for (int i = 0; i < 2; ++i) {
        const Ops & by = i == 0 ? ops_ref() : ops;
        y[i].resize((size_t) (n * codec.rank));
        by.project(codec.decode, codec.rank, d, x.data(), d, n, 0.7f, y[i].data(), codec.rank);
        o[i].assign((size_t) d, 0.5f);
        by.reconstruct(codec.decode, codec.rank, d, x.data(), o[i].data());
    }
    for (size_t i = 0; i < y[0].size(); ++i) {
        require(std::fabs(y[1][i] - y[0][i]) <= 1e-4f, ops.name, "project", (int64_t) i, y[1][i], y[0][i]);
    }
    for (size_t i = 0; i < o[0].size(); ++i) {
        require(std::fabs(o[1][i] - o[0][i]) <= 1e-4f, ops.name, "reconstruct", (int64_t) i, o[1][i], o[0][i]);
    }
    std::vector<uint16_t> h[2];
    for (int i = 0; i < 2; ++i) {
        h[i].resize(x.size());
        (i == 0 ? ops_ref() : ops).to_half(x.data(), h[i].data(), (int64_t) x.size());
    }
    require(h[0] == h[1], ops.name, "to_half", 0, 0, 0);

    const float *        mean = pick(0, 1) ? x.data() + (n - 1) * d : nullptr;
    std::vector<uint8_t> row[2];
    std::vector<float>   wide(x.begin(), x.begin() + d);
    for (float & value : wide) {
        value *= std::ldexp(1.0f, pick(0, 9) ? pick(-4, 4) : pick(-40, 20));
    }
    for (int i = 0; i < 2; ++i) {
        const Ops & by = i == 0 ? ops_ref() : ops;
        row[i].resize((size_t) recent_bytes(d));
        h[i].resize((size_t) d);
        by.pack_recent(wide.data(), mean, d, row[i].data());
        by.unpack_recent(row[0].data(), mean, d, h[i].data());
    }
    require(row[0] == row[1], ops.name, "pack_recent", 0, 0, 0);
    require(h[0] == h[1], ops.name, "unpack_recent", 0, 0, 0);
}

struct State {
    std::vector<float> m, z, acc;

    State(int64_t n, int64_t d) : m((size_t) n, -INFINITY), z((size_t) n, 0.0f), acc((size_t) (n * d), 0.0f) {}
};

// A causal mask with holes.
std::vector<float> random_bias(int64_t n_tok, int64_t n) {
    std::vector<float> bias((size_t) (n_tok * n));
    for (int64_t i = 0; i < n_tok * n; ++i) {
        bias[(size_t) i] = pick(0, 4) == 0 ? -INFINITY : -std::fabs(normal());
    }
    std::fill_n(bias.begin(), pick(0, 1) * n, -INFINITY); // a token without visible cells
    return bias;
}

// Requires that two states differ by at most `tolerance` in logits and, per unit of z, in acc.
void compare(const char * version, const char * what, const State & expected, const State & actual, int64_t d,
             const std::vector<double> & logit, const std::vector<double> & value) {
    for (size_t r = 0; r < expected.m.size(); ++r) {
        const double tol = logit[r] + 1e-5;
        if (std::isinf(expected.m[r])) {
            require(std::isinf(actual.m[r]) && actual.z[r] == 0.0f, version, what, (int64_t) r, actual.m[r],
                    expected.m[r]);
            continue;
        }
        require(std::fabs(actual.m[r] - expected.m[r]) <= tol, version, what, (int64_t) r, actual.m[r], expected.m[r]);
        const double scale = std::exp((double) actual.m[r] - (double) expected.m[r]);
        require(std::fabs(actual.z[r] * scale - expected.z[r]) <= 3 * tol * expected.z[r], version, what, (int64_t) r,
                actual.z[r] * scale, expected.z[r]);
        for (int64_t j = 0; j < d; ++j) {
            const double a = actual.acc[r * (size_t) d + (size_t) j] * scale;
            const double b = expected.acc[r * (size_t) d + (size_t) j];
            require(std::fabs(a - b) <= 3 * tol * value[0] * expected.z[r] + value[1] + 1e-5, version, what,
                    (int64_t) r * d + j, a, b);
        }
    }
}

// Turns random bytes into valid cells: some zero rows, finite 16-bit bands.
void tame(const HeadCodec & codec, uint8_t * tiles, int64_t stride, int64_t n, int64_t every) {
    std::vector<uint8_t> row((size_t) codec.row_bytes);
    for (int64_t c = 0; c < n; ++c) {
        uint8_t * tile = tiles + c / TILE * stride;
        tile_to_row(codec, tile, c % TILE, row.data());
        row[0] = (uint8_t) (c % every == 0 ? 0 : pick(120, 160));
        for (int i = 0; i < codec.n_bands; ++i) {
            for (int j = 0; codec.bands[i].bits == 16 && j < codec.bands[i].n; ++j) {
                const uint16_t h = half_of(normal());
                std::memcpy(row.data() + codec.bands[i].offset + 2 * j, &h, sizeof(h));
            }
        }
        row_to_tile(codec, row.data(), tile, c % TILE);
    }
}

void check_attend(const Ops & ops, int d_k, int d_v) {
    const Head    k(false, d_k, true, false), v(true, d_v, true, false);
    const int64_t n = pick(1, 300), n_tok = pick(1, 4), n_group = pick(1, 9), n_rows = n_tok * n_group;
    const int64_t k_stride = TILE * k.codec.row_bytes + pick(0, 70), v_stride = TILE * v.codec.row_bytes;
    const Fenced  k_fenced(tile_bytes(k.codec, n, k_stride)), v_fenced(tile_bytes(v.codec, n, v_stride));
    uint8_t *     k_tiles = k_fenced.data;
    uint8_t *     v_tiles = v_fenced.data;
    tame(k.codec, k_tiles, k_stride, n, 7);
    tame(v.codec, v_tiles, v_stride, n, 5);
    const std::vector<int64_t> cells = first_cells(n);
    std::vector<float>         keys((size_t) (n * k.codec.rank)), values((size_t) (n * v.codec.rank));
    const std::vector<float>   bias = random_bias(n_tok, n), slope = normals(n_group), shift = normals(n_rows);
    ops_ref().dequantize(k.codec, k_tiles, k_stride, n, cells.data(), keys.data());
    ops_ref().dequantize(v.codec, v_tiles, v_stride, n, cells.data(), values.data());
    std::vector<float> q       = normals(n_rows * k.codec.rank);
    double             largest = 1e-6;
    for (const float key : keys) {
        largest = std::max(largest, (double) std::fabs(key));
    }
    for (float & x : q) {
        x *= (float) (3.0 / largest / std::sqrt((double) k.codec.rank));
    }
    // the errors that `rounding` allows (ops.h)
    std::vector<double> logit((size_t) n_rows, 0.0);
    double              unit_key = 0.0;
    for (int64_t c = 0; c < n; ++c) {
        double sum = 0.0;
        for (int b = 0; b < k.codec.n_bands; ++b) {
            for (int j = 0; j < k.codec.bands[b].n; ++j) {
                sum += std::fabs(keys[(size_t) (c * k.codec.rank + k.codec.bands[b].first + j)]) /
                       level_step(k.codec, k.codec.bands[b]);
            }
        }
        unit_key = std::max(unit_key, sum);
    }
    for (int64_t r = 0; r < n_rows; ++r) {
        double top = 0.0;
        for (int b = 0; b < k.codec.n_bands; ++b) {
            for (int j = 0; j < k.codec.bands[b].n; ++j) {
                top = std::max(top, std::fabs((double) q[(size_t) (r * k.codec.rank + k.codec.bands[b].first + j)] *
                                              level_step(k.codec, k.codec.bands[b])));
            }
        }
        logit[(size_t) r] = 0.5 * ops.rounding * top * unit_key;
    }
    double top_value = 0.0; // largest coefficient; weights and scales are at most 1
    double unit      = 0.0; // sum over cells of the largest |coefficient / scale|
    for (int64_t c = 0; c < n; ++c) {
        double top = 0.0;
        for (int j = 0; j < v.codec.rank; ++j) {
            top = std::max(top, (double) std::fabs(values[(size_t) (c * v.codec.rank + j)]));
        }
        top_value         = std::max(top_value, top);
        const int    code = v_tiles[c / TILE * v_stride + c % TILE];
        const double s    = code == 0 ? 1.0 : std::exp2((code - 160) / 8.0);
        unit += top / s;
    }
    const float        softcap = pick(0, 1) != 0 ? 20.0f : 0.0f;
    std::vector<State> state(2, State(n_rows, v.codec.rank));
    for (int i = 0; i < 2; ++i) {
        State & s = state[(size_t) i];
        (i == 0 ? ops_ref() : ops)
            .attend({ &k.codec, &v.codec, k_tiles, v_tiles, k_stride, v_stride, n, n_tok, n_group, q.data(),
                      shift.data(), bias.data(), n, slope.data(), softcap, s.m.data(), s.z.data(), s.acc.data(),
                      v.codec.rank });
    }
    compare(ops.name, "attend", state[0], state[1], v.codec.rank, logit, { top_value, 0.5 * ops.rounding * unit });
}

void check_exact(const Ops & ops, int d_k, int d_v) {
    const int64_t         n = pick(1, 150), n_tok = pick(1, 4), n_group = pick(1, 5), n_rows = n_tok * n_group;
    std::vector<uint16_t> k, v;
    for (int64_t i = 0; i < n * d_k; ++i) {
        k.push_back(half_of(normal()));
    }
    for (int64_t i = 0; i < n * d_v; ++i) {
        v.push_back(half_of(normal()));
    }
    std::vector<const uint16_t *> keys, values;
    for (int64_t c = 0; c < n; ++c) {
        keys.push_back(k.data() + c * d_k);
        values.push_back(v.data() + c * d_v);
    }
    std::vector<float> q = normals(n_rows * d_k);
    for (float & x : q) {
        x *= 2.0f / std::sqrt((float) d_k);
    }
    const std::vector<float> bias = random_bias(n_tok, n), slope = normals(n_group);
    std::vector<State>       state(2, State(n_rows, d_v));
    for (int i = 0; i < 2; ++i) {
        State & s = state[(size_t) i];
        (i == 0 ? ops_ref() : ops)
            .attend_exact({ d_k, d_v, n, keys.data(), values.data(), n_tok, n_group, q.data(), bias.data(), n,
                            slope.data(), 0.0f, s.m.data(), s.z.data(), s.acc.data(), d_v });
    }
    compare(ops.name, "attend_exact", state[0], state[1], d_v, std::vector<double>((size_t) n_rows, 0.0), { 6.0, 0.0 });
}

} // namespace

int main(int argc, char ** argv) {
    const int rounds = argc > 1 ? std::atoi(argv[1]) : 100;
    for (const Ops * const * ops = ops_available(); *ops != nullptr; ++ops) {
        for (int i = 0; i < rounds; ++i) {
            const int d_k = 8 * pick(1, i % 4 == 0 ? 32 : 16);
            const int d_v = 8 * pick(1, i % 4 == 1 ? 32 : 16);
            check_encode(**ops, d_k);
            check_linear(**ops, d_k);
            check_attend(**ops, d_k, d_v);
            check_exact(**ops, d_k, d_v);
        }
        std::printf("%s: %d rounds\n", (*ops)->name, rounds);
    }
    return 0;
}
