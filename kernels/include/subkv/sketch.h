// sketch.h: sketches of the second moment of a stream of rows, and the subspace that it spans.
// kernels/sketch/{eigen,sketch}.cpp have the definitions. The code is C++17 and throws only std::bad_alloc.
//
// A sketch's state is plain memory; its parameters determine the size. A copy of the bytes is a copy of the sketch. The
// state depends only on the rows and their order: any split of a stream into calls gives the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace subkv {

constexpr int MAX_SKETCH_SIZE = 256;  // d
constexpr int MAX_SKETCH_ROWS = 1024; // l
constexpr int OJA_PERIOD      = 32;   // rows between two QR decompositions (paper ojakv: T)

// Computes eigenvalues and eigenvectors of a symmetric matrix by Householder tridiagonalization and QL with implicit
// shifts.
//   a [n][n] f64  both triangles of the matrix; on return, row i is the unit eigenvector of w[i]
//   w [n] f64     eigenvalues, largest first, with |error| <= a few n * eps * the largest |eigenvalue|
// Returns false if a value is not finite (a is then undefined), or if it does not converge (no case is known).
bool eigen_symmetric(double * a, double * w, int64_t n);

enum class SketchKind : int32_t {
    COVARIANCE          = 0, // running sum of x x^T, exact up to rounding
    FREQUENT_DIRECTIONS = 1, // S [<= 2l][d], ||A^T A - S^T S|| <= ||A - A_r||_F^2 / (l - r) for every r < l
    OJA                 = 2, // U [l][d] orthonormal, tracks the top subspace; one number for all energy outside it
};

struct SketchParams {
    SketchKind kind;
    int32_t    d;     // row length, 1 .. MAX_SKETCH_SIZE
    int32_t    rows;  // l, 1 .. MAX_SKETCH_ROWS, for OJA at most d; COVARIANCE ignores it
    float      decay; // in (0, 1], factor for a row's weight with every later row
    float      rate;  // for OJA, eta in (0, 1), per row of mean energy
};

// If it returns false, `err` has the error in one sentence. All functions below require parameters that pass this
// check.
bool sketch_check(const SketchParams & params, std::string & err);

size_t sketch_bytes(const SketchParams & params); // size of a state; a state starts on an 8-byte boundary
void   sketch_init(const SketchParams & params, void * state);

// Checks a state from an untrusted source: whether its counts are within bounds and all its values finite.
bool sketch_valid(const SketchParams & params, const void * state);

// x [n][ldx] f32. Skips rows with a non-finite value or a squared norm above 1e24 (f32 sums would overflow) and returns
// their number.
int64_t sketch_absorb(const SketchParams & params, void * state, const float * x, int64_t ldx, int64_t n);

// Computes the r <= d directions of most energy. rows [r][d] f64 are orthonormal, and energy [r] f64 is the sketch's
// estimate of the weighted sum of (row . x)^2, largest first. FREQUENT_DIRECTIONS spreads the energy that shrinking
// loses evenly over all d directions, and OJA the energy outside U over the directions outside U. The d energies add up
// to the stream's energy. Further orthonormal directions complete the sketch's own. Returns false if a value of the
// state is not finite.
bool sketch_top(const SketchParams & params, const void * state, int64_t r, double * rows, double * energy);

int64_t sketch_count(const void * state);                               // rows absorbed
double  sketch_energy(const SketchParams & params, const void * state); // weighted sum of ||x||^2 over them

// For FREQUENT_DIRECTIONS, copies the sketch's rows S to s [2l][d] f32 and returns the number of rows in use, else 0.
int64_t sketch_rows(const SketchParams & params, const void * state, float * s);

} // namespace subkv
