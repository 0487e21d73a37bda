// What the kernels of the delta family share. For a chunk of C tokens with the state S before it, and
// D[t][j] the decay from after j through t, D[t][start] the one since the chunk began (DESIGN: one equation):
//   (I + A diag β) W = V − (E ⊙ D[·][start]) S       A = strict lower (E Kᵀ ⊙ D), a triangular system
//   O = (Q ⊙ D[·][start]) S + (Q Kᵀ ⊙ D) diag β W
//   S ← D[end][start] ⊙ S + (K ⊙ D[end][·])ᵀ diag β W
// W holds what each write finds missing, v − S'ᵀe; it is solved for directly, block after block: neither an
// inverse, which can overflow where W is small, nor a second right-hand side is formed. Erase keys E are K where the
// call gives none: their panel is then the keys'.
#pragma once

#include "linear_attention.h"

namespace PHISTATE_NS {

void delta_step(const phistate_linear_attention& call);  // forward, token by token

namespace delta {

constexpr int C = 32;                  // tokens a chunk: 6D² + 4CD operations a token, and a rank-C update of S
constexpr int kSolved = 8;             // rows solved in registers
constexpr int kStrip = kCols * L;      // columns of S handled at a time: D rows of them stay in L1

static_assert(PHISTATE_SEGMENT % C == 0);
constexpr int64_t kStateSlack = L;     // a row packed one column to the right ends beyond its panel

// Columns of V and S in panels: an optional column of ones (the normaliser's) and then values
// [first, first + width), cut into strips that are contiguous in scratch.
struct Columns {
    int64_t first, width, ones;

    int64_t total() const { return ones + width; }
    int64_t strips() const { return (total() + kStrip - 1) / kStrip; }
    int64_t skip(int64_t strip) const { return strip == 0 ? ones : 0; }                        // panel columns that hold no value
    int64_t value(int64_t strip) const { return first + strip * kStrip - ones + skip(strip); }  // first value of the strip
    int64_t count(int64_t strip) const { return least<int64_t>(kStrip, total() - strip * kStrip) - skip(strip); }
    int64_t width_vectors(int64_t strip) const { return vectors(count(strip) + skip(strip)); }
};

// The state, strip after strip: [strips][kp][kStrip].
inline void load_state(const float* s, const float* z, int64_t key_dim, int64_t value_dim, const Columns& columns, int64_t kp, float* panel) {
    memset(panel, 0, columns.strips() * kp * kStrip * sizeof(float));
    for (int64_t i = 0; i < columns.strips(); ++i) {
        float* strip = panel + i * kp * kStrip;
        for (int64_t r = 0; r < key_dim; ++r) {
            if (s && columns.count(i) > 0)
                memcpy(strip + r * kStrip + columns.skip(i), s + r * value_dim + columns.value(i), columns.count(i) * sizeof(float));
            if (z && columns.skip(i)) strip[r * kStrip] = z[r];
        }
    }
}
inline void save_state(const float* panel, int64_t key_dim, int64_t value_dim, const Columns& columns, int64_t kp, float* s, float* z) {
    for (int64_t i = 0; i < columns.strips(); ++i) {
        const float* strip = panel + i * kp * kStrip;
        for (int64_t r = 0; r < key_dim; ++r) {
            if (s) memcpy(s + r * value_dim + columns.value(i), strip + r * kStrip + columns.skip(i), columns.count(i) * sizeof(float));
            if (z && columns.skip(i)) z[r] = strip[r * kStrip];
        }
    }
}

// A strip of values; the column of ones is zero at padded tokens.
inline void pack_values(const phistate_view& view, int64_t batch, int64_t time, int64_t head, int64_t rows, const Columns& columns,
                        int64_t strip, const uint8_t* live, float* panel) {
    const int64_t skip = columns.skip(strip);
    if (skip) memset(panel, 0, C * kStrip * sizeof(float));
    if (columns.count(strip) > 0)
        pack(view, batch, time, head, rows, columns.value(strip), columns.count(strip), nullptr, live, panel + skip, kStrip, C);
    if (skip)
        for (int64_t r = 0; r < C; ++r) panel[r * kStrip] = r < rows && !(live && !live[r]) ? 1.0f : 0.0f;
}

// 1 / √(Σx² + 1e-6) of each row, the models' definition of this norm; ones without.
inline void inverse_norms(const float* panel, int64_t kp, int64_t rows, bool wanted, float* inverse) {
    for (int64_t r = 0; r < rows; ++r) {
        if (!wanted) {
            inverse[r] = 1.0f;
            continue;
        }
        F squares = zero();
        for (int64_t c = 0; c < kp; c += L) squares = fma(load(panel + r * kp + c), load(panel + r * kp + c), squares);
        inverse[r] = 1.0f / __builtin_sqrtf(sum(squares) + 1e-6f);
    }
}

inline void scale_each_row(float* panel, int64_t kp, int64_t rows, const float* gain) {
    for (int64_t r = 0; r < rows; ++r) {
        const F g = splat(gain[r]);
        for (int64_t c = 0; c < kp; c += L) store(panel + r * kp + c, load(panel + r * kp + c) * g);
    }
}

// Rows [r, r + kSolved) of (I − a) X = W, a strictly lower triangular and given as is, W replaced by X.
template <int NR>
PHISTATE_INLINE void solve_rows_down(ptrdiff_t r, const float* a, float* w) {
    F x[kSolved][NR];
#pragma GCC unroll 8
    for (int i = 0; i < kSolved; ++i)
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) x[i][n] = load(w + (r + i) * kStrip + n * L);
    for (ptrdiff_t j = 0; j < r; ++j) {
        F known[NR];
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) known[n] = load(w + j * kStrip + n * L);
#pragma GCC unroll 8
        for (int i = 0; i < kSolved; ++i) {
            const F factor = splat(a[(r + i) * C + j]);
#pragma GCC unroll 4
            for (int n = 0; n < NR; ++n) x[i][n] = fma(factor, known[n], x[i][n]);
        }
    }
#pragma GCC unroll 8
    for (int j = 0; j < kSolved; ++j)
#pragma GCC unroll 8
        for (int i = j + 1; i < kSolved; ++i) {
            const F factor = splat(a[(r + i) * C + r + j]);
#pragma GCC unroll 4
            for (int n = 0; n < NR; ++n) x[i][n] = fma(factor, x[j][n], x[i][n]);
        }
#pragma GCC unroll 8
    for (int i = 0; i < kSolved; ++i)
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) store(w + (r + i) * kStrip + n * L, x[i][n]);
}

// The same for a strictly upper triangular a; `rows` (a multiple of kSolved) is where the system ends.
template <int NR>
PHISTATE_INLINE void solve_rows_up(ptrdiff_t r, ptrdiff_t rows, const float* a, float* w) {
    F x[kSolved][NR];
#pragma GCC unroll 8
    for (int i = 0; i < kSolved; ++i)
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) x[i][n] = load(w + (r + i) * kStrip + n * L);
    for (ptrdiff_t j = r + kSolved; j < rows; ++j) {
        F known[NR];
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) known[n] = load(w + j * kStrip + n * L);
#pragma GCC unroll 8
        for (int i = 0; i < kSolved; ++i) {
            const F factor = splat(a[(r + i) * C + j]);
#pragma GCC unroll 4
            for (int n = 0; n < NR; ++n) x[i][n] = fma(factor, known[n], x[i][n]);
        }
    }
#pragma GCC unroll 8
    for (int j = kSolved - 1; j > 0; --j)
#pragma GCC unroll 8
        for (int i = 0; i < j; ++i) {
            const F factor = splat(a[(r + i) * C + r + j]);
#pragma GCC unroll 4
            for (int n = 0; n < NR; ++n) x[i][n] = fma(factor, x[j][n], x[i][n]);
        }
#pragma GCC unroll 8
    for (int i = 0; i < kSolved; ++i)
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) store(w + (r + i) * kStrip + n * L, x[i][n]);
}

// (I − a) X = W on a strip of n vectors, rows rounded up to kSolved (a and W are zero there).
inline void solve_down(int64_t rows, int64_t n, const float* a, float* w) {
    constexpr int kWide = kCols / 2;
    for (ptrdiff_t v = 0; v < n;) {
        const bool wide = n - v >= kWide;
        for (ptrdiff_t r = 0; r < rows; r += kSolved) {
            if (wide)
                solve_rows_down<kWide>(r, a, w + v * L);
            else
                solve_rows_down<1>(r, a, w + v * L);
        }
        v += wide ? kWide : 1;
    }
}
inline void solve_up(int64_t rows, int64_t n, const float* a, float* w) {
    constexpr int kWide = kCols / 2;
    const ptrdiff_t end = round_up(rows, kSolved);
    for (ptrdiff_t v = 0; v < n;) {
        const bool wide = n - v >= kWide;
        for (ptrdiff_t r = end - kSolved; r >= 0; r -= kSolved) {
            if (wide)
                solve_rows_up<kWide>(r, end, a, w + v * L);
            else
                solve_rows_up<1>(r, end, a, w + v * L);
        }
        v += wide ? kWide : 1;
    }
}

}  // namespace delta
}  // namespace PHISTATE_NS
