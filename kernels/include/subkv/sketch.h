// sketch.h: what a stream of rows leaves behind of its second moment, and the subspace it spans. Contracts; the
// definitions are kernels/sketch/{eigen,sketch}.cpp. C++17, no exceptions but bad_alloc.
//
// A sketch's state is plain memory of a size that its parameters fix: copy it, and the copy goes on alike. It is a
// function of the rows and their order alone: any split of a stream into calls leaves the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace subkv {

constexpr int MAX_SKETCH_SIZE = 256;  // d
constexpr int MAX_SKETCH_ROWS = 1024; // l
constexpr int OJA_PERIOD      = 32;   // rows between two QR decompositions (paper ojakv: T)

// Eigenvalues and eigenvectors of a symmetric matrix: Householder tridiagonalization, then QL with implicit shifts.
//   a [n][n] f64 in: the matrix, both triangles; out: row i is the unit eigenvector of w[i]
//   w [n] f64    out: eigenvalues, largest first; |error| <= a few n * eps * the largest |eigenvalue|
// false: a value is not finite (a is then undefined), or no convergence (never seen).
bool eigen_symmetric(double * a, double * w, int64_t n);

enum class SketchKind : int32_t {
    COVARIANCE          = 0, // running sum of x x^T, exact up to rounding
    FREQUENT_DIRECTIONS = 1, // S [<= 2l][d], ||A^T A - S^T S|| <= ||A - A_r||_F^2 / (l - r) for every r < l
    OJA                 = 2, // U [l][d] orthonormal, follows the top subspace; all energy outside it is one number
};

struct SketchParams {
    SketchKind kind;
    int32_t    d;     // row length, 1 .. MAX_SKETCH_SIZE
    int32_t    rows;  // l, 1 .. MAX_SKETCH_ROWS (OJA: <= d). COVARIANCE ignores it
    float      decay; // (0, 1]: what a row's weight is multiplied with per later row; 1: nothing is forgotten
    float      rate;  // OJA: eta in (0, 1), per row of mean energy
};

// false: `err` says what is wrong in one sentence. Everything below expects parameters that passed.
bool sketch_check(const SketchParams & params, std::string & err);

size_t sketch_bytes(const SketchParams & params); // of a state; states start on an 8-byte boundary
void   sketch_init(const SketchParams & params, void * state);

// Whether bytes from elsewhere can be such a state: counts within bounds, every value finite.
bool sketch_valid(const SketchParams & params, const void * state);

// x [n][ldx] f32. Rows with a non-finite value, or of a squared norm beyond 1e24 (f32 sums must hold), are left out;
// returns their number.
int64_t sketch_absorb(const SketchParams & params, void * state, const float * x, int64_t ldx, int64_t n);

// The r directions of most energy: rows [r][d] f64 orthonormal, energy [r] f64 = weighted sum of (row . x)^2 as far as
// the sketch knows it, largest first. Energy that the sketch lost (FD: shrinking; OJA: outside U) is spread evenly over
// the d directions (FD) or over those outside U (OJA): the d energies add up to the stream's. r <= d; directions beyond
// what the sketch holds complete the basis. false: the state is not one (a value in it is not finite).
bool sketch_top(const SketchParams & params, const void * state, int64_t r, double * rows, double * energy);

int64_t sketch_count(const void * state);                               // rows absorbed
double  sketch_energy(const SketchParams & params, const void * state); // weighted sum of ||x||^2 over them

// FD only: the sketch's rows S, s [2l][d] f32, the first so many in use as it returns. Other kinds: 0.
int64_t sketch_rows(const SketchParams & params, const void * state, float * s);

} // namespace subkv
