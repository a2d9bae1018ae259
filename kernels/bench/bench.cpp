// bench.cpp: times every op of every version on this processor, one thread.
//
//   cmake --build DIR --target kernel-bench
//   DIR/bin/kernel-bench [milliseconds per figure [part of the figures' names [cells of a call of attend]]]
//
// Versions are interleaved; a figure is the median of its repetitions. attend runs over the layers of a model, 30
// layers of 3 KV heads with adjacent tiles, so that codes come from memory and not from a cache. ns are per cell and KV
// head (K and V); for many query rows per visible cell and query row; else per row. GB/s are bytes of codes read. The
// column "read" is a loop that only adds up the same tiles.
//
// On a processor with AVX-VNNI (avx_vnni in /proc/cpuinfo: Alder Lake, Sapphire Rapids and Zen 5, and later ones),
// `kernel-bench 500 attend` times it in the column "avx2vnni", beside "avx2".
#include "subkv/core_speed.h"
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
constexpr int64_t N_CELLS = 8000;
constexpr int64_t FEW     = 1024; // cells of a layer for the reference, which does not depend on memory speed

using Bands = std::vector<std::pair<int, int>>; // (n, bits)

std::mt19937 random_bits(1);

float uniform() {
    return std::uniform_real_distribution<float>(-1.0f, 1.0f)(random_bits);
}

uint16_t half(float x) { // for |x| in [2^-14, 2)
    int         e;
    const float m = std::frexp(std::fabs(x), &e);
    return (uint16_t) ((x < 0 ? 0x8000 : 0) | ((e + 14) << 10) | ((int) (m * 2048.0f) & 0x3ff));
}

struct Head {
    HeadCodec             codec = {};
    std::vector<uint16_t> basis;

    Head(bool value, const Bands & bands) {
        codec.value     = value;
        codec.row_bytes = 1;
        for (const auto & [n, bits] : bands) {
            codec.bands[codec.n_bands++] = { n, bits, codec.rank, codec.row_bytes, 0.1f };
            codec.rank += n;
            codec.row_bytes += n * bits / 8;
        }
        codec.d    = codec.rank;
        codec.path = path_of(codec);
        for (int i = 0; i < codec.rank * codec.d; ++i) {
            basis.push_back(half(0.125f + 0.01f * uniform()));
        }
        codec.encode = codec.decode = { basis.data() };
    }
};

// run and read return the number of units that their time is divided by.
struct Figure {
    std::string                            what;
    double                                 bytes; // of codes per unit
    std::function<double(const Ops & ops)> run;
    std::function<double()>                read; // may be empty
};

// SUBKV_KERNEL=NAME: measure only this version.
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

struct alignas(LINE) Line {
    uint64_t words[8];

    const uint8_t * bytes() const { return (const uint8_t *) words; }

    uint8_t * bytes() { return (uint8_t *) words; }
};

volatile uint64_t sink; // prevents the compiler from removing the computation

void read_all(const Line * lines, size_t n) {
    uint64_t part[8] = {};
    for (size_t i = 0; i < n; ++i) {
        for (size_t l = 0; l < 8; ++l) {
            part[l] += lines[i].words[l];
        }
    }
    for (const uint64_t p : part) {
        sink = sink + p;
    }
}

// K or V of all layers: tile t of head h begins at TILE * (t * N_HEAD + h) * row_bytes of its layer.
struct Side {
    Head              head;
    int64_t           lines; // of a layer
    std::vector<Line> tiles;

    Side(bool value, const Bands & bands, int64_t n_tiles) :
        head(value, bands), lines(n_tiles * N_HEAD * head.codec.row_bytes), tiles((size_t) (N_LAYER * lines)) {
        for (size_t i = 0; i < tiles.size(); i += (size_t) head.codec.row_bytes) {
            fill(&tiles[i]);
        }
    }

    void fill(Line * tile) const {
        for (int32_t i = 0; i < head.codec.row_bytes; ++i) {
            for (int64_t c = 0; c < LINE; ++c) {
                tile[i].bytes()[c] = (uint8_t) (i == 0 ? 130 + random_bits() % 8 : random_bits());
            }
        }
        for (const Band & band : head.codec.bands) {
            for (int32_t i = band.offset; band.bits == 16 && i < band.offset + 2 * band.n; ++i) {
                for (int64_t high = 1; high < LINE; high += 2) {
                    tile[i].bytes()[high] &= 0xbf; // finite halves
                }
            }
        }
    }

    int64_t stride() const { return TILE * N_HEAD * head.codec.row_bytes; }

    const uint8_t * at(int64_t layer, int64_t h, int64_t cell) const {
        return tiles[(size_t) (layer * lines)].bytes() + cell / TILE * stride() + TILE * h * head.codec.row_bytes;
    }
};

// Codes of all layers, and the arguments of attend.
struct Cache {
    Side    k, v;
    int64_t span; // cells per call; 0: as in the runtime

    Cache(const Bands & k_bands, const Bands & v_bands, int64_t cells_of_call) :
        k(false, k_bands, N_CELLS / TILE), v(true, v_bands, N_CELLS / TILE), span(cells_of_call) {}

    // Returns the number of cells of all heads.
    int64_t attend(const Ops & ops, int64_t n_layer, int64_t n_cells, int64_t n_tok, int64_t n_group) const {
        static std::vector<float> q, m, z, acc, bias, slope;
        const HeadCodec &         k_codec = k.head.codec;
        const HeadCodec &         v_codec = v.head.codec;
        const int64_t             n_rows  = n_tok * n_group;
        const int64_t runtime = std::clamp<int64_t>(32768 / n_tok / TILE * TILE, TILE, 1024); // node_attend.cpp
        const int64_t at_once = span > 0 ? span : runtime;
        q.assign((size_t) (n_rows * k_codec.rank), 0.05f);
        bias.assign((size_t) (n_tok * at_once), 0.0f);
        slope.assign((size_t) n_group, 1.0f);
        m.assign((size_t) (N_HEAD * n_rows), -INFINITY);
        z.assign((size_t) (N_HEAD * n_rows), 0.0f);
        acc.assign((size_t) (N_HEAD * n_rows * v_codec.rank), 0.0f);
        for (int64_t layer = 0; layer < n_layer; ++layer) {
            for (int64_t first = 0; first < n_cells; first += at_once) {
                for (int64_t h = 0; h < N_HEAD; ++h) {
                    ops.attend({ &k_codec, &v_codec, k.at(layer, h, first), v.at(layer, h, first), k.stride(),
                                 v.stride(), std::min(at_once, n_cells - first), n_tok, n_group, q.data(), nullptr,
                                 bias.data(), at_once, slope.data(), 0.0f, m.data() + h * n_rows, z.data() + h * n_rows,
                                 acc.data() + h * n_rows * v_codec.rank, v_codec.rank });
                }
            }
        }
        return n_layer * n_cells * N_HEAD;
    }

    double read(int64_t n_layer) const {
        for (const Side * side : { &k, &v }) {
            read_all(side->tiles.data(), (size_t) (n_layer * side->lines));
        }
        return (double) (n_layer * N_CELLS * N_HEAD);
    }

    Figure figure(const std::string & name, int64_t n_layer, int64_t n_tok, int64_t n_group) const {
        const int64_t n_rows = n_tok * n_group;
        const double  bytes  = n_tok > 1 ? 0.0 : k.head.codec.row_bytes + v.head.codec.row_bytes;
        Figure        one    = { name + ", " + std::to_string(n_rows) + " query rows", bytes, nullptr, nullptr };
        one.run              = [=](const Ops & ops) {
            const bool    slow = &ops == &ops_ref();
            const int64_t n    = attend(ops, slow ? 1 : n_layer, slow ? FEW : N_CELLS, n_tok, n_group);
            return (double) (n_tok > 1 ? n * n_rows : n);
        };
        if (n_tok == 1) {
            one.read = [=] { return read(n_layer); };
        }
        return one;
    }
};

// One token over N_CHOSEN cells of all layers, adjacent ones or every n-th. The latter are gathered first, from tiles
// or from rows (runtime/native/engine/cells.h; arbitrary bytes serve as rows). In latent attention values are copied
// out of keys, as in node_attend.cpp. The next call uses other cells.
constexpr int64_t N_CHOSEN = 2048;

enum class Cells { IN_A_ROW, OF_TILES, OF_ROWS };

int64_t attend_chosen(const Cache & cache, const Ops & ops, Cells which, bool latent, int64_t n_group) {
    const bool                  spread = which != Cells::IN_A_ROW;
    static std::vector<float>   q, m, z, acc, bias, slope;
    static std::vector<Line>    keys, values;
    static int64_t              call = 0;
    static std::vector<int32_t> cells;
    const HeadCodec &           k       = cache.k.head.codec;
    const HeadCodec &           v       = cache.v.head.codec;
    constexpr int64_t           n_all   = N_LAYER * (N_CELLS / TILE * TILE);
    constexpr int64_t           n_apart = 131072 / N_CHOSEN;
    constexpr int64_t           AT_ONCE = 1024; // a segment of node_attend.cpp
    q.assign((size_t) (n_group * k.rank), 0.05f);
    bias.assign((size_t) AT_ONCE, 0.0f);
    slope.assign((size_t) n_group, 1.0f);
    keys.resize((size_t) (AT_ONCE * k.row_bytes / LINE));
    values.resize((size_t) (AT_ONCE * v.row_bytes / LINE));
    const int64_t begin = call++ * 9973 * TILE % (n_all - n_apart * N_CHOSEN - TILE) / TILE * TILE;
    for (int64_t h = 0; h < N_HEAD; ++h) {
        m.assign((size_t) n_group, -INFINITY);
        z.assign((size_t) n_group, 0.0f);
        acc.assign((size_t) (n_group * v.rank), 0.0f);
        for (int64_t first = 0; first < N_CHOSEN; first += AT_ONCE) {
            AttendArgs a = { &k,
                             &v,
                             cache.k.at(0, h, begin + first),
                             cache.v.at(0, h, begin + first),
                             cache.k.stride(),
                             cache.v.stride(),
                             AT_ONCE,
                             1,
                             n_group,
                             q.data(),
                             nullptr,
                             bias.data(),
                             AT_ONCE,
                             slope.data(),
                             0.0f,
                             m.data(),
                             z.data(),
                             acc.data(),
                             v.rank };
            if (spread) {
                cells.clear();
                for (int64_t i = first; i < first + AT_ONCE; ++i) {
                    cells.push_back((int32_t) (begin + i * n_apart + random_bits() % n_apart));
                }
                if (which == Cells::OF_ROWS) {
                    const uint8_t * rows = cache.k.at(0, 0, 0) + h * n_all * k.row_bytes;
                    rows_to_tiles(k, rows, k.row_bytes, cells.data(), AT_ONCE, keys[0].bytes());
                } else {
                    gather_cells(k, cache.k.at(0, h, 0), cache.k.stride(), cells.data(), AT_ONCE, keys[0].bytes());
                }
                a.k_tiles  = keys[0].bytes();
                a.k_stride = TILE * k.row_bytes;
                if (!latent) {
                    gather_cells(v, cache.v.at(0, h, 0), cache.v.stride(), cells.data(), AT_ONCE, values[0].bytes());
                }
            }
            for (int64_t t = 0; latent && t < AT_ONCE / TILE; ++t) {
                keys_to_values(v, a.k_tiles + t * a.k_stride, values[0].bytes() + t * TILE * v.row_bytes);
            }
            if (latent || spread) {
                a.v_tiles  = values[0].bytes();
                a.v_stride = TILE * v.row_bytes;
            }
            ops.attend(a);
        }
    }
    return N_CHOSEN * N_HEAD;
}

double read_bandwidth() { // GB/s, from summing 256 MiB
    const std::vector<Line> data(1 << 22);
    std::vector<double>     t;
    for (int i = 0; i < 7; ++i) {
        t.push_back(seconds([&] { read_all(data.data(), data.size()); }));
    }
    return LINE * (double) data.size() / median(t) / 1e9;
}

// Median ns per unit for each column; runs return their number of units and are interleaved. 0: no run. A run that
// takes longer than the budget, as of the scalar reference, is not repeated.
std::vector<double> measure(const std::vector<std::function<double()>> & columns, double budget) {
    std::vector<std::vector<double>> ns(columns.size());
    std::vector<int>                 repeats(columns.size());
    const auto                       add = [&](size_t c, int n) {
        double       units = 0.0;
        const double t     = seconds([&] {
            for (int r = 0; r < n; ++r) {
                units += columns[c]();
            }
        });
        ns[c].push_back(1e9 * t / units);
        return t;
    };
    for (size_t c = 0; c < columns.size(); ++c) {
        const double once = columns[c] ? add(c, 1) : budget;
        if (once < budget) {
            ns[c].clear(); // the first run has cold caches
            repeats[c] = (int) std::max(1.0, std::min(1e5, budget / 5.0 / std::max(once, 1e-9)));
        }
    }
    for (int i = 0; i < 5; ++i) {
        for (size_t c = 0; c < columns.size(); ++c) {
            if (repeats[c] > 0) {
                add(c, repeats[c]);
            }
        }
    }
    std::vector<double> out;
    for (const auto & of : ns) {
        out.push_back(of.empty() ? 0.0 : median(of));
    }
    return out;
}

class Bench {
public:
    // span: cells of a call; 0: as many as a figure says
    explicit Bench(int64_t span) :
        mixed({ { 8, 8 }, { 8, 6 }, { 16, 4 }, { 32, 3 } }, { { 8, 6 }, { 40, 4 }, { 16, 3 } }, span),
        wide({ { 16, 8 }, { 32, 6 }, { 16, 5 } }, { { 32, 6 }, { 32, 5 } }, span),
        fine({ { 8, 16 }, { 24, 8 }, { 32, 6 } }, { { 16, 8 }, { 48, 6 } }, span),
        plain({ { 64, 4 } }, { { 64, 4 } }, span),
        large({ { 16, 8 }, { 16, 6 }, { 32, 4 }, { 64, 3 } }, { { 16, 6 }, { 80, 4 }, { 32, 3 } }, span),
        latent({ { 64, 8 }, { 64, 6 }, { 128, 4 }, { 256, 3 }, { 8, 6 }, { 40, 4 }, { 16, 3 } },
               { { 64, 8 }, { 64, 6 }, { 128, 4 }, { 256, 3 } }, span) {
        for (float & value : x) {
            value = uniform();
        }
        for (size_t i = 0; i < cells.size(); ++i) {
            cells[i] = (int64_t) i;
        }
        for (size_t i = 0; i < 136; ++i) {
            exact.push_back(halves.data() + 64 * i);
        }
        add_attend();
        add_chosen();
        add_others();
    }

    // name: part of a figure's name, or nullptr: all. budget: seconds per figure.
    void print(const char * name, double budget) const {
        const CoreSpeed core = core_speed();
        std::printf("read bandwidth of one thread: %.1f GB/s; core: %.2f GHz, %.1f additions per cycle\n\n",
                    read_bandwidth(), core.clock_ghz, core.additions_per_cycle);
        std::printf("%-48s%18s", "ns (GB/s of codes)", "read");
        for (const Ops * ops : versions()) {
            std::printf("%18s", ops->name);
        }
        std::printf("\n");
        for (const Figure & figure : figures) {
            if (!name || figure.what.find(name) != std::string::npos) {
                print(figure, budget);
            }
        }
    }

private:
    static void print(const Figure & figure, double budget) {
        std::vector<std::function<double()>> columns = { figure.read };
        for (const Ops * ops : versions()) {
            columns.push_back([&figure, ops] { return figure.run(*ops); });
        }
        std::printf("%-48s", figure.what.c_str());
        for (const double ns : measure(columns, budget)) {
            char cell[64] = "";
            if (ns > 0.0 && figure.bytes > 0.0) {
                std::snprintf(cell, sizeof(cell), "%.2f (%.1f)", ns, figure.bytes / ns);
            } else if (ns > 0.0) {
                std::snprintf(cell, sizeof(cell), "%.2f", ns);
            }
            std::printf("%18s", cell);
        }
        std::printf("\n");
        std::fflush(stdout);
    }

    void add(std::string what, double units, const std::function<void(const Ops & ops)> & run) {
        figures.push_back({ std::move(what), 0.0, [=](const Ops & ops) { return run(ops), units; }, nullptr });
    }

    void add_attend() {
        figures = {
            mixed.figure("attend 64 dims 4.2 bits", N_LAYER, 1, 1),
            mixed.figure("attend 64 dims 4.2 bits", N_LAYER, 1, 3),
            mixed.figure("attend 64 dims 4.2 bits", N_LAYER, 1, 8),
            wide.figure("attend 64 dims 5.9 bits", N_LAYER, 1, 3),
            fine.figure("attend 64 dims 7.3 bits, 16-bit band", N_LAYER, 1, 3),
            plain.figure("attend 64 dims 4.0 bits", N_LAYER, 1, 3),
            large.figure("attend 128 dims 4.1 bits", N_LAYER, 1, 1),
            large.figure("attend 128 dims 4.1 bits", N_LAYER, 1, 2),
            large.figure("attend 128 dims 4.1 bits", N_LAYER, 1, 4),
            large.figure("attend 128 dims 4.1 bits", N_LAYER, 1, 8),
            mixed.figure("attend 64 dims 4.2 bits, in cache", 1, 1, 3),
            mixed.figure("attend 64 dims 4.2 bits", 1, 42, 3),
            mixed.figure("attend 64 dims 4.2 bits", 1, 128, 1),
            fine.figure("attend 64 dims 7.3 bits, 16-bit band", 1, 42, 3),
            large.figure("attend 128 dims 4.1 bits", 1, 32, 4),
        };
    }

    // Selected cells; only latent layers store them as rows.
    void add_chosen() {
        for (const auto & [which, text] :
             { std::pair{ Cells::IN_A_ROW, ", 2048 in a row" }, std::pair{ Cells::OF_TILES, ", 2048 of 131072 chosen" },
               std::pair{ Cells::OF_ROWS, ", 2048 of 131072 chosen, as rows" } }) {
            const Cells       cells_of = which;
            const std::string what     = text;
            const auto        figure   = [&](std::string name, const Cache & cache, bool is_latent, int64_t n_group) {
                figures.push_back({ name + what + ", " + std::to_string(n_group) + " query rows", 0.0,
                                    [&cache, cells_of, is_latent, n_group](const Ops & ops) {
                                        return (double) attend_chosen(cache, ops, cells_of, is_latent, n_group);
                                    },
                                    nullptr });
            };
            if (which != Cells::OF_ROWS) {
                figure("chosen 128 dims 4.1 bits", large, false, 4);
                figure("chosen 128 dims 4.1 bits", large, false, 8);
            }
            figure("chosen latent 576 dims 4.2 bits", latent, true, 128);
        }
    }

    void add_others() {
        const HeadCodec & codec = mixed.k.head.codec;
        tile.resize((size_t) codec.row_bytes);
        add("encode 64 dims 4.2 bits, one cell", TILE, [&](const Ops & ops) {
            for (size_t i = 0; i < TILE; ++i) {
                ops.encode(codec, x.data() + 64 * i, 64, 1, cells.data() + i, tile[0].bytes(), 0);
            }
        });
        add("encode 64 dims 4.2 bits, 64 cells", TILE,
            [&](const Ops & ops) { ops.encode(codec, x.data(), 64, TILE, cells.data(), tile[0].bytes(), 0); });
        add("project 64x64, 1 row", 1,
            [&](const Ops & ops) { ops.project(codec.decode, 64, 64, x.data(), 64, 1, 1.0f, y.data(), 64); });
        add("project 64x64, 64 rows", 64,
            [&](const Ops & ops) { ops.project(codec.decode, 64, 64, x.data(), 64, 64, 1.0f, y.data(), 64); });
        add("reconstruct 64x64", 1,
            [&](const Ops & ops) { ops.reconstruct(codec.decode, 64, 64, x.data(), y.data()); });
        add("moment 64 dims", 64, [&](const Ops & ops) { ops.moment(x.data(), 64, 64, 64, s.data(), sum.data()); });
        add("attend_exact 64 dims, 136 keys, 3 query rows", 136, [&](const Ops & ops) {
            std::fill(m.begin(), m.end(), -INFINITY);
            ops.attend_exact({ 64, 64, 136, exact.data(), exact.data(), 1, 3, x.data(), zeros.data(), 136, slope.data(),
                               0.0f, m.data(), z.data(), y.data(), 64 });
        });
    }

    const Cache         mixed, wide, fine, plain, large, latent;
    std::vector<Figure> figures;

    // rows and scratch memory of add_others
    std::vector<float>            x      = std::vector<float>(64 * 64);
    std::vector<float>            y      = std::vector<float>(64 * 64);
    std::vector<int64_t>          cells  = std::vector<int64_t>(64);
    std::vector<double>           s      = std::vector<double>(64 * 64);
    std::vector<double>           sum    = std::vector<double>(64);
    std::vector<uint16_t>         halves = std::vector<uint16_t>(136 * 64, half(0.25f));
    std::vector<float>            zeros  = std::vector<float>(136, 0.0f);
    std::vector<float>            m      = std::vector<float>(3);
    std::vector<float>            z      = std::vector<float>(3);
    std::vector<float>            slope  = std::vector<float>(3, 1.0f);
    std::vector<Line>             tile;
    std::vector<const uint16_t *> exact;
};

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
    const int64_t span = argc > 3 ? std::atoll(argv[3]) : 0;
    if (span < 0 || span % TILE != 0) {
        std::fprintf(stderr, "kernel-bench: cells of a call: expected a multiple of %d, found '%s'\n", TILE, argv[3]);
        return 1;
    }
    Bench(span).print(argc > 2 ? argv[2] : nullptr, budget);
    return 0;
}
