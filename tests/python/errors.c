/* Errors of the C interface: kinds and parts. Arguments: a model without bases, a damaged file, a file with bases. */
#include "subkv.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void expect(int32_t kind, const char * key, const char * remedy, int line) {
    const subkv_error * found = subkv_last_error_parts();
    char                whole[4096];
    snprintf(whole, sizeof(whole), "%s%s%s%s%s", found->key, *found->key ? ": " : "", found->reason,
             *found->remedy ? "; " : "", found->remedy);
    if (found->kind != kind || strcmp(found->key, key) != 0 || strncmp(found->remedy, remedy, strlen(remedy)) != 0 ||
        !*found->remedy != !*remedy || strcmp(subkv_last_error(), whole) != 0) {
        printf("line %d: kind %d, '%s'\n", line, found->kind, subkv_last_error());
        exit(1);
    }
}

#define EXPECT(kind, key, remedy) expect(kind, key, remedy, __LINE__)

int main(int argc, char ** argv) {
    if (argc != 4) {
        return 2;
    }
    EXPECT(SUBKV_ERROR_NONE, "", "");
    if (subkv_layout_load(argv[1])) {
        return 1;
    }
    EXPECT(SUBKV_ERROR_INVALID, "subkv.version", "");
    if (subkv_layout_load(argv[2])) {
        return 1;
    }
    EXPECT(SUBKV_ERROR_INVALID, "subkv.keys.sha256", "convert the base model again");
    if (subkv_layout_load_budget(argv[3], 64.0f)) {
        return 1;
    }
    EXPECT(SUBKV_ERROR_BUDGET, "bits per element", "`subkv convert MODEL --");
    subkv_cache_request asked = { .model = argv[1], .type = "auto", .n_sink = -1, .n_recent = -1, .n_rollback = -1 };
    subkv_cache_choice  choice;
    if (!subkv_resolve(&asked, &choice) || choice.layout || strcmp(choice.type_k, "f16") != 0 || !*choice.words) {
        return 1;
    }
    asked.bases = argv[3];
    if (!subkv_resolve(&asked, &choice) || choice.source != SUBKV_BASES_NAMED || choice.n_rollback != 16) {
        return 1;
    }
    subkv_layout_free(choice.layout);
    asked.type = "q5";
    if (subkv_resolve(&asked, &choice)) {
        return 1;
    }
    EXPECT(SUBKV_ERROR_INVALID, "type", "");
    return 0;
}
