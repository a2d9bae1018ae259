// buffer.cpp: host memory in which cache tensors of coded layers are as large as their tiles.
#include "backend.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <optional>
#include <set>

namespace subkv::backend {

namespace {

constexpr size_t ALIGNMENT = 128;

struct Memory {
    uint8_t * base;
    size_t    size;
};

Memory & memory(ggml_backend_buffer_t buffer) {
    return *(Memory *) buffer->context;
}

void free_buffer(ggml_backend_buffer_t buffer) {
    std::free(memory(buffer).base);
    delete &memory(buffer);
}

void * get_base(ggml_backend_buffer_t buffer) {
    return memory(buffer).base;
}

void memset_tensor(ggml_backend_buffer_t, ggml_tensor * t, uint8_t value, size_t offset, size_t size) {
    if (!coded(t).codec) {
        std::memset((char *) t->data + offset, value, size);
    }
}

// The rows that a part of a view is about.
struct Rows {
    int64_t first, n;

    Rows(const ggml_tensor * t, const Coded & c, size_t offset, size_t size) {
        const size_t row = ggml_row_size(c.root->type, c.root->ne[0]);
        const size_t at  = (t->view_src ? t->view_offs : 0) + offset;
        GGML_ASSERT(at % row == 0 && size % row == 0 && "states of a coded cache are whole rows");
        first = (int64_t) (at / row);
        n     = (int64_t) (size / row);
    }
};

// Values that are written element by element have states of columns: one element of a run of cells, elements in order.
// A run is decoded at its first column, and coded at its last.
struct Column {
    int64_t element, first, n;
};

std::set<const ggml_tensor *> & roots_by_elements() {
    static std::set<const ggml_tensor *> roots;
    return roots;
}

std::optional<Column> column(const ggml_tensor * t, const Coded & c, size_t offset, size_t size) {
    if (!c.value || roots_by_elements().count(c.root) == 0) {
        return std::nullopt;
    }
    const int64_t at = (int64_t) (((t->view_src ? t->view_offs : 0) + offset) / sizeof(ggml_fp16_t));
    const int64_t n  = c.root->ne[1];
    return Column{ at / n % c.width(), at / (n * c.width()) * n + at % n, (int64_t) (size / sizeof(ggml_fp16_t)) };
}

// Rows [n][width] of a run between its first column and its last.
std::vector<float> & run(const Coded & c, const Column & column) {
    static std::map<std::pair<const ggml_tensor *, int64_t>, std::vector<float>> runs;
    auto &                                                                       rows = runs[{ c.root, column.first }];
    rows.resize((size_t) (column.n * c.width()));
    return rows;
}

void set_tensor(ggml_backend_buffer_t, ggml_tensor * t, const void * data, size_t offset, size_t size) {
    const Coded c = coded(t);
    if (!c.codec) {
        std::memcpy((char *) t->data + offset, data, size);
    } else if (const auto part = column(t, c, offset, size)) {
        std::vector<float> & x = run(c, *part);
        for (int64_t i = 0; i < part->n; ++i) {
            x[(size_t) (i * c.width() + part->element)] = ggml_fp16_to_fp32(((const ggml_fp16_t *) data)[i]);
        }
        if (part->element == c.width() - 1) {
            write_rows(c, part->first, part->n, x.data());
            x = {};
        }
    } else {
        const Rows         rows(t, c, offset, size);
        std::vector<float> x((size_t) (rows.n * c.width()));
        ggml_fp16_to_fp32_row((const ggml_fp16_t *) data, x.data(), (int64_t) x.size());
        write_rows(c, rows.first, rows.n, x.data());
    }
}

void get_tensor(ggml_backend_buffer_t, const ggml_tensor * t, void * data, size_t offset, size_t size) {
    const Coded c = coded(t);
    if (!c.codec) {
        std::memcpy(data, (const char *) t->data + offset, size);
    } else if (const auto part = column(t, c, offset, size)) {
        std::vector<float> & x = run(c, *part);
        if (part->element == 0) {
            read_rows(c, part->first, part->n, x.data());
        }
        for (int64_t i = 0; i < part->n; ++i) {
            ((ggml_fp16_t *) data)[i] = ggml_fp32_to_fp16(x[(size_t) (i * c.width() + part->element)]);
        }
        if (part->element == c.width() - 1) {
            x = {};
        }
    } else {
        const Rows         rows(t, c, offset, size);
        std::vector<float> x((size_t) (rows.n * c.width()));
        read_rows(c, rows.first, rows.n, x.data());
        ggml_fp32_to_fp16_row(x.data(), (ggml_fp16_t *) data, (int64_t) x.size());
    }
}

// A stream to another one: tiles and window. All else takes the way through get and set.
bool cpy_tensor(ggml_backend_buffer_t, const ggml_tensor * src, ggml_tensor * dst) {
    const Coded from = coded(src), to = coded(dst);
    if (!from.codec && !to.codec && ggml_backend_buffer_is_host(src->buffer)) {
        std::memcpy(dst->data, src->data, ggml_nbytes(src));
        return true;
    }
    if (!from.codec || from.codec != to.codec || from.value != to.value) {
        return false;
    }
    const Rows    a(src, from, 0, ggml_nbytes(src)), b(dst, to, 0, ggml_nbytes(dst));
    const int64_t n = from.root->ne[1];
    if (a.n != n || b.n != n || to.root->ne[1] != n) {
        return false;
    }
    std::memcpy((char *) to.root->data + b.first / TILE * to.tile_bytes(),
                (const char *) from.root->data + a.first / TILE * from.tile_bytes(),
                (size_t) (n / TILE * from.tile_bytes()));
    const size_t size = Window::bytes(from) / (size_t) from.root->ne[2];
    std::memcpy((char *) to.root->data + to.all_tile_bytes() + (size_t) (b.first / n) * size,
                (const char *) from.root->data + from.all_tile_bytes() + (size_t) (a.first / n) * size, size);
    return true;
}

void clear(ggml_backend_buffer_t buffer, uint8_t value) {
    std::memset(memory(buffer).base, value, memory(buffer).size);
}

const char * type_name(ggml_backend_buffer_type_t) {
    return "SUBKV";
}

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    const size_t padded = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    auto *       base   = (uint8_t *) std::aligned_alloc(ALIGNMENT, padded);
    if (!base) {
        return nullptr;
    }
    ggml_backend_buffer_i i = {};
    i.free_buffer           = free_buffer;
    i.get_base              = get_base;
    i.memset_tensor         = memset_tensor;
    i.set_tensor            = set_tensor;
    i.get_tensor            = get_tensor;
    i.cpy_tensor            = cpy_tensor;
    i.clear                 = clear;
    return ggml_backend_buffer_init(type, i, new Memory{ base, padded }, size);
}

size_t get_alignment(ggml_backend_buffer_type_t) {
    return ALIGNMENT;
}

// Smaller than ggml_nbytes: allowed where ggml is built without assertions.
size_t get_alloc_size(ggml_backend_buffer_type_t, const ggml_tensor * t) {
    const Coded c = coded(t);
    return c.codec && !t->view_src ? (size_t) c.all_tile_bytes() + Window::bytes(c) : ggml_nbytes(t);
}

bool is_host(ggml_backend_buffer_type_t) { // else copies between streams would read tensors past their buffer methods
    return layout() == nullptr;
}

} // namespace

ggml_backend_buffer_type_t buffer_type() {
    static ggml_backend_buffer_type type = {
        { type_name, alloc_buffer, get_alignment, nullptr, get_alloc_size, is_host }, device(), nullptr
    };
    return &type;
}

void by_elements(const ggml_tensor * root, bool yes) {
    if (yes) {
        roots_by_elements().insert(root);
    } else {
        roots_by_elements().erase(root);
    }
}

Coded coded(const ggml_tensor * t) {
    const ggml_tensor * root = t->view_src ? t->view_src : t;
    int                 il = -1, end = 0;
    char                side = 0;
    if (!layout() || std::strncmp(root->name, "cache_", 6) != 0 ||
        std::sscanf(root->name, "cache_%c_l%d%n", &side, &il, &end) != 2 || root->name[end] != 0) {
        return {};
    }
    if ((side != 'k' && side != 'v') || root->type != GGML_TYPE_F16 || root->ne[1] % TILE != 0) {
        return {};
    }
    const LayerCodec * codec = layout()->layer(il);
    const bool         value = side == 'v';
    if (!codec || codec->latent || root->ne[0] != (int64_t) codec->n_head_kv * (value ? codec->d_v : codec->d_k)) {
        return {};
    }
    const Coded c = { codec, value, root };
    // ggml allocates at most the size of the tensor, so a cache of few cells stays uncoded
    return (size_t) c.all_tile_bytes() + Window::bytes(c) <= ggml_nbytes(root) ? c : Coded();
}

void read_rows(const Coded & c, int64_t first, int64_t n, float * x) {
    const int64_t        d     = c.d();
    const int64_t        width = c.width();
    std::vector<int64_t> cells((size_t) n);
    std::iota(cells.begin(), cells.end(), first);
    std::fill(x, x + n * width, 0.0f);
    for (int64_t h = 0; h < c.codec->n_head_kv; ++h) {
        const HeadCodec &  head = c.codec->head(h, c.value);
        std::vector<float> coefficients((size_t) (n * head.rank));
        ops().dequantize(head, c.tiles(h), c.tile_bytes(), n, cells.data(), coefficients.data());
        for (int64_t i = 0; i < n; ++i) {
            float * row = x + i * width + h * d;
            if (!c.value && head.offset) {
                ggml_fp16_to_fp32_row((const ggml_fp16_t *) c.codec->centre[(size_t) h].mean.data(), row, d);
            }
            ops().reconstruct(head.decode, head.rank, d, coefficients.data() + i * head.rank, row);
        }
    }
    for (int64_t i = 0; i < n; ++i) {
        const int64_t cell = first + i;
        if (const uint16_t * exact = Window(c, cell / c.root->ne[1]).row(cell % c.root->ne[1])) {
            ggml_fp16_to_fp32_row(exact, x + i * width, width);
        }
    }
}

void write_rows(const Coded & c, int64_t first, int64_t n, const float * x) {
    std::vector<int64_t>  cells((size_t) n);
    std::vector<uint16_t> halves((size_t) c.width());
    std::iota(cells.begin(), cells.end(), first);
    for (int64_t h = 0; h < c.codec->n_head_kv; ++h) {
        ops().encode(c.codec->head(h, c.value), x + h * c.d(), c.width(), n, cells.data(), c.tiles(h), c.tile_bytes());
    }
    for (int64_t i = 0; i < n; ++i) {
        const int64_t cell = first + i;
        ggml_fp32_to_fp16_row(x + i * c.width(), halves.data(), c.width());
        Window(c, cell / c.root->ne[1]).put(cell % c.root->ne[1], halves.data());
    }
}

} // namespace subkv::backend
