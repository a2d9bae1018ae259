// abi.cpp: checks that this process's ggml has the structures and functions for which the plug-in was compiled. Version
// numbers do not show it: ggml's does not change with the structures that it shares with backends, and llama.cpp changes
// ggml between two versions. So the plug-in makes objects and reads them through ggml's functions, and reads ggml's.
#include "plugin.h"

#include "ggml-impl.h"
#include "ggml_calls.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <string>
#include <tuple>
#include <utility>

namespace subkv::plugin {

namespace {

GgmlOps found_ops = {};

// What a buffer type has in ggml's structure. API 3 (ggml 0.26) has two more functions than 2, which may be null.
enum { GET_NAME, ALLOC_BUFFER, GET_ALIGNMENT, GET_ALLOC_SIZE, IS_HOST, DEVICE, N_PLACES };

// A version of ggml's interface for backends that the plug-in knows, and the places of these members, in words.
struct Api {
    int                          version;
    std::array<size_t, N_PLACES> places;
};

constexpr Api APIS[] = {
    { 2, { 0, 1, 2, 4, 5, 6 } },
    { 3, { 0, 1, 3, 5, 7, 8 } },
};

const Api * found_api;

// An interface is a structure of pointers to functions. In these objects, each pointer notes its place.
constexpr size_t N_SLOTS = std::tuple_size<BufferType>::value; // more than ggml's structures have
size_t           called;

template <size_t I> uintptr_t slot() {
    called = I;
    return sizeof(called); // a pointer that is not NULL
}

template <size_t... I> std::array<uintptr_t (*)(), N_SLOTS> slots(std::index_sequence<I...>) {
    return { slot<I>... };
}

// An object T whose field `iface` has such pointers. ggml's structure may be larger.
template <typename T> struct Probe {
    T         object;
    uintptr_t behind[N_SLOTS];

    Probe() : object(), behind() {
        const auto all = slots(std::make_index_sequence<N_SLOTS>());
        static_assert(sizeof(object.iface) <= sizeof(all));
        std::memcpy((void *) &object.iface, all.data(), sizeof(object.iface));
    }
};

// Whether ggml, in this call, calls the function of an interface at this offset.
template <typename Call> bool calls(size_t offset, const Call & call) {
    called = N_SLOTS;
    call();
    return called == offset / sizeof(void *);
}

#define CALLS(type, function, call) calls(offsetof(type, function), [&] { (void) (call); })
#define EXPECT(what, condition)                                                                                        \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            return what;                                                                                               \
        }                                                                                                              \
    } while (false)

// The name of the first structure that differs in ggml, or nullptr if all are equal.
const char * check_interfaces(ggml_tensor * t) {
    Probe<ggml_backend_device> dev;
    dev.object.reg = (ggml_backend_reg_t) &called;
    EXPECT("ggml_backend_device", ggml_backend_dev_backend_reg(&dev.object) == dev.object.reg);
    using Device = ggml_backend_device_i;
    std::array<uint8_t, sizeof(ggml_backend_dev_props) + 256> props;
    props.fill(0xff);
    size_t free, total;
    EXPECT("ggml_backend_device_i",
           CALLS(Device, get_name, ggml_backend_dev_name(&dev.object)) &&
               CALLS(Device, get_description, ggml_backend_dev_description(&dev.object)) &&
               CALLS(Device, get_memory, (ggml_backend_dev_memory(&dev.object, &free, &total), 0)) &&
               CALLS(Device, get_type, ggml_backend_dev_type(&dev.object)) &&
               CALLS(Device, get_props,
                     (ggml_backend_dev_get_props(&dev.object, (ggml_backend_dev_props *) props.data()), 0)) &&
               CALLS(Device, init_backend, ggml_backend_dev_init(&dev.object, nullptr)) &&
               CALLS(Device, get_buffer_type, ggml_backend_dev_buffer_type(&dev.object)) &&
               CALLS(Device, supports_op, ggml_backend_dev_supports_op(&dev.object, t)) &&
               CALLS(Device, supports_buft, ggml_backend_dev_supports_buft(&dev.object, nullptr)));
    // ggml has set its structure to zeros.
    EXPECT("ggml_backend_dev_props",
           props[sizeof(ggml_backend_dev_props) - 1] == 0 && props[sizeof(ggml_backend_dev_props)] == 0xff);

    Probe<ggml_backend> backend;
    backend.object.device = &dev.object;
    using Backend         = ggml_backend_i;
    EXPECT("ggml_backend", ggml_backend_get_device(&backend.object) == &dev.object);
    EXPECT("ggml_backend_i",
           CALLS(Backend, get_name, ggml_backend_name(&backend.object)) &&
               CALLS(Backend, free, (ggml_backend_free(&backend.object), 0)) &&
               CALLS(Backend, synchronize, (ggml_backend_synchronize(&backend.object), 0)) &&
               CALLS(Backend, graph_compute, ggml_backend_graph_compute_async(&backend.object, nullptr)));

    auto         words = slots(std::make_index_sequence<N_SLOTS>());
    auto * const type  = (ggml_backend_buffer_type_t) words.data();
    const auto   at    = [](size_t place, const auto & call) { return calls(place * sizeof(void *), call); };
    const auto   is    = [&](const Api & api) {
        return (uintptr_t) ggml_backend_buft_get_device(type) == (uintptr_t) words[api.places[DEVICE]] &&
               at(api.places[GET_NAME], [&] { ggml_backend_buft_name(type); }) &&
               at(api.places[ALLOC_BUFFER], [&] { ggml_backend_buft_alloc_buffer(type, 1); }) &&
               at(api.places[GET_ALIGNMENT], [&] { ggml_backend_buft_get_alignment(type); }) &&
               at(api.places[IS_HOST], [&] { ggml_backend_buft_is_host(type); });
    };
    const auto * const api = std::find_if(std::begin(APIS), std::end(APIS), is);
    EXPECT("ggml_backend_buffer_type", api != std::end(APIS));
    words[api->places[GET_ALLOC_SIZE]] = nullptr; // it would have to be right
    EXPECT("ggml_backend_buffer_type_i", ggml_backend_buft_get_alloc_size(type, t) == ggml_nbytes(t));
    found_api = api;

    const Probe<ggml_backend_buffer> made;
    ggml_backend_buffer_t            buffer = ggml_backend_buffer_init(type, made.object.iface, &called, 64);
    EXPECT("ggml_backend_buffer",
           buffer->buft == type && buffer->context == &called && buffer->size == 64 &&
               std::memcmp((void *) &buffer->iface, (const void *) &made.object.iface, sizeof(buffer->iface)) == 0);
    using Buffer = ggml_backend_buffer_i;
    t->buffer    = buffer;
    t->data      = &called;
    EXPECT("ggml_backend_buffer_i", CALLS(Buffer, get_base, ggml_backend_buffer_get_base(buffer)) &&
                                        CALLS(Buffer, init_tensor, ggml_backend_buffer_init_tensor(buffer, t)) &&
                                        CALLS(Buffer, memset_tensor, (ggml_backend_tensor_memset(t, 0, 0, 4), 0)) &&
                                        CALLS(Buffer, set_tensor, (ggml_backend_tensor_set(t, &total, 0, 4), 0)) &&
                                        CALLS(Buffer, get_tensor, (ggml_backend_tensor_get(t, &total, 0, 4), 0)) &&
                                        CALLS(Buffer, cpy_tensor, ggml_backend_buffer_copy_tensor(t, t)) &&
                                        CALLS(Buffer, clear, (ggml_backend_buffer_clear(buffer, 0), 0)) &&
                                        CALLS(Buffer, free_buffer, (ggml_backend_buffer_free(buffer), 0)));

    Probe<ggml_backend_reg> reg;
    using Reg = ggml_backend_reg_i;
    EXPECT("ggml_backend_reg_i", CALLS(Reg, get_name, ggml_backend_reg_name(&reg.object)) &&
                                     CALLS(Reg, get_device_count, ggml_backend_reg_dev_count(&reg.object)) &&
                                     CALLS(Reg, get_device, ggml_backend_reg_dev_get(&reg.object, 0)) &&
                                     CALLS(Reg, get_proc_address, ggml_backend_reg_get_proc_address(&reg.object, "")));
    return "";
}

void nothing(ggml_tensor *, int, int, void *) {}

bool has_floats(const ggml_tensor * t, int first, std::initializer_list<float> values) {
    return std::memcmp(t->op_params + first, values.begin(), values.size() * sizeof(float)) == 0;
}

// Compares the fields of tensors and graphs that the plug-in and the engine read, and the parameters of the nodes that
// they know.
const char * check_graphs() {
    ggml_context_ptr ctx_ptr(
        ggml_init({ 64 * ggml_tensor_overhead() + ggml_graph_overhead_custom(8, false), nullptr, true }));
    ggml_context * ctx = ctx_ptr.get();
    const auto f32  = [&](int64_t a, int64_t b, int64_t c) { return ggml_new_tensor_3d(ctx, GGML_TYPE_F32, a, b, c); };
    ggml_tensor * t = f32(4, 3, 2);
    ggml_tensor * view = ggml_view_2d(ctx, t, 4, 2, t->nb[1], t->nb[1]);
    ggml_set_name(t, "name");
    EXPECT("ggml_tensor", t->type == GGML_TYPE_F32 && t->ne[0] == 4 && t->ne[1] == 3 && t->ne[2] == 2 &&
                              t->ne[3] == 1 && t->nb[0] == 4 && t->nb[1] == 16 && t->nb[2] == 48 && !t->data &&
                              !t->buffer && t->op == GGML_OP_NONE && std::strcmp(t->name, "name") == 0 &&
                              view->view_src == t && view->view_offs == 16 && view->src[0] == t &&
                              (const char *) view - (const char *) t >= (ptrdiff_t) sizeof(ggml_tensor));

    ggml_tensor * positions = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, 2);
    ggml_tensor * cells     = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, 3);
    ggml_tensor * half      = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, 4, 3);
    ggml_tensor * mask      = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, 3, 64);
    ggml_tensor * factors   = f32(4, 1, 1);
    ggml_tensor * cast      = ggml_cast(ctx, t, GGML_TYPE_F16);
    ggml_tensor * set       = ggml_set_rows(ctx, half, ggml_view_2d(ctx, t, 4, 3, t->nb[1], 0), cells);
    ggml_tensor * rope      = ggml_rope_ext(ctx, t, positions, factors, 4, GGML_ROPE_TYPE_NEOX, 7, 1, 2, 3, 4, 5, 6);
    ggml_tensor * q         = f32(4, 3, 1);
    ggml_tensor * attend    = ggml_flash_attn_ext(ctx, q, half, half, mask, 1, 2, 3);
    ggml_tensor * custom    = ggml_custom_4d(ctx, GGML_TYPE_F32, 4, 3, 2, 1, &t, 1, nothing, 5, &called);
    ggml_tensor * sinks     = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 1);
    ggml_flash_attn_ext_add_sinks(attend, sinks);

    struct { // ggml_custom_op_params, which only ggml's .c files include
        ggml_custom_op_t fun;
        int              n_tasks;
        void *           userdata;
    } params;
    std::memcpy(&params, custom->op_params, sizeof(params));
    found_ops = { view->op,
                  ggml_reshape_2d(ctx, t, 12, 2)->op,
                  ggml_permute(ctx, t, 0, 2, 1, 3)->op,
                  ggml_transpose(ctx, t)->op,
                  cast->op,
                  ggml_cont(ctx, t)->op,
                  set->op,
                  rope->op,
                  attend->op,
                  custom->op };
    EXPECT("set_rows", set->view_src == half && set->src[0]->view_src == t && set->src[1] == cells);
    EXPECT("rope_ext", rope->src[0] == t && rope->src[1] == positions && rope->src[2] == factors &&
                           rope->op_params[1] == 4 && rope->op_params[2] == GGML_ROPE_TYPE_NEOX &&
                           rope->op_params[4] == 7 && has_floats(rope, 5, { 1, 2, 3, 4, 5, 6 }));
    EXPECT("flash_attn_ext", attend->src[0] == q && attend->src[1] == half && attend->src[2] == half &&
                                 attend->src[3] == mask && attend->src[4] == sinks &&
                                 has_floats(attend, 0, { 1, 2, 3 }));
    EXPECT("custom_4d",
           custom->src[0] == t && params.fun == nothing && params.n_tasks == 5 && params.userdata == &called);
    EXPECT("cast", cast->src[0] == t && cast->type == GGML_TYPE_F16);

    ggml_cgraph * graph = ggml_new_graph_custom(ctx, 8, false);
    ggml_build_forward_expand(graph, custom);
    EXPECT("ggml_cgraph", (void *) graph->nodes == (void *) (graph + 1) && graph->n_nodes == 1 &&
                              ggml_graph_n_nodes(graph) == 1 && graph->nodes[0] == custom);
    return check_interfaces(f32(4, 1, 1));
}

#undef CALLS
#undef EXPECT

} // namespace

const GgmlOps & ggml_ops() {
    return found_ops;
}

int api_version() {
    return found_api->version;
}

BufferType make_buffer_type(AllocBuffer * alloc_buffer, IsHost * is_host, ggml_backend_dev_t device) {
    const auto & places         = found_api->places;
    BufferType   type           = {};
    type[places[GET_NAME]]      = (void *) +[](ggml_backend_buffer_type_t) { return "SUBKV"; };
    type[places[ALLOC_BUFFER]]  = (void *) alloc_buffer;
    type[places[GET_ALIGNMENT]] = (void *) +[](ggml_backend_buffer_type_t) { return ALIGNMENT; };
    type[places[IS_HOST]]       = (void *) is_host;
    type[places[DEVICE]]        = device;
    return type;
}

std::string misfit(const void * caller) {
    const std::string unbound = bind_ggml(caller);
    if (!unbound.empty()) {
        return " " + unbound;
    }
    static const std::string other = check_graphs();
    return other.empty() ?
               "" :
               std::string(", version ") + ggml_version() + ", has another " + other + " than the plug-in knows";
}

} // namespace subkv::plugin

// misfit() of the ggml that this process shows to all libraries
extern "C" __attribute__((visibility("default"))) const char * subkv_plugin_misfit(void) {
    static const std::string why = subkv::plugin::misfit(nullptr);
    return why.c_str();
}
