// The register-blocked tile product every kernel shares, on panels that sit in L1 or L2.
//
// A panel is a row-major float32 matrix in scratch whose rows are padded with zeros to whole vectors. The left
// operand is read one element at a time through two strides, so Aᵀ·B needs no copy; the right operand and the
// result are read along their rows. A·Bᵀ is A times a panel packed transposed (pack.h).
//
// Operands are float, or Pair: two bfloat16 neighbours along the summed dimension, multiplied by VDPBF16PS into
// float32. With pairs every k, stride and row below counts pairs.
#pragma once

#include <stddef.h>

#include "vec.h"

namespace PHISTATE_NS {

#if defined(PHISTATE_AVX512) || defined(PHISTATE_NEON)
constexpr int kRows = 6, kCols = 4;  // 24 sums, 4 columns and a broadcast in 32 registers
#else
constexpr int kRows = 6, kCols = 2;  // 12 + 2 + 1 in 16
#endif

// Which part of a product is needed, for the triangles of a causal chunk.
enum class Part {
    All,
    LowerOut,  // C at and below the diagonal, rounded out to vectors; the rest of C is not touched
    LowerIn,   // A is lower triangular: row r sums k ≤ r, and zeros of A up to the end of its block
    LowerRows, // the same row by row: what of B is not finite reaches no row above it
    UpperIn,   // A is upper triangular: row r sums k ≥ r
};

template <class T>
struct Left {
    const T* data;
    ptrdiff_t row, col;
};
template <class T>
struct Right {
    const T* data;
    ptrdiff_t row;
};
// C[r] = keep[r·step]·C[r] + gain[r]·(A·B)[r]; keep null: C is only written; gain null: ones. With `from`, a panel
// of C's shape, what is kept is from[r].
struct Out {
    float* data;
    ptrdiff_t row;
    const float* keep = nullptr;
    ptrdiff_t keep_step = 0;
    const float* gain = nullptr;
    const float* from = nullptr;
};
// Static storage inside a namespace per set: what Out::keep points to for a plain sum.
static const float kOne = 1.0f;

PHISTATE_INLINE F multiply_add(float a, F b, F c) { return fma(splat(a), b, c); }
PHISTATE_INLINE F load_right(const float* p) { return load(p); }
#if defined(PHISTATE_PAIRS)
PHISTATE_INLINE F load_right(const Pair* p) { return load(reinterpret_cast<const float*>(p)); }
PHISTATE_INLINE F multiply_add(Pair a, F b, F c) {
    return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(a.bits))), reinterpret_cast<__m512bh>(b));
}
#endif

// Cache lines to fetch while the multipliers are busy: rows of the next chunk, far apart in memory, which the
// hardware does not foresee. A product takes a few per block.
class Ahead {
public:
    void add(const void* data, ptrdiff_t row_bytes, int64_t rows, int64_t bytes) {
        if (count_ < kMost) streams_[count_++] = {static_cast<const char*>(data), row_bytes, rows, bytes};
    }
    void clear() { count_ = current_ = 0, row_ = byte_ = 0; }
    PHISTATE_INLINE void fetch(ptrdiff_t lines) {
        for (; lines > 0 && current_ < count_; --lines) {
            const Stream& stream = streams_[current_];
            __builtin_prefetch(stream.data + row_ * stream.row_bytes + byte_, 0, 2);
            byte_ += 64;
            if (byte_ < stream.bytes) continue;
            byte_ = 0;
            if (++row_ < stream.rows) continue;
            row_ = 0;
            ++current_;
        }
    }

private:
    static constexpr int kMost = 8;
    struct Stream {
        const char* data;
        ptrdiff_t row_bytes;
        int64_t rows, bytes;
    };
    Stream streams_[kMost];
    int count_ = 0, current_ = 0;
    int64_t row_ = 0, byte_ = 0;
};

// One MR × NR-vector block of C, its sums in registers for the whole of k.
template <int MR, int NR, class T>
PHISTATE_INLINE void block(ptrdiff_t k, const T* a, ptrdiff_t a_row, ptrdiff_t a_col, const T* b, ptrdiff_t b_row, float* c,
                           ptrdiff_t c_row, const float* from, const float* keep, ptrdiff_t keep_step, const float* gain) {
    F sums[MR][NR];
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i)
#pragma GCC unroll 16
        for (int j = 0; j < NR; ++j) sums[i][j] = zero();
    for (ptrdiff_t p = 0; p < k; ++p) {
        F right[NR];
#pragma GCC unroll 16
        for (int j = 0; j < NR; ++j) right[j] = load_right(b + j * L);
#pragma GCC unroll 16
        for (int i = 0; i < MR; ++i) {
            const T left = a[i * a_row];
#pragma GCC unroll 16
            for (int j = 0; j < NR; ++j) sums[i][j] = multiply_add(left, right[j], sums[i][j]);
        }
        a += a_col;
        b += b_row;
    }
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
        float* row = c + i * c_row;
        if (gain) {
            const F g = splat(gain[i]);
#pragma GCC unroll 16
            for (int j = 0; j < NR; ++j) sums[i][j] *= g;
        }
        if (keep) {
            const F g = splat(keep[i * keep_step]);
#pragma GCC unroll 16
            for (int j = 0; j < NR; ++j) sums[i][j] = fma_exactly(g, load(from + i * c_row + j * L), sums[i][j]);
        }
#pragma GCC unroll 16
        for (int j = 0; j < NR; ++j) store(row + j * L, sums[i][j]);
    }
}

// A column of blocks: m rows, NR vectors wide.
template <int NR, class T>
__attribute__((noinline)) void column(Part part, ptrdiff_t m, ptrdiff_t first_vector, ptrdiff_t k, Left<T> a, Right<T> b, Out c,
                                      Ahead* ahead) {
    constexpr ptrdiff_t kPerStep = sizeof(T) == sizeof(float) && !__is_same(T, float) ? 2 : 1;
    b.data += first_vector * L;
    c.data += first_vector * L;
    for (ptrdiff_t r = 0; r < m;) {
        // Rows that remain: sixes, then fours and ones, so that no block is left with too few sums in flight.
        const ptrdiff_t left = m - r;
        const int rows = part == Part::LowerRows ? 1 : left >= kRows && left != kRows + 2 ? kRows : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        ptrdiff_t from = 0, to = k;
        if (part == Part::LowerIn || part == Part::LowerRows) to = least<ptrdiff_t>(k, (r + rows + kPerStep - 1) / kPerStep);
        if (part == Part::UpperIn) from = least<ptrdiff_t>(k, r / kPerStep);
        if (part != Part::LowerOut || first_vector * L < r + rows) {
            const T* pa = a.data + r * a.row + from * a.col;
            const T* pb = b.data + from * b.row;
            float* pc = c.data + r * c.row;
            const float* from_row = (c.from ? c.from + first_vector * L : c.data) + r * c.row;
            const float* keep = c.keep ? c.keep + r * c.keep_step : nullptr;
            const float* gain = c.gain ? c.gain + r : nullptr;
            if (ahead) ahead->fetch(4 + (to - from) / 8);
            if (rows == kRows)
                block<kRows, NR>(to - from, pa, a.row, a.col, pb, b.row, pc, c.row, from_row, keep, c.keep_step, gain);
            else if (rows == 4)
                block<4, NR>(to - from, pa, a.row, a.col, pb, b.row, pc, c.row, from_row, keep, c.keep_step, gain);
            else if (rows == 2)
                block<2, NR>(to - from, pa, a.row, a.col, pb, b.row, pc, c.row, from_row, keep, c.keep_step, gain);
            else
                block<1, NR>(to - from, pa, a.row, a.col, pb, b.row, pc, c.row, from_row, keep, c.keep_step, gain);
        }
        r += rows;
    }
}

// C[m×n] from A[m×k]·B[k×n]; n counts vectors.
template <class T>
void product(ptrdiff_t m, ptrdiff_t n, ptrdiff_t k, Left<T> a, Right<T> b, Out c, Part part = Part::All, Ahead* ahead = nullptr) {
    // A triangle's result is walked in single vectors, which follow its edge closest.
    const int widest = part == Part::LowerOut ? 2 : kCols;
    for (ptrdiff_t v = 0; v < n;) {
        const ptrdiff_t left = n - v;
        if (kCols == 4 && widest == 4 && left >= 4) {
            column<kCols>(part, m, v, k, a, b, c, ahead);
            v += kCols;
        } else if (left >= 2 && widest >= 2) {
            column<2>(part, m, v, k, a, b, c, ahead);
            v += 2;
        } else {
            column<1>(part, m, v, k, a, b, c, ahead);
            v += 1;
        }
    }
}

// Whether n vectors hold numbers only.
inline bool finite(const float* row, int64_t n) {
    F total = zero();
    for (int64_t c = 0; c < n; ++c) total = fma(load(row + c * L), zero(), total);
    return sum(total) == 0.0f;
}

// What causal_read() gives, one row of the triangle after the other.
__attribute__((noinline, cold)) inline void read_by_rows(ptrdiff_t rows, ptrdiff_t n, ptrdiff_t k, Left<float> left, Right<float> state,
                                                         Left<float> lower, Right<float> values, Out out) {
    product<float>(rows, n, k, left, state, out);
    product<float>(rows, n, rows, lower, values, {out.data, out.row, &kOne}, Part::LowerRows);
}

// out = gain·(left·state) + lower·values, n vectors: what each token of a chunk reads of the past and of the chunk. A
// value that is no number must reach no token before it, and a block of rows multiplies those above the diagonal by
// zero. It always shows in the last row, which sums over all of them; then the triangle is walked row by row.
PHISTATE_INLINE void causal_read(ptrdiff_t rows, ptrdiff_t n, ptrdiff_t k, Left<float> left, Right<float> state, Left<float> lower,
                                 Right<float> values, Out out, Ahead* ahead, Ahead* ahead_below) {
    product<float>(rows, n, k, left, state, out, Part::All, ahead);
    product<float>(rows, n, rows, lower, values, {out.data, out.row, &kOne}, Part::LowerIn, ahead_below);
    if (!finite(out.data + (rows - 1) * out.row, n)) read_by_rows(rows, n, k, left, state, lower, values, out);
}

}  // namespace PHISTATE_NS
