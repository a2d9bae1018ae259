// quantizer.h: step and error of a band's quantizer on Gaussian coefficients. python/subkv/plan/quantizer.py has the
// integrals that the steps minimise, and reads these numbers (subkv_constants).
#pragma once

#include <cstdint>

namespace subkv {

// The best step, in standard deviations, or 0 for a 16-bit coefficient, which has none.
inline double quantizer_step(int32_t bits) {
    switch (bits) {
        case 2: return 0.9956867034216746;
        case 3: return 0.5860194426808608;
        case 4: return 0.3352006115234407;
        case 5: return 0.18813878514779525;
        case 6: return 0.10406302641121437;
        case 8: return 0.030762378623313512;
        default: return 0.0;
    }
}

// E (x - x^)^2 / E x^2 at this step. Up to 6 bits: measured for a path of 64 coefficients with a fixed scale (trellis.h);
// all but the shortest rows have a path. 16 bits: a bound for halves, whose error is uniform within half an ulp.
inline double quantizer_distortion(int32_t bits) {
    switch (bits) {
        case 2: return 0.0884;
        case 3: return 0.02445;
        case 4: return 0.00672;
        case 5: return 0.00182;
        case 6: return 0.00050;
        case 8: return 8.768618578350386e-05;
        case 16: return 1.9868214925130207e-08;
        default: return 1.0; // a coefficient that is not stored
    }
}

} // namespace subkv
