// mask.glsl: the values that attend and combine add to logits, and which keys are exact. After tables.glsl and a
// buffer `mask`.

// Mask values of the tokens [n_tokens][n_kv], of 2 bytes or 4; `at` in values. Minus infinity becomes HIDDEN, another
// number that is not finite LOST.
float mask_value(uint at, uint half_precision) {
    if (half_precision == 0) {
        const uint bits = mask[at];
        return (bits & ALL_EXPONENT) != ALL_EXPONENT ? clamp(uintBitsToFloat(bits), -1.0e38, 1.0e38) :
               bits == MINUS_INFINITY                ? HIDDEN :
                                                       LOST;
    }
    const uint bits = half_bits(mask[at / 2], at);
    return finite_half(bits) ? unpackHalf2x16(bits).x : bits == 0xfc00u ? HIDDEN : LOST;
}

bool is_exact(int key, int query) {
    return key < int(tables[N_SINK]) || (key <= query && key > query - int(tables[N_RECENT]));
}

float capped(float x, float softcap) {
    // on some devices tanh of large numbers is NaN
    return softcap > 0.0 ? softcap * tanh(clamp(x / softcap, -20.0, 20.0)) : x;
}
