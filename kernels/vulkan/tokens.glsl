// tokens.glsl: the fields of TokenRow (subkv/batch.h). Include it after a buffer `tokens` and the push constant
// p.tokens_at.
const uint TOKEN_WORDS = 3;

int token_pos(uint token) {
    return tokens[p.tokens_at + token * TOKEN_WORDS];
}

int token_cell(uint token) {
    return tokens[p.tokens_at + token * TOKEN_WORDS + 1];
}

uint token_first_slot(uint token) {
    return uint(tokens[p.tokens_at + token * TOKEN_WORDS + 2]);
}
