// shared.cpp: the shared memory of kernels/cuda's launches, counted by the emulation. Each line has a device's limit per
// block, the kernel's name, and bytes, separated by tabs. Heads have full ranks, at 4.3 bits per element.
#include "../../../kernels/cuda/ops.h"

#include <cstdio>
#include <cstdlib>
#include <string>

using namespace subkv::cuda;

extern "C" void   emulated_only_count(size_t most);
extern "C" size_t emulated_last_shared();

namespace {

void print(size_t most, const std::string & name, const char * error) {
    if (error) {
        std::fprintf(stderr, "%s: %s\n", name.c_str(), error);
        std::exit(1);
    }
    std::printf("%zu\t%s\t%zu\n", most, name.c_str(), emulated_last_shared());
}

Attend attend_of(int d, int group, int64_t n_tps) {
    Attend                 a{};
    static const HeadTiles TILES[8] = {};
    a.layer.tiles                   = TILES;
    a.layer.n_head_kv               = 8;
    a.layer.n_group                 = group;
    a.layer.d_k                     = d;
    a.layer.d_v                     = d;
    a.layer.width_k                 = d;
    a.layer.width_v                 = d;
    a.layer.row_bytes_k             = d == 64 ? 36 : 71;
    a.layer.row_bytes_v             = d == 64 ? 34 : 67;
    a.n_stream                      = 1;
    a.n_tps                         = n_tps;
    a.n_split                       = 1;
    return a;
}

// DeepSeek: 16 query heads read a row of 576 elements; 512 of them are the value.
Attend latent() {
    Attend a            = attend_of(576, 16, 1);
    a.layer.latent      = true;
    a.layer.n_head_kv   = 1;
    a.layer.d_v         = 512;
    a.layer.width_v     = 512;
    a.layer.row_bytes_k = 311;
    return a;
}

} // namespace

int main() {
    for (const size_t most : { 64u << 10, 99u << 10, 163u << 10, 227u << 10 }) {
        emulated_only_count(most);
        for (const int group : { 3, 4, 8 }) {
            const int d = group == 3 ? 64 : 128;
            print(most, "decode d " + std::to_string(d) + " G " + std::to_string(group),
                  attend_decode(without_exact_keys(attend_of(d, group, 1)), nullptr));
        }
        for (const int d : { 64, 128 }) {
            print(most, "tiles d " + std::to_string(d), attend_tiles(attend_of(d, d == 64 ? 3 : 4, 512), nullptr));
        }
        const Attend a = attend_of(128, 4, 1), of_latent = latent();
        print(most, "tiles latent", attend_tiles(of_latent, nullptr));
        Combine combined{};
        combined.a = a;
        print(most, "combine", combine(combined, nullptr));
        combined.a = of_latent;
        print(most, "combine latent", combine(combined, nullptr));
        Encode encoded{};
        encoded.layer = a.layer;
        encoded.n_tok = 512;
        print(most, "encode", encode(encoded, nullptr));
        encoded.layer = of_latent.layer;
        print(most, "encode latent", encode(encoded, nullptr));
        print(most, "project", project_queries(attend_of(128, 4, 512), nullptr));
        print(most, "project_decode d 128 G 4", project_queries(a, nullptr));
        print(most, "project_decode d 128 G 8", project_queries(attend_of(128, 8, 1), nullptr));
        Store stored{};
        stored.n_slots = 1;
        print(most, "store", store_window(stored, nullptr));
    }
}
