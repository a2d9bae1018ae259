// trellis.cpp: rows whose codes are paths through a trellis (subkv/trellis.h).
//   c [n][rank] f32 | row [row_bytes]: scale byte, planes of codes (ops.h): only the meaning of codes differs
//
// Scale code. The code k of least squared error without a trellis is searched as in encode.cpp, a band of trellis widths
// having the step ratio * TRELLIS_UNIFORM there. Of k - TRELLIS_AROUND .. k + TRELLIS_AROUND, within 1..255, the one whose
// path costs least wins, ties to the smaller code.
// Path. Viterbi: cost[w] after place t is the least cost of a path that ends in state w; branch x from state p costs
//   weight * (c / (s * ratio) - level - 1/2)^2,  weight = (s * ratio)^2,
// of the nearest level of subset i % 4 = 2 (x ^ p / 2) + p % 2, ties to the lower index; of two branches into a state the
// one from the smaller state wins a tie. The circle is closed by trying each of the four states as both its ends.
// A row with a non-finite coefficient, or all zero, is a zero row (every byte 0).
#include "subkv/trellis.h"

#include "half.h"
#include "rows.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace subkv {

namespace {

struct Place {
    int32_t j;    // coefficient
    int32_t bits; // of its band
    float   ratio;
};

bool on_path(const Band & band) {
    return band.bits <= TRELLIS_BITS;
}

std::vector<Place> path_of(const HeadCodec & codec) {
    std::vector<Place> path;
    if (trellis_length(codec) == 0) {
        return path;
    }
    for (int32_t lane = 0; lane < BAND_STEP; ++lane) {
        for (int32_t i = 0; i < codec.n_bands; ++i) {
            const Band & band = codec.bands[i];
            for (int32_t j = lane; on_path(band) && j < band.n; j += BAND_STEP) {
                path.push_back({ band.first + j, band.bits, band.ratio });
            }
        }
    }
    return path;
}

// Of each subset of the levels the nearest to y, and its squared distance.
struct Nearest {
    int32_t index[4];
    float   distance[4];
};

Nearest nearest(int32_t bits, float y) {
    Nearest found;
    for (int32_t q = 0; q < 4; ++q) {
        found.index[q]    = q;
        found.distance[q] = std::numeric_limits<float>::infinity();
        for (int32_t i = q; i < 2 << bits; i += 4) {
            const float e = y - ((float) trellis_level(bits, i) + 0.5f);
            const float d = e * e;
            if (d < found.distance[q]) {
                found.index[q]    = i;
                found.distance[q] = d;
            }
        }
    }
    return found;
}

// Step of a band at scale s where its coefficients are coded each by itself.
float uniform_step(const Band & band, float s) {
    return s * band.ratio * (on_path(band) ? TRELLIS_UNIFORM[band.bits] : 1.0f);
}

float uniform_code(const Band & band, float x, float step) {
    const float half = half_range(band.bits);
    return std::fmin(std::fmax(std::nearbyint(x / step + half), 0.0f), 2.0f * half);
}

// Squared error of a row's quantized coefficients at scale s, each by itself; only: of bands outside the path.
float uniform_error(const HeadCodec & codec, const float * c, float s, bool only) {
    float sum = 0.0f;
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band & band = codec.bands[i];
        if (band.bits == 16 || (only && on_path(band))) {
            continue;
        }
        const float step = uniform_step(band, s);
        for (int32_t j = 0; j < band.n; ++j) {
            const float x = c[band.first + j];
            const float e = x - step * (uniform_code(band, x, step) - half_range(band.bits));
            sum += e * e;
        }
    }
    return sum;
}

int32_t choose_scale(const HeadCodec & codec, const float * c) {
    float reach = 0.0f;
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band & band = codec.bands[i];
        for (int32_t j = 0; band.bits != 16 && j < band.n; ++j) {
            const float full = uniform_step(band, 1.0f) * half_range(band.bits);
            reach            = std::fmax(reach, std::fabs(c[band.first + j]) / full);
        }
    }
    int32_t k0 = 1;
    while (k0 < 255 && SCALES[k0] < reach) {
        ++k0;
    }
    int32_t middle = k0;
    float   least  = std::numeric_limits<float>::infinity();
    for (int32_t k = k0; k >= 1 && k >= k0 - SCALE_CANDIDATES_BELOW; --k) {
        const float error = uniform_error(codec, c, SCALES[k], false);
        if (error < least) {
            middle = k;
            least  = error;
        }
    }
    int32_t best = middle;
    least        = std::numeric_limits<float>::infinity();
    for (int32_t k = std::max(1, middle - TRELLIS_AROUND); k <= std::min(255, middle + TRELLIS_AROUND); ++k) {
        const float error = uniform_error(codec, c, SCALES[k], true) + trellis_path(codec, c, SCALES[k], nullptr);
        if (error < least) {
            best  = k;
            least = error;
        }
    }
    return best;
}

void put_trellis_row(const HeadCodec & codec, const float * c, uint8_t * row) {
    std::vector<uint8_t> code((size_t) codec.rank);
    row[0]        = (uint8_t) choose_scale(codec, c);
    const float s = SCALES[row[0]];
    trellis_path(codec, c, s, code.data());
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        const Band & band   = codec.bands[i];
        uint8_t *    planes = row + band.offset;
        for (int32_t j = 0; j < band.n; ++j) {
            const float x = c[band.first + j];
            if (band.bits == 16) {
                const uint16_t h  = ref::float_to_half(std::fmin(std::fmax(x, -HALF_MAX), HALF_MAX));
                planes[2 * j]     = (uint8_t) h;
                planes[2 * j + 1] = (uint8_t) (h >> 8);
            } else if (on_path(band)) {
                ref::put_code(planes, band.n, band.bits, j, code[(size_t) (band.first + j)]);
            } else {
                const float u = uniform_code(band, x, uniform_step(band, s));
                ref::put_code(planes, band.n, band.bits, j, (uint32_t) u);
            }
        }
    }
}

} // namespace

int32_t trellis_length(const HeadCodec & codec) {
    int32_t n = 0;
    for (int32_t i = 0; i < codec.n_bands; ++i) {
        n += on_path(codec.bands[i]) ? codec.bands[i].n : 0;
    }
    return n < TRELLIS_LEAST ? 0 : n;
}

void trellis_indices(const HeadCodec & codec, const uint8_t * code, uint8_t * index) {
    const auto   path = path_of(codec);
    const size_t n    = path.size();
    const auto   x    = [&](size_t t) { return code[path[t % n].j] & 1; };
    for (size_t t = 0; t < n; ++t) {
        index[path[t].j] = (uint8_t) (2 * code[path[t].j] ^ 2 * x(t + n - 2) ^ x(t + n - 1));
    }
}

float trellis_path(const HeadCodec & codec, const float * c, float s, uint8_t * code) {
    const auto           path = path_of(codec);
    const size_t         n    = path.size();
    std::vector<Nearest> choice(n);
    std::vector<uint8_t> taken(TRELLIS_STATES * n), best_code(n);
    for (size_t t = 0; t < n; ++t) {
        const float step = s * path[t].ratio;
        choice[t]        = nearest(path[t].bits, c[path[t].j] / step);
        for (float & distance : choice[t].distance) {
            distance *= step * step;
        }
    }
    const auto subset = [](int32_t p, int32_t x) { return 2 * (x ^ p >> 1) + (p & 1); };
    float      least  = std::numeric_limits<float>::infinity();
    for (int32_t ends = 0; ends < TRELLIS_STATES; ++ends) {
        float cost[TRELLIS_STATES];
        for (int32_t w = 0; w < TRELLIS_STATES; ++w) {
            cost[w] = w == ends ? 0.0f : std::numeric_limits<float>::infinity();
        }
        for (size_t t = 0; t < n; ++t) {
            float next[TRELLIS_STATES];
            for (int32_t w = 0; w < TRELLIS_STATES; ++w) { // from states w >> 1 and w >> 1 | 2
                const int32_t x                        = w & 1;
                const int32_t p                        = w >> 1;
                const float   a                        = cost[p] + choice[t].distance[subset(p, x)];
                const float   b                        = cost[p | 2] + choice[t].distance[subset(p | 2, x)];
                const bool    two                      = b < a;
                next[w]                                = two ? b : a;
                taken[TRELLIS_STATES * t + (size_t) w] = two;
            }
            for (int32_t w = 0; w < TRELLIS_STATES; ++w) {
                cost[w] = next[w];
            }
        }
        if (!(cost[ends] < least)) {
            continue;
        }
        least = cost[ends];
        for (size_t t = n, w = (size_t) ends; t-- > 0;) {
            const auto x = (int32_t) w & 1;
            const auto p = (int32_t) (w >> 1 | (taken[TRELLIS_STATES * t + w] != 0 ? 2 : 0));
            best_code[t] = (uint8_t) ((choice[t].index[subset(p, x)] ^ 2 * (p >> 1) ^ (p & 1)) >> 1);
            w            = (size_t) p;
        }
    }
    for (size_t t = 0; code != nullptr && t < n; ++t) {
        code[path[t].j] = best_code[t];
    }
    return n == 0 ? 0.0f : least;
}

int64_t trellis_encode_rows(const HeadCodec & codec, const float * c, int64_t n, uint8_t * rows) {
    if (trellis_length(codec) == 0) {
        return encode_rows(ops_ref(), codec, c, codec.rank, n, rows);
    }
    int64_t n_bad = 0;
    for (int64_t t = 0; t < n; ++t, c += codec.rank, rows += codec.row_bytes) {
        bool finite = true;
        bool zero   = true;
        for (int32_t j = 0; j < codec.rank; ++j) {
            finite = finite && std::isfinite(c[j]);
            zero   = zero && c[j] == 0.0f;
        }
        std::fill_n(rows, codec.row_bytes, (uint8_t) 0);
        n_bad += finite ? 0 : 1;
        if (finite && !zero) {
            put_trellis_row(codec, c, rows);
        }
    }
    return n_bad;
}

void trellis_decode_rows(const HeadCodec & codec, const uint8_t * rows, int64_t n, float * c) {
    std::vector<uint8_t> codes((size_t) codec.rank), index((size_t) codec.rank);
    for (int64_t t = 0; t < n; ++t, c += codec.rank, rows += codec.row_bytes) {
        ref::dequantize_row(codec, rows, c);
        if (trellis_length(codec) == 0 || rows[0] == 0) {
            continue;
        }
        for (int32_t i = 0; i < codec.n_bands; ++i) {
            const Band & band = codec.bands[i];
            for (int32_t j = 0; on_path(band) && j < band.n; ++j) {
                codes[(size_t) (band.first + j)] = (uint8_t) ref::code(rows + band.offset, band.n, band.bits, j);
            }
        }
        trellis_indices(codec, codes.data(), index.data());
        for (int32_t i = 0; i < codec.n_bands; ++i) {
            const Band & band = codec.bands[i];
            const float  step = SCALES[rows[0]] * band.ratio;
            for (int32_t j = band.first; on_path(band) && j < band.first + band.n; ++j) {
                c[j] = step * ((float) trellis_level(band.bits, index[(size_t) j]) + 0.5f);
            }
        }
    }
}

} // namespace subkv
