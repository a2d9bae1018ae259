// bench.cpp: what every op of every version costs on this processor, one thread.
//
//   cmake --build DIR --target kernel-bench && DIR/bin/kernel-bench [milliseconds per figure [part of the figures' names]]
//
// Versions are interleaved; a figure is the median of its repetitions. attend runs over layers as a model has them: 30
// layers of 3 KV heads side by side in a cell's row, so that codes come from memory and not from a cache. ns are per cell
// and KV head (K and V), for many query rows per visible cell and query row, else per row; GB/s are bytes of codes read.
#include "subkv/ops.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <string>
#include <vector>

using namespace subkv;

namespace {

constexpr int64_t N_LAYER = 30;
constexpr int64_t N_HEAD  = 3;
constexpr int64_t CHUNK   = 256; // cells per call, as the runtime does

using Bands = std::vector<std::pair<int, int>>; // (n, bits)

std::mt19937 random_bits(1);

float uniform() {
    return std::uniform_real_distribution<float>(-1.0f, 1.0f)(random_bits);
}

uint16_t half(float x) { // good enough for |x| in [2^-14, 2)
    int         e;
    const float m = std::frexp(std::fabs(x), &e);
    return (uint16_t) ((x < 0 ? 0x8000 : 0) | ((e + 14) << 10) | ((int) (m * 2048.0f) & 0x3ff));
}

struct Head {
    HeadCodec             codec = {};
    std::vector<uint16_t> basis;

    explicit Head(const Bands & bands) {
        codec.row_bytes = 1;
        for (const auto & [n, bits] : bands) {
            codec.bands[codec.n_bands++] = { n, bits, codec.rank, codec.row_bytes, 0.1f };
            codec.rank += n;
            codec.row_bytes += n * bits / 8;
        }
        codec.d = codec.rank;
        for (int i = 0; i < codec.rank * codec.d; ++i) {
            basis.push_back(half(0.125f + 0.01f * uniform()));
        }
        codec.encode = codec.decode = basis.data();
    }
};

struct Figure {
    std::string                          what;
    double                               units; // what a run's time is divided by
    double                               bytes; // of codes read by a run
    std::function<void(const Ops & ops)> run;
};

// SUBKV_KERNEL=NAME measures that version alone.
std::vector<const Ops *> versions() {
    std::vector<const Ops *> all;
    for (const Ops * const * ops = ops_available(); *ops != nullptr; ++ops) {
        all.push_back(*ops);
    }
    return std::getenv("SUBKV_KERNEL") != nullptr ? std::vector<const Ops *>{ &ops() } : all;
}

double seconds(const std::function<void()> & f) {
    const auto start = std::chrono::steady_clock::now();
    f();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> x) {
    std::sort(x.begin(), x.end());
    return x[x.size() / 2];
}

// Codes of all layers and the arguments of attending to them.
struct Cache {
    Head                 k, v;
    int64_t              n_cells;
    std::vector<uint8_t> k_rows, v_rows;

    Cache(const Bands & k_bands, const Bands & v_bands, int64_t cells) : k(k_bands), v(v_bands), n_cells(cells) {
        for (auto [head, rows] : { std::pair{ &k, &k_rows }, std::pair{ &v, &v_rows } }) {
            rows->resize((size_t) (N_LAYER * cells * N_HEAD * head->codec.row_bytes));
            for (size_t i = 0; i < rows->size(); ++i) {
                (*rows)[i] = (uint8_t) random_bits();
                if (i % (size_t) head->codec.row_bytes == 0) {
                    (*rows)[i] = (uint8_t) (130 + random_bits() % 8);
                }
            }
        }
    }

    void attend(const Ops & ops, int64_t n_layer, int64_t n_tok, int64_t n_group) const {
        static std::vector<float> q, m, z, acc, bias, slope;
        const int64_t             n_rows = n_tok * n_group;
        q.assign((size_t) (n_rows * k.codec.rank), 0.05f);
        bias.assign((size_t) (n_tok * CHUNK), 0.0f);
        slope.assign((size_t) n_group, 1.0f);
        const int64_t k_stride = N_HEAD * k.codec.row_bytes;
        const int64_t v_stride = N_HEAD * v.codec.row_bytes;
        m.assign((size_t) (N_HEAD * n_rows), -INFINITY);
        z.assign((size_t) (N_HEAD * n_rows), 0.0f);
        acc.assign((size_t) (N_HEAD * n_rows * v.codec.rank), 0.0f);
        for (int64_t layer = 0; layer < n_layer; ++layer) {
            for (int64_t first = 0; first < n_cells; first += CHUNK) {
                for (int64_t h = 0; h < N_HEAD; ++h) {
                    const int64_t cell = layer * n_cells + first;
                    ops.attend({ &k.codec, &v.codec, k_rows.data() + cell * k_stride + h * k.codec.row_bytes,
                                 v_rows.data() + cell * v_stride + h * v.codec.row_bytes, k_stride, v_stride,
                                 std::min(CHUNK, n_cells - first), n_tok, n_group, q.data(), nullptr, bias.data(),
                                 CHUNK, slope.data(), 0.0f, m.data() + h * n_rows, z.data() + h * n_rows,
                                 acc.data() + h * n_rows * v.codec.rank, v.codec.rank });
                }
            }
        }
    }

    Figure figure(const std::string & name, int64_t n_layer, int64_t n_tok, int64_t n_group) const {
        const double  cells  = (double) (n_layer * n_cells * N_HEAD);
        const int64_t n_rows = n_tok * n_group;
        return { name + ", " + std::to_string(n_rows) + " query rows", n_tok > 1 ? cells * (double) n_rows : cells,
                 n_tok > 1 ? 0.0 : cells * (k.codec.row_bytes + v.codec.row_bytes),
                 [=](const Ops & ops) { attend(ops, n_layer, n_tok, n_group); } };
    }
};

double read_bandwidth() { // GB/s of summing 256 MiB
    std::vector<uint64_t> data(1 << 25, 1);
    uint64_t              sum = 0;
    std::vector<double>   t;
    for (int i = 0; i < 7; ++i) {
        t.push_back(seconds([&] {
            uint64_t part[8] = {};
            for (size_t j = 0; j < data.size(); j += 8) {
                for (size_t l = 0; l < 8; ++l) {
                    part[l] += data[j + l];
                }
            }
            for (const uint64_t p : part) {
                sum += p;
            }
        }));
    }
    return sum == 0 ? 0.0 : 8.0 * (double) data.size() / median(t) / 1e9;
}

} // namespace

int main(int argc, char ** argv) {
    const double budget = argc > 1 ? std::atof(argv[1]) / 1000.0 : 0.5;
    if (!(budget > 0.0)) {
        std::fprintf(stderr, "kernel-bench: expected milliseconds per figure, found '%s'\n", argv[1]);
        return 1;
    }
    if (ops_error() != nullptr) {
        std::fprintf(stderr, "kernel-bench: %s\n", ops_error());
        return 1;
    }
    const Bands k64 = { { 8, 8 }, { 8, 6 }, { 16, 4 }, { 32, 3 } };
    const Bands v64 = { { 8, 6 }, { 40, 4 }, { 16, 3 } };
    const Cache mixed(k64, v64, 8000);
    const Cache wide({ { 16, 8 }, { 32, 6 }, { 16, 5 } }, { { 32, 6 }, { 32, 5 } }, 8000);
    const Cache fine({ { 8, 16 }, { 24, 8 }, { 32, 6 } }, { { 16, 8 }, { 48, 6 } }, 8000);
    const Cache plain({ { 64, 4 } }, { { 64, 4 } }, 8000);
    const Cache large({ { 16, 8 }, { 16, 6 }, { 32, 4 }, { 64, 3 } }, { { 16, 6 }, { 80, 4 }, { 32, 3 } }, 4000);

    std::vector<Figure> figures = {
        mixed.figure("attend 64 dims 4.2 bits", N_LAYER, 1, 1),
        mixed.figure("attend 64 dims 4.2 bits", N_LAYER, 1, 3),
        mixed.figure("attend 64 dims 4.2 bits", N_LAYER, 1, 8),
        wide.figure("attend 64 dims 5.9 bits", N_LAYER, 1, 3),
        fine.figure("attend 64 dims 7.3 bits, 16-bit band", N_LAYER, 1, 3),
        plain.figure("attend 64 dims 4.0 bits", N_LAYER, 1, 3),
        large.figure("attend 128 dims 4.1 bits", N_LAYER, 1, 4),
        mixed.figure("attend 64 dims 4.2 bits, in cache", 1, 1, 3),
        mixed.figure("attend 64 dims 4.2 bits", 1, 42, 3),
    };

    std::vector<float>   x(64 * 64), y(64 * 64);
    std::vector<int64_t> cells(64);
    for (float & value : x) {
        value = uniform();
    }
    for (size_t i = 0; i < cells.size(); ++i) {
        cells[i] = (int64_t) i;
    }
    std::vector<uint8_t> rows(64 * 256);
    std::vector<double>  s(64 * 64), sum(64);
    const HeadCodec &    codec = mixed.k.codec;
    figures.push_back({ "encode_rows 64 dims 4.2 bits", 64, 0, [&](const Ops & ops) {
                           ops.encode_rows(codec, x.data(), 64, 64, cells.data(), rows.data(), codec.row_bytes);
                       } });
    figures.push_back({ "project 64x64, 1 row", 1, 0, [&](const Ops & ops) {
                           ops.project(codec.decode, 64, 64, x.data(), 64, 1, 1.0f, y.data(), 64);
                       } });
    figures.push_back({ "project 64x64, 64 rows", 64, 0, [&](const Ops & ops) {
                           ops.project(codec.decode, 64, 64, x.data(), 64, 64, 1.0f, y.data(), 64);
                       } });
    figures.push_back({ "reconstruct 64x64", 1, 0,
                        [&](const Ops & ops) { ops.reconstruct(codec.decode, 64, 64, x.data(), y.data()); } });
    figures.push_back(
        { "moment 64 dims", 64, 0, [&](const Ops & ops) { ops.moment(x.data(), 64, 64, 64, s.data(), sum.data()); } });
    std::vector<uint16_t>         halves(136 * 64, half(0.25f));
    std::vector<const uint16_t *> exact;
    for (size_t i = 0; i < 136; ++i) {
        exact.push_back(halves.data() + 64 * i);
    }
    std::vector<float> zeros(136, 0.0f), m(3), z(3), slope(3, 1.0f);
    figures.push_back({ "attend_exact 64 dims, 136 keys, 3 query rows", 136, 0, [&](const Ops & ops) {
                           std::fill(m.begin(), m.end(), -INFINITY);
                           ops.attend_exact({ 64, 64, 136, exact.data(), exact.data(), 1, 3, x.data(), zeros.data(),
                                              136, slope.data(), 0.0f, m.data(), z.data(), y.data(), 64 });
                       } });

    std::printf("read bandwidth of one thread: %.1f GB/s\n\n%-48s", read_bandwidth(), "ns (GB/s of codes)");
    for (const Ops * ops : versions()) {
        std::printf("%18s", ops->name);
    }
    std::printf("\n");
    for (const Figure & figure : figures) {
        if (argc > 2 && figure.what.find(argv[2]) == std::string::npos) {
            continue;
        }
        std::vector<std::vector<double>> times;
        std::vector<int>                 repeats;
        for (const Ops * ops : versions()) {
            const double once = seconds([&] { figure.run(*ops); });
            times.emplace_back();
            repeats.push_back((int) std::max(1.0, std::min(1e5, budget / 5.0 / std::max(once, 1e-9))));
        }
        for (int i = 0; i < 5; ++i) {
            for (size_t v = 0; v < times.size(); ++v) {
                const Ops & ops = *versions()[v];
                if (i > 0 && times[v][0] * repeats[v] > 10.0 * budget) {
                    continue; // the reference is slow and needs no median
                }
                const double t = seconds([&] {
                    for (int r = 0; r < repeats[v]; ++r) {
                        figure.run(ops);
                    }
                });
                times[v].push_back(t / repeats[v]);
            }
        }
        std::printf("%-48s", figure.what.c_str());
        for (const auto & t : times) {
            const double once = median(t);
            char         cell[64];
            if (figure.bytes > 0) {
                std::snprintf(cell, sizeof(cell), "%.2f (%.1f)", 1e9 * once / figure.units, figure.bytes / once / 1e9);
            } else {
                std::snprintf(cell, sizeof(cell), "%.2f", 1e9 * once / figure.units);
            }
            std::printf("%18s", cell);
        }
        std::printf("\n");
        std::fflush(stdout);
    }
    return 0;
}
