// Copies between the caller's strided tensors and panels in scratch, converting on the way.
//
// `rows` tokens of `n` features each become a panel; what pads it (columns up to a whole vector, rows up to
// `padded_rows`) is zero. `live[r]` false makes row r zero without reading it: a padded token may hold NaN.
#pragma once

#include <stddef.h>

#include "tile.h"
#include "vec.h"

namespace PHISTATE_NS {

// panel[r][c] = gain[r]·source[r][c]; gain null: ones.
template <class T>
void pack_rows(const T* source, ptrdiff_t stride, int64_t rows, int64_t n, const float* gain, const uint8_t* live, float* panel,
               ptrdiff_t ld, int64_t padded_rows) {
    const int64_t whole = n / L * L;
    const int tail = static_cast<int>(n - whole);
    for (int64_t r = 0; r < padded_rows; ++r) {
        float* to = panel + r * ld;
        if (r >= rows || (live && !live[r])) {
            for (int64_t c = 0; c < n; c += L) store(to + c, zero());
            continue;
        }
        const T* from = source + r * stride;
        const F g = splat(gain ? gain[r] : 1.0f);
        for (int64_t c = 0; c < whole; c += L) store(to + c, load(from + c) * g);
        if (tail) store(to + whole, load(from + whole, tail) * g);
    }
}

// panel[c][r] = source[r][c] for a row-major panel `source` of `rows` (a multiple of L) by `columns` (likewise).
inline void transpose_panel(const float* source, ptrdiff_t ld, int64_t rows, int64_t columns, float* panel, ptrdiff_t panel_ld) {
    for (int64_t r = 0; r < rows; r += L)
        for (int64_t c = 0; c < columns; c += L) {
            F x[L];
#pragma GCC unroll 16
            for (int i = 0; i < L; ++i) x[i] = load(source + (r + i) * ld + c);
            transpose(x);
#pragma GCC unroll 16
            for (int i = 0; i < L; ++i) store(panel + (c + i) * panel_ld + r, x[i]);
        }
}

// target[r][c] = factor·panel[r][c] (+ target[r][c] when add), converted.
template <class T>
void unpack_rows(const float* panel, ptrdiff_t ld, int64_t rows, int64_t n, T* target, ptrdiff_t stride, bool add = false,
                 float factor = 1.0f) {
    const F f = splat(factor);
    const int64_t whole = n / L * L;
    const int tail = static_cast<int>(n - whole);
    for (int64_t r = 0; r < rows; ++r) {
        const float* from = panel + r * ld;
        T* to = target + r * stride;
        if (add) {
            for (int64_t c = 0; c < whole; c += L) store(to + c, fma(f, load(from + c), load(to + c)));
            if (tail) store(to + whole, fma(f, load(from + whole), load(to + whole, tail)), tail);
        } else {
            for (int64_t c = 0; c < whole; c += L) store(to + c, f * load(from + c));
            if (tail) store(to + whole, f * load(from + whole), tail);
        }
    }
}

#if defined(PHISTATE_PAIRS)
PHISTATE_INLINE U pair_bits(F even, F odd) {
    // cvtne2ps puts the second source in the low half: 16 bf16 of even, then 16 of odd; interleave them.
    const __m512i both = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(odd, even));
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3,
                                           18, 2, 17, 1, 16, 0);
    return reinterpret_cast<U>(_mm512_permutexvar_epi16(order, both));
}
PHISTATE_INLINE void store_pairs(Pair* p, U x) { _mm512_storeu_si512(p, reinterpret_cast<__m512i>(x)); }

// pairs[r/2][c] = (panel[r][c], panel[r+1][c]): a right operand, or a left one read across. rows even.
inline void pair_rows(const float* panel, ptrdiff_t ld, int64_t rows, int64_t columns, Pair* pairs, ptrdiff_t pairs_ld) {
    for (int64_t r = 0; r < rows; r += 2)
        for (int64_t c = 0; c < columns; c += L)
            store_pairs(pairs + r / 2 * pairs_ld + c, pair_bits(load(panel + r * ld + c), load(panel + (r + 1) * ld + c)));
}

// pairs[r][c/2] = (panel[r][c], panel[r][c+1]): a left operand read along its rows. columns a multiple of 2L.
inline void pair_columns(const float* panel, ptrdiff_t ld, int64_t rows, int64_t columns, Pair* pairs, ptrdiff_t pairs_ld) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < columns; c += 2 * L) {
            const __m512bh both = _mm512_cvtne2ps_pbh(load(panel + r * ld + c + L), load(panel + r * ld + c));
            _mm512_storeu_si512(pairs + r * pairs_ld + c / 2, reinterpret_cast<__m512i>(both));
        }
}
#endif

}  // namespace PHISTATE_NS
