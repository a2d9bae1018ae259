// mask.glsl: the values that attend and combine add to logits, and which keys are exact. After tables.glsl and a
// buffer `mask`.

// Mask values of the tokens [n_tokens][n_kv], of 2 bytes or 4; `at` in values.
float mask_value(uint at, uint half_precision) {
    if (half_precision == 0) {
        return uintBitsToFloat(mask[at]);
    }
    const vec2 pair = unpackHalf2x16(mask[at / 2]);
    return at % 2 == 0 ? pair.x : pair.y;
}

bool is_exact(int key, int query) {
    return key < int(tables[N_SINK]) || (key <= query && key > query - int(tables[N_RECENT]));
}

float capped(float x, float softcap) {
    // on some devices tanh of large numbers is NaN
    return softcap > 0.0 ? softcap * tanh(clamp(x / softcap, -20.0, 20.0)) : x;
}
