// Writes 20 tokens after a prompt, greedily, on a compressed cache: generate MODEL.subkv.gguf PROMPT
// With SUBKV=auto MODEL may be any GGUF that `subkv convert` or `subkv chat` has prepared.
#include <llama.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <subkv.h>

enum { N_CTX = 2048, N_PREDICT = 20 };

static void require(bool holds, const char * reason) {
    if (!holds) {
        fprintf(stderr, "%s\n", reason);
        exit(1);
    }
}

static void require_bases(bool found, const char * model) {
    if (!found) {
        fprintf(stderr,
                "%s: expected a model with bases, found none; `subkv convert --embed %s` writes a copy with them, "
                "or `subkv convert %s` prepares it for SUBKV=auto in the environment\n",
                model, model, model);
        exit(1);
    }
}

// The bases that the model's own file carries, for the next context. NULL: none, and SUBKV says where others are.
static subkv_layout * attach_own(const char * model) {
    if (subkv_layout_present(model) == 0) {
        require_bases(getenv("SUBKV") != NULL, model);
        return NULL;
    }
    subkv_layout * layout   = subkv_layout_load(model); // or a sidecar with the bases of this model
    const bool     attached = layout != NULL && subkv_attach(layout, NULL);
    require(attached, subkv_last_error());
    return layout;
}

static void print_errors(enum ggml_log_level level, const char * text, void * user) {
    (void) user;
    fputs(level == GGML_LOG_LEVEL_ERROR ? text : "", stderr);
}

int main(int argc, char ** argv) {
    require(argc == 3, "usage: generate MODEL.subkv.gguf PROMPT");
    llama_log_set(print_errors, NULL);
    struct llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    require(model != NULL, "the model cannot be loaded");

    subkv_layout *              layout = attach_own(argv[1]);
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx = params.n_batch = N_CTX;
    struct llama_context * ctx    = llama_init_from_model(model, params); // takes what this thread has attached
    subkv_stats            stats  = { 0 };
    require(ctx != NULL, subkv_last_error());
    require_bases(subkv_get_stats(ctx, &stats), argv[1]);
    subkv_attach(NULL, NULL);

    const struct llama_vocab * vocab = llama_model_get_vocab(model);
    llama_token                tokens[N_CTX];
    int32_t n = llama_tokenize(vocab, argv[2], (int32_t) strlen(argv[2]), tokens, N_CTX - N_PREDICT, true, true);
    require(n > 0, "the prompt is empty or longer than the context");
    struct llama_sampler * greedy = llama_sampler_init_greedy();
    for (int i = 0; i < N_PREDICT; i++, n = 1) {
        require(llama_decode(ctx, llama_batch_get_one(tokens, n)) == 0, "llama_decode failed");
        tokens[0] = llama_sampler_sample(greedy, ctx, -1);
        if (llama_vocab_is_eog(vocab, tokens[0])) {
            break;
        }
        char          piece[256];
        const int32_t length = llama_token_to_piece(vocab, tokens[0], piece, sizeof(piece), 0, false);
        fwrite(piece, 1, length > 0 ? (size_t) length : 0, stdout);
    }
    const uint64_t bytes = stats.bytes_kv;
    printf("\nKV cache: %llu bytes (f16: %llu), %.2f bits per element, kernel %s\n", (unsigned long long) bytes,
           (unsigned long long) stats.bytes_f16, stats.bpe, subkv_kernel_name());

    llama_sampler_free(greedy);
    llama_free(ctx);
    llama_model_free(model);
    subkv_layout_free(layout);
    return 0;
}
