// capi.cpp: C names of the Vulkan ops, for ctypes, with the arguments of the CUDA ops (cuda_ops.py): the same tests run
// both. Addresses are host addresses of mapped buffers.
#include "../../../kernels/cuda/ops.h"
#include "../../../kernels/vulkan/ops.h"
#include "device.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

using namespace subkv;

namespace {

constexpr size_t BEFORE = 64; // bytes before the data, so that shaders must add offsets

std::unique_ptr<Device> device;
std::string             error;
bool                    integer_dot = false;
std::vector<double>     times; // ms, one per run of the next op; empty: run it once, untimed

vulkan::Place place(const void * address) {
    if (!address) {
        return {};
    }
    const Allocation & a = device->of(address);
    return { &a, (uint64_t) ((const uint8_t *) address - a.data) };
}

const char * run(void *, const vulkan::Dispatch & dispatch) {
    return device->record(dispatch);
}

// Memory of a call.
class Scratch {
public:
    Scratch(size_t bytes, size_t before) : data_(device->allocate(bytes, before)) {}
    Scratch(const Scratch &)             = delete;
    Scratch & operator=(const Scratch &) = delete;
    ~Scratch() { device->free(data_); }

    uint32_t *   words() { return (uint32_t *) data_; }
    const void * data() const { return data_; }

private:
    void * data_;
};

class Layer {
public:
    Layer(const cuda::Layer & l, int32_t n_sink, int32_t n_recent) :
        Layer(l, vulkan::make_tables(tables_of(l, n_sink, n_recent)).words) {}

    ~Layer() { *from_.n_bad = *memory_.words(); }

    vulkan::Layer layer() {
        return { place(memory_.words()), from_.n_head_kv, from_.n_group, from_.d_k,   from_.d_v,   from_.width_k,
                 from_.width_v,          from_.scale,     from_.softcap, integer_dot, from_.latent };
    }

private:
    Layer(const cuda::Layer & l, const std::vector<uint32_t> & words) : from_(l), memory_(4 * words.size(), 0) {
        std::memcpy(memory_.words(), words.data(), 4 * words.size());
        *memory_.words() = (uint32_t) *l.n_bad;
    }

    static vulkan::LayerTables tables_of(const cuda::Layer & l, int32_t n_sink, int32_t n_recent) {
        vulkan::LayerTables t;
        t.k.assign(l.k, l.k + l.n_head_kv);
        t.v.assign(l.v, l.v + l.n_head_kv);
        t.k_offset.assign(l.k_offset, l.k_offset + l.n_head_kv);
        t.v_offset.assign(l.v_offset, l.v_offset + l.n_head_kv);
        t.gamma.assign(l.gamma, l.gamma + l.n_head_kv);
        t.mean.assign(l.mean, l.mean + l.n_head_kv);
        t.slope.assign(l.slope, l.slope + l.n_head_kv * l.n_group);
        t.n_sink   = n_sink;
        t.n_recent = n_recent;
        t.latent   = l.latent;
        return t;
    }

    const cuda::Layer & from_;
    Scratch             memory_;
};

// Results of attend in one buffer, copied from and to the test's arrays.
class Partial {
public:
    // words: packed queries per row
    Partial(const cuda::Attend & a, size_t words) :
        a_(a), rows_((size_t) (a.n_split * a.layer.n_head_kv * a.n_stream * a.n_tps * a.layer.n_group)),
        queries_(rows_ / (size_t) a.n_split), width_k_((size_t) a.layer.width_k), width_v_((size_t) a.layer.width_v),
        memory_(4 * (rows_ * (2 + width_v_) + queries_ * (width_k_ + 1 + words)), BEFORE) {
        std::memcpy(m(), a.m, 4 * rows_);
        std::memcpy(z(), a.z, 4 * rows_);
        std::memcpy(acc(), a.acc, 4 * rows_ * width_v_);
    }

    ~Partial() {
        std::memcpy(a_.m, m(), 4 * rows_);
        std::memcpy(a_.z, z(), 4 * rows_);
        std::memcpy(a_.acc, acc(), 4 * rows_ * width_v_);
    }

    uint32_t * m() { return memory_.words(); }
    uint32_t * z() { return m() + rows_; }
    uint32_t * acc() { return z() + rows_; }
    uint32_t * qt() { return acc() + rows_ * width_v_; }
    uint32_t * shift() { return qt() + queries_ * width_k_; }
    uint32_t * packed() { return shift() + queries_; }

private:
    const cuda::Attend & a_;
    size_t               rows_, queries_, width_k_, width_v_;
    Scratch              memory_;
};

vulkan::Attend attend_of(const cuda::Attend & a, Layer & layer, Partial & partial) {
    vulkan::Attend b = {};
    b.layer          = layer.layer();
    b.q              = place(a.q);
    b.q_head         = a.q_head;
    b.q_token        = a.q_token;
    b.k_tiles        = place(a.k_tiles);
    b.v_tiles        = place(a.v_tiles);
    b.k_stride       = a.k_stride;
    b.v_stride       = a.v_stride;
    b.k_stream       = a.k_stream;
    b.v_stream       = a.v_stream;
    b.mask           = place(a.mask);
    b.mask_half      = a.mask_half;
    b.cell_pos       = place(a.cell_pos);
    b.tokens         = place(a.tokens);
    b.n_kv           = a.n_kv;
    b.n_stream       = a.n_stream;
    b.n_tps          = a.n_tps;
    b.split          = a.split;
    b.n_split        = a.n_split;
    b.m              = place(partial.m());
    b.z              = place(partial.z());
    b.acc            = place(partial.acc());
    b.qt             = place(partial.qt());
    b.shift          = place(partial.shift());
    b.packed         = vulkan::packed_words(b.layer) > 0 ? place(partial.packed()) : b.qt;
    return b;
}

// Runs the commands that `record` records. Returns nullptr or the error.
template <typename Record> const char * submit(Record record) {
    try {
        for (size_t i = 0; i < std::max<size_t>(1, times.size()); ++i) {
            device->begin();
            if (!times.empty()) {
                device->start_timer();
            }
            if (const char * reason = record()) {
                device->abandon();
                return reason;
            }
            if (!times.empty()) {
                device->stop_timer();
            }
            if (const char * reason = device->finish()) {
                return reason;
            }
            if (!times.empty()) {
                times[i] = device->elapsed();
            }
        }
        return nullptr;
    } catch (const std::exception & e) {
        device->abandon();
        error = e.what();
        return error.c_str();
    }
}

} // namespace

extern "C" {

// Returns nullptr or an error. dot: use a device with integer dot products.
const char * test_open(bool validate, bool dot) {
    try {
        device.reset(new Device(validate, dot));
        integer_dot = dot;
        return nullptr;
    } catch (const std::exception & e) {
        error = e.what();
        return error.c_str();
    }
}

const char * test_device() {
    return device->name().c_str();
}

uint32_t test_max_range() {
    return device->max_range();
}

// Later ops run n times and are timed; 0: once, untimed.
void test_set_times(uint32_t n) {
    times.assign(n, 0.0);
}

const double * test_times() {
    return times.data();
}

const char * test_copy(const size_t * size, void *) {
    const Scratch from(*size, 0), to(*size, 0);
    return submit([&] { return device->copy(from.data(), to.data(), *size); });
}

void * test_allocate(size_t size) {
    return device->allocate(size, BEFORE);
}

void test_free(void * data) {
    device->free(data);
}

void test_set_barriers(bool on) {
    device->barriers = on;
}

// Messages of the validation layer since the last call.
uint32_t test_messages() {
    const uint32_t n   = device->n_messages;
    device->n_messages = 0;
    return n;
}

const char * test_last_message() {
    return device->last_message.c_str();
}

const char * test_encode(const cuda::Encode * e, void *) {
    Layer          layer(e->layer, 0, 0);
    vulkan::Encode to = {};
    to.layer          = layer.layer();
    to.k              = place(e->k);
    to.v              = place(e->v);
    to.k_head         = e->k_head;
    to.k_token        = e->k_token;
    to.v_head         = e->v_head;
    to.v_token        = e->v_token;
    to.k_tiles        = place(e->k_tiles);
    to.v_tiles        = place(e->v_tiles);
    to.k_stride       = e->k_stride;
    to.v_stride       = e->v_stride;
    to.cells          = place(e->cells);
    to.fresh          = place(e->fresh);
    to.n_tok          = e->n_tok;
    return submit([&] { return vulkan::encode(to, run, nullptr); });
}

const char * test_project_queries(const cuda::Attend * a, void *) {
    Layer   layer(a->layer, a->n_sink, a->n_recent);
    Partial partial(*a, (size_t) vulkan::packed_words(layer.layer()));
    return submit([&] { return vulkan::project_queries(attend_of(*a, layer, partial), run, nullptr); });
}

const char * test_attend(const cuda::Attend * a, void *) {
    Layer   layer(a->layer, a->n_sink, a->n_recent);
    Partial partial(*a, (size_t) vulkan::packed_words(layer.layer()));
    return submit([&] { return vulkan::attend(attend_of(*a, layer, partial), run, nullptr); });
}

const char * test_combine(const cuda::Combine * b, void *) {
    Layer           layer(b->a.layer, b->a.n_sink, b->a.n_recent);
    Partial         partial(b->a, (size_t) vulkan::packed_words(layer.layer()));
    vulkan::Combine to = {};
    to.a               = attend_of(b->a, layer, partial);
    to.fresh           = place(b->fresh);
    to.window          = place(b->window ? b->window : b->fresh);
    to.slots           = place(b->slots);
    to.slots_of_seq    = b->slots_of_seq;
    to.sinks           = place(b->sinks);
    to.out             = place(b->out);
    to.out_stride      = b->out_stride;
    return submit([&] { return vulkan::combine(to, run, nullptr); });
}

bool test_suits_prompt(const cuda::Layer *) {
    return true;
}

static vulkan::Prompt prompt_of(const cuda::Prompt & p, Layer & layer, Partial & partial) {
    vulkan::Prompt to = {};
    to.c.a            = attend_of(p.c.a, layer, partial);
    to.c.fresh        = place(p.c.fresh);
    to.c.window       = place(p.c.window ? p.c.window : p.c.fresh);
    to.c.slots        = place(p.c.slots);
    to.c.slots_of_seq = p.c.slots_of_seq;
    to.n_slots        = p.n_slots;
    to.n_rows         = p.n_rows;
    to.first          = p.first;
    to.n_heads        = p.n_heads;
    to.k              = place(p.k);
    to.v              = place(p.v);
    to.mask           = place(p.mask);
    to.c.out          = place(p.c.out);
    to.c.out_stride   = p.c.out_stride;
    return to;
}

const char * test_prompt_rows(const cuda::Prompt * p, void *) {
    Layer   layer(p->c.a.layer, p->c.a.n_sink, p->c.a.n_recent);
    Partial partial(p->c.a, (size_t) vulkan::packed_words(layer.layer()));
    return submit([&] { return vulkan::prompt_rows(prompt_of(*p, layer, partial), run, nullptr); });
}

const char * test_prompt_mask(const cuda::Prompt * p, void *) {
    Layer   layer(p->c.a.layer, p->c.a.n_sink, p->c.a.n_recent);
    Partial partial(p->c.a, (size_t) vulkan::packed_words(layer.layer()));
    return submit([&] { return vulkan::prompt_mask(prompt_of(*p, layer, partial), run, nullptr); });
}

const char * test_prompt_lost(const cuda::Prompt * p, void *) {
    Layer   layer(p->c.a.layer, p->c.a.n_sink, p->c.a.n_recent);
    Partial partial(p->c.a, (size_t) vulkan::packed_words(layer.layer()));
    return submit([&] { return vulkan::prompt_lost(prompt_of(*p, layer, partial), run, nullptr); });
}

const char * test_store_window(const cuda::Store * s, void *) {
    const vulkan::Store to = { place(s->window), place(s->fresh), place(s->slots), s->n_slots, s->width };
    return submit([&] { return vulkan::store_window(to, run, nullptr); });
}
}
