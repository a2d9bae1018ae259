// cuda_capi.cpp: C names of the CUDA ops, for ctypes (cuda_ops.py).
#include "../../kernels/cuda/ops.h"

using namespace subkv;

extern "C" {

const char * test_encode(const cuda::Encode * args, void * stream) {
    return cuda::encode(*args, stream);
}

const char * test_project_queries(const cuda::Attend * args, void * stream) {
    return cuda::project_queries(*args, stream);
}

const char * test_attend(const cuda::Attend * args, void * stream) {
    return cuda::attend(*args, stream);
}

const char * test_attend_decode(const cuda::Attend * args, void * stream) {
    return cuda::attend_decode(cuda::without_exact_keys(*args), stream);
}

const char * test_attend_tiles(const cuda::Attend * args, void * stream) {
    return cuda::attend_tiles(*args, stream);
}

struct StoreAndAttend {
    cuda::StoreRows store;
    cuda::Combine   args;
};

const char * test_store_and_attend(const StoreAndAttend * args, void * stream) {
    return cuda::store_and_attend(args->store, args->args, stream);
}

const char * test_encode_window(const cuda::EncodeWindow * args, void * stream) {
    return cuda::encode_window(*args, stream);
}

const char * test_combine(const cuda::Combine * args, void * stream) {
    return cuda::combine(*args, stream);
}

const char * test_prompt_rows(const cuda::Prompt * args, void * stream) {
    return cuda::prompt_rows(*args, stream);
}

const char * test_prompt_mask(const cuda::Prompt * args, void * stream) {
    return cuda::prompt_mask(*args, stream);
}

const char * test_prompt_lost(const cuda::Prompt * args, void * stream) {
    return cuda::prompt_lost(*args, stream);
}

int64_t test_exact_floats(const cuda::Layer * layer, int64_t n_rows, int64_t n_tps, int32_t slots_of_seq) {
    return cuda::exact_floats(*layer, n_rows, n_tps, slots_of_seq);
}

int64_t test_query_words(const cuda::Layer * layer) {
    return cuda::query_words(*layer);
}

// Bytes of a plan; plan nullptr: only these.
size_t test_make_plan(const HeadCodec * k, const HeadCodec * v, void * plan) {
    if (plan) {
        cuda::make_plan(*k, *v, plan);
    }
    return cuda::plan_bytes();
}

void test_block_steps(const cuda::Layer * layer, BlockSteps * steps) {
    *steps = cuda::block_steps(*layer, 0);
}

int64_t test_cells_of_split(const BlockSteps * steps, int64_t n_kv, int64_t n_blocks, int64_t most) {
    return cells_of_split(*steps, n_kv, n_blocks, most);
}

bool test_suits_prompt(const cuda::Layer * layer) {
    return cuda::suits_prompt(*layer, 0);
}

const char * test_store_window(const cuda::Store * args, void * stream) {
    return cuda::store_window(*args, stream);
}
}
