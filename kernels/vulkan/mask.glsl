// mask.glsl: the values that attend and combine add to logits, and which keys are exact. Include it after tables.glsl
// and a buffer `mask`.

// Returns value number `at` of the mask [n_tokens][n_kv], whose values have 2 or 4 bytes. Minus infinity becomes
// HIDDEN, and any other number that is not finite becomes LOST.
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
    // On some devices, tanh of large numbers is NaN.
    return softcap > 0.0 ? softcap * tanh(clamp(x / softcap, -20.0, 20.0)) : x;
}
