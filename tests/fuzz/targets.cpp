// targets.cpp: readers of untrusted input: layouts, files, and subkv's parts of a state.
#include "targets.h"

#include "base64.h"
#include "chunked.h"
#include "device.h"
#include "error.h"
#include "layout.h"
#include "node_sources.h"
#include "window.h"

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <unistd.h>

namespace subkv {

// This build has only the reference kernels and no GPU kernels.
const Ops & ops() {
    return ops_ref();
}

bool has_device_kernels(ggml_backend_buffer_type_t) {
    return false;
}

} // namespace subkv

using namespace subkv;

namespace {

Bytes bytes_of(const std::string & text) {
    return Bytes(text.begin(), text.end());
}

//
// subkv.layout: a byte for the number of blocks, then the text
//

void run_layout(const uint8_t * data, size_t n) {
    if (n == 0) {
        return;
    }
    std::vector<LayerSpec> layers;
    const std::string      text((const char *) data + 1, n - 1);
    try {
        layers = parse_layout(text, data[0]);
    } catch (const Invalid &) {
        return;
    }
    // the canonical form parses to the same layout
    const std::string canonical = canonical_layout(layers);
    EXPECT(canonical_layout(parse_layout(canonical, data[0])) == canonical);
    for (const LayerSpec & layer : layers) {
        EXPECT(layer.il < data[0] && layer.basis_bytes() > 0);
    }
}

std::vector<Bytes> seeds_layout() {
    const std::string first = R"({"il":0,"n_head_kv":1,"d_k":32,"d_v":32,"k":[[[8,8],[16,4]]],"v":[[[32,16]]]})";
    const std::string later =
        R"({"il":1,"n_head_kv":2,"d_k":64,"d_v":64,"k":[[[64,3]],[[8,2]]],"v":[[[64,5]],[[8,6],[8,4]]]})";
    return { bytes_of("\x02{\"layers\":[" + first + "]}"), bytes_of("\x02{\"layers\":[" + first + "," + later + "]}") };
}

//
// base64: the number of bytes that are expected, u8, then the text
//

void run_base64(const uint8_t * data, size_t n) {
    if (n == 0) {
        return;
    }
    Bytes out(data[0]);
    try {
        base64_decode("key", { (const char *) data + 1, n - 1 }, out.data(), out.size());
    } catch (const Invalid &) {
    }
}

std::vector<Bytes> seeds_base64() {
    return { bytes_of("\6c3Via3Yh"), bytes_of("\5c3Via3Y="), bytes_of("\4c3Viaw==") };
}

//
// a whole file, from memory
//

void run_file(const uint8_t * data, size_t n) {
    static const int  fd   = fileno(std::tmpfile());
    static const auto path = "/dev/fd/" + std::to_string(fd);
    // in this order: of a file that was emptied first ext4 sends every version to the disk
    EXPECT(pwrite(fd, data, n, 0) == (ssize_t) n && ftruncate(fd, (off_t) n) == 0);
    try {
        const auto layout = load_layout(path.c_str());
        EXPECT(!layout->fingerprint.empty() && !layout_to_json(*layout).empty());
        for (const PlanFacts & plan : layout->plans) {
            load_layout(path.c_str(), plan.budget);
        }
    } catch (const Invalid &) {
    }
}

std::vector<Bytes> seeds_file() {
    return { bytes_of(std::string("GGUF\3\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 24)) };
}

//
// states
//

class Written : public StateWriter {
public:
    void write(const void * data, size_t size) override {
        bytes.insert(bytes.end(), (const uint8_t *) data, (const uint8_t *) data + size);
    }

    void write_tensor(ggml_tensor * t, size_t offset, size_t size) override {
        write((const char *) t->data + offset, size);
    }

    Bytes bytes;
};

class Read : public StateReader {
public:
    Read(const uint8_t * data, size_t n) : data(data), left(n) {}

    void read(void * out, size_t size) override {
        if (size > left) {
            throw std::runtime_error("the end");
        }
        std::copy_n(data, size, (uint8_t *) out);
        data += size;
        left -= size;
    }

    void read_tensor(ggml_tensor * t, size_t offset, size_t size) override { read((char *) t->data + offset, size); }

private:
    const uint8_t * data;
    size_t          left;
};

// Cells of one sequence at positions 0 .. n - 1.
class Cells : public CellReader {
public:
    explicit Cells(int32_t n) : n(n) {}

    uint32_t stream_of(int32_t) const override { return 0; }

    void positions(uint32_t, uint32_t count, int32_t * out) const override {
        for (uint32_t i = 0; i < count; ++i) {
            out[i] = (int32_t) i < n ? (int32_t) i : -1;
        }
    }

    void find(int32_t, int32_t p0, int32_t p1, std::vector<PosCell> & out) const override {
        out.clear();
        for (int32_t p = std::max(0, p0); p < std::min(n, p1); ++p) {
            out.push_back({ p, p });
        }
    }

    void find_all(int32_t seq, int32_t p0, int32_t p1, std::vector<PosCell> & out) const override {
        find(seq, p0, p1, out);
    }

    bool    shared(int32_t, int32_t) const override { return false; }
    int32_t max_pos_outside(int32_t, int32_t, int32_t) const override { return n - 1; }

private:
    int32_t n;
};

constexpr int32_t N_CELLS = 100;

// A window that holds the rows of N_CELLS positions, or of none.
std::unique_ptr<Window> make_window(bool filled) {
    auto window = std::make_unique<Window>(2, 8, 4, 1);
    window->allocate({ { 0, 1, 1, 8, 8, false, false, ggml_backend_cpu_buffer_type() } }, { true }, false);
    if (!filled) {
        return window;
    }
    const ggml_context_ptr ctx(ggml_init({ 1 << 20, nullptr, false }));
    const int32_t          seq = 0;
    for (int32_t pos = 0; pos < N_CELLS; ++pos) {
        Inputs in;
        in.tokens = new_token_rows(ctx.get(), 1);
        in.slots  = new_slot_rows(ctx.get(), window->n_slots());
        window->set_inputs(in, { { pos, 1, &seq, 0, pos } }, Cells(pos));
    }
    return window;
}

void run_window(const uint8_t * data, size_t n) {
    const auto  window = make_window(false);
    const Cells cells(N_CELLS);
    Read        from(data, n);
    try {
        window->state_read(from, 0, { 0 }, cells);
    } catch (const std::runtime_error &) {
        return;
    }
    // a restored window is usable
    const int32_t seq = 0;
    window->ready({ { N_CELLS, 1, &seq, 0, N_CELLS } }, cells);
    window->stays_complete(0, N_CELLS - 3, N_CELLS, cells);
    window->forget(0, 0, MAX_POSITION);
    Written again;
    window->state_write(again, 0);
}

std::vector<Bytes> seeds_window() {
    Written full, empty;
    make_window(true)->state_write(full, 0);
    make_window(false)->state_write(empty, 0);
    return { full.bytes, empty.bytes };
}

// One layer of one head of eight coefficients, E = D = 1.
const Layout & small_layout() {
    static const Layout * layout = [] {
        static uint16_t identity[64] = {};
        auto *          made         = new Layout;
        LayerCodec      layer;
        HeadCodec       head = {};
        for (int i = 0; i < 8; ++i) {
            identity[9 * i] = 0x3c00;
        }
        head.d         = 8;
        head.row_bytes = 1;
        head.encode    = { identity };
        head.decode    = { identity };
        add_band(head, 8, 8, 1.0f);
        layer.n_head_kv = 1;
        layer.d_k = layer.d_v = 8;
        layer.k.push_back(head);
        head.value = 1;
        layer.v.push_back(head);
        layer.gamma       = { 1.0f };
        layer.k_row_bytes = layer.v_row_bytes = (size_t) head.row_bytes;
        layer.k_offset = layer.v_offset = { 0 };
        made->layers.push_back(layer);
        return made;
    }();
    return *layout;
}

// anchored: with a window and look-ahead.
AdaptParams eager(bool anchored = false) {
    AdaptParams p = {};
    p.kind        = (int32_t) SketchKind::FREQUENT_DIRECTIONS;
    p.decay       = 1.0f;
    p.rate        = 0.5f;
    p.block       = 8;
    p.length      = 16;
    p.warm        = 16;
    p.max_chunks  = 3;
    p.tau         = 1.0f;
    p.gain        = 100.0f;
    p.merge       = 1;
    p.window      = anchored ? 24 : 0;
    p.lookahead   = anchored ? 8 : 0;
    return Adapter::checked(p, 8);
}

// Codes n blocks of some numbers.
void follow(Adapter & adapter, int n) {
    const int32_t        ahead = adapter.params().lookahead;
    std::vector<float>   x((size_t) (8 + ahead) * 8);
    std::vector<uint8_t> tiles((size_t) (TILE * small_layout().layers[0].k[0].row_bytes));
    const int64_t        cells[8] = { 0, 1, 2, 3, 4, 5, 6, 7 };
    uint32_t             state    = 1;
    for (int i = 0; i < n; ++i) {
        for (float & value : x) {
            state = state * 1664525 + 1013904223;
            value = (float) (int32_t) state * 0x1p-31f;
        }
        adapter.block(x.data(), 8, 8, ahead, cells, tiles.data(), (int64_t) tiles.size(),
                      [](int32_t, int32_t, const Adapter::Recode &) {});
    }
}

void restore_adapter(const uint8_t * data, size_t n, bool anchored) {
    Adapter            adapter(ops(), small_layout().layers[0].k[0], eager(anchored));
    const Bytes        before = adapter.save();
    std::vector<float> q(8, 1.0f), out(8);
    try {
        adapter.restore(data, n);
    } catch (const Invalid &) {
        EXPECT(adapter.save() == before);
        return;
    }
    const Bytes kept = adapter.save();
    adapter.restore(kept.data(), kept.size());
    EXPECT(adapter.save() == kept);
    for (int32_t slot = 0; slot <= adapter.params().max_chunks; ++slot) {
        if (slot == 0 || adapter.chunk(slot)) {
            adapter.query(slot, q.data(), out.data());
            adapter.lift(slot, q.data(), out.data());
        }
    }
    follow(adapter, 3);
}

void run_adapter(const uint8_t * data, size_t n) {
    restore_adapter(data, n, false);
    restore_adapter(data, n, true);
}

std::vector<Bytes> seeds_adapter() {
    std::vector<Bytes> seeds;
    for (const int n : { 0, 3, 12 }) {
        for (const bool anchored : { false, true }) {
            Adapter adapter(ops(), small_layout().layers[0].k[0], eager(anchored));
            follow(adapter, n);
            seeds.push_back(adapter.save());
        }
    }
    return seeds;
}

void run_adaptive(const uint8_t * data, size_t n) {
    ChunkedBases adaptive(small_layout(), { true, true, eager() }, 1);
    Read         from(data, n);
    try {
        adaptive.state_read(from, 0, MAX_POSITION);
    } catch (const std::runtime_error &) {
        EXPECT(adaptive.coded(0) == 0);
        return;
    }
    EXPECT(adaptive.coded(0) >= 0 && adaptive.coded(0) % 8 == 0);
    Written kept, again;
    adaptive.state_write(kept, 0);
    Read same(kept.bytes.data(), kept.bytes.size());
    adaptive.state_read(same, 0, MAX_POSITION);
    adaptive.state_write(again, 0);
    EXPECT(again.bytes == kept.bytes);
}

std::vector<Bytes> seeds_adaptive() {
    std::vector<Bytes> seeds;
    for (const int n : { 0, 3, 12 }) {
        ChunkedBases adaptive(small_layout(), { true, true, eager() }, 1);
        for (const bool value : { false, true }) {
            ChunkUnit * unit = adaptive.layer(0)->unit(0, 0, value);
            follow(unit->adapter, n);
            unit->coded = 8 * n;
        }
        Written state;
        adaptive.state_write(state, 0);
        seeds.push_back(state.bytes);
    }
    return seeds;
}

} // namespace

const Target TARGETS[] = {
    { "layout", run_layout, seeds_layout },    { "base64", run_base64, seeds_base64 },
    { "file", run_file, seeds_file },          { "window", run_window, seeds_window },
    { "adapter", run_adapter, seeds_adapter }, { "adaptive", run_adaptive, seeds_adaptive },
};
const size_t N_TARGETS = sizeof(TARGETS) / sizeof(TARGETS[0]);
