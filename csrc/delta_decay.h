// Vector decay inside a chunk. The chunk is cut into blocks of kBlock tokens. Within a block the scores are summed
// pair by pair; between two blocks every decay falls apart at the end of the earlier one, into a factor on the
// later token and one on the earlier. All factors are products of rates, ≤ 1, however strong the decay.
#pragma once

#include "delta.h"

namespace PHISTATE_NS {
namespace delta {

constexpr int kBlock = 16;  // half a chunk: one product below two triangles

// Rates of a chunk's tokens, as products: since (from the block's first token through this one), until (from after
// this token through the block's end), and whole blocks.
struct Rates {
    float *rate, *since, *until, *whole;

    Rates() = default;
    Rates(phistate::Scratch& scratch, int64_t kp)
        : rate(scratch.floats(C * kp)), since(scratch.floats(C * kp)), until(scratch.floats(C * kp)), whole(scratch.floats(3 * kp)) {}

    // whole[0], whole[1]: of the blocks; whole[2]: of the chunk, with `rounding` [kp] as in kept.h.
    void read(const phistate_linear_attention& call, const Span& span, int64_t time, int64_t rows, int64_t head, const uint8_t* live, int64_t kp,
              float* rounding) {
        pack(call.decay, span.batch, time, head, rows, 0, call.key_dim, nullptr, live, rate, kp, C);
        exponentiate<C>(rate, kp, whole + 2 * kp, rounding);
        for (int64_t c = 0; c < kp; c += L) {
            for (int b = 0; b < C / kBlock; ++b) {
                F forward = splat(1.0f), backward = splat(1.0f);
                for (int i = 0; i < kBlock; ++i) {
                    forward *= load(rate + (b * kBlock + i) * kp + c);
                    store(since + (b * kBlock + i) * kp + c, forward);
                    const int64_t j = b * kBlock + kBlock - 1 - i;
                    store(until + j * kp + c, backward);
                    backward *= load(rate + j * kp + c);
                }
                store(whole + b * kp + c, forward);
            }
        }
    }
};

// Lane i: the sum of x[i].
PHISTATE_INLINE F sum_each(F (&x)[L]) {
#pragma GCC unroll 16
    for (int i = 0; i < L; i += 2) {
        exchange<1>(x[i], x[i + 1], typename MakeLanes<L>::type{});
        x[i] += x[i + 1];
    }
#pragma GCC unroll 16
    for (int i = 0; i < L; i += 4) {
        exchange<2>(x[i], x[i + 2], typename MakeLanes<L>::type{});
        x[i] += x[i + 2];
    }
    if constexpr (L >= 8) {
#pragma GCC unroll 16
        for (int i = 0; i < L; i += 8) {
            exchange<4>(x[i], x[i + 4], typename MakeLanes<L>::type{});
            x[i] += x[i + 4];
        }
    }
    if constexpr (L >= 16) {
        exchange<8>(x[0], x[8], typename MakeLanes<L>::type{});
        x[0] += x[8];
    }
    return x[0];
}

// One column j of a block's scores: rows [t0, t0 + 8) of x against k_j decayed to each of them, for x = `a` and, when
// BOTH, `b`. run: k_j decayed to t0 − 1, or k_j itself when j is among the rows.
template <bool BOTH>
PHISTATE_INLINE void direct_column(const float* a, const float* b, float* run, const float* rate, int64_t kp, int t0, int j, float* a_out,
                                   float* b_out) {
    F sums[BOTH ? 16 : 8];
#pragma GCC unroll 16
    for (F& x : sums) x = zero();
    const int from = j > t0 ? j : t0;
    for (int64_t c = 0; c < kp; c += L) {
        F running = load(run + c);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            const int t = t0 + i;
            if (t < from) continue;
            if (t != j) running *= load(rate + t * kp + c);
            sums[i] = fma(running, load(a + t * kp + c), sums[i]);
            if constexpr (BOTH) sums[8 + i] = fma(running, load(b + t * kp + c), sums[8 + i]);
        }
        store(run + c, running);
    }
    float results[16];
#pragma GCC unroll 4
    for (int i = 0; i < (BOTH ? 16 : 8); i += L) {
        F part[L];
#pragma GCC unroll 16
        for (int n = 0; n < L; ++n) part[n] = i + n < (BOTH ? 16 : 8) ? sums[i + n] : zero();
        store(results + i, sum_each(part));
    }
    for (int t = from; t < t0 + 8; ++t) {
        a_out[t * C + j] = results[t - t0];
        if constexpr (BOTH) b_out[t * C + j] = results[8 + t - t0];
    }
}

// a_out[t][j] = Σ_f a[t][f] k[j][f] Π_{j<i≤t} rate[i][f] for j ≤ t in the first `rows` tokens (rounded up to eights),
// and the same of b when it is given. Zeros above the diagonal are the caller's. kt: scratch [kp, kBlock];
// left: scratch [2·kBlock, kp]; run: scratch [kp].
inline void decayed_scores(const float* a, const float* b, const float* k, const Rates& rates, int64_t kp, int64_t rows, float* kt, float* left,
                           float* run, float* a_out, float* b_out) {
    for (int64_t start = 0; start < rows; start += kBlock) {
        const int64_t at = start * kp, corner = start * C + start;
        for (int j = 0; j < kBlock; ++j) {
            memcpy(run, k + at + j * kp, kp * sizeof(float));
            for (int t0 = j / 8 * 8; t0 < kBlock && start + t0 < rows; t0 += 8) {
                if (b)
                    direct_column<true>(a + at, b + at, run, rates.rate + at, kp, t0, j, a_out + corner, b_out + corner);
                else
                    direct_column<false>(a + at, nullptr, run, rates.rate + at, kp, t0, j, a_out + corner, nullptr);
            }
        }
    }
    if (rows <= kBlock) return;
    for (int64_t j = 0; j < kBlock; ++j)
        for (int64_t c = 0; c < kp; c += L) store(left + j * kp + c, load(k + j * kp + c) * load(rates.until + j * kp + c));
    transpose_panel(left, kp, kBlock, kp, kt, kBlock);
    for (const float* x = a;; x = b) {
        for (int64_t t = kBlock; t < rows; ++t)
            for (int64_t c = 0; c < kp; c += L)
                store(left + (t - kBlock) * kp + c, load(x + t * kp + c) * load(rates.since + t * kp + c));
        float* out = x == a ? a_out : b_out;
        product<float>(rows - kBlock, kBlock / L, kp, {left, kp, 1}, {kt, kBlock}, {out + kBlock * C, C});
        if (x == b || !b) break;
    }
}

// to = x ⊙ the decay since the chunk began.
inline void decay_since(const float* x, const Rates& rates, int64_t kp, int64_t rows, float* to) {
    for (int64_t t = 0; t < rows; ++t)
        for (int64_t c = 0; c < kp; c += L) {
            F y = load(x + t * kp + c) * load(rates.since + t * kp + c);
            if (t >= kBlock) y *= load(rates.whole + c);
            store(to + t * kp + c, y);
        }
}

// to = x ⊙ the decay until the chunk ends. A chunk shorter than C is padded with rates of 1.
inline void decay_until(const float* x, const Rates& rates, int64_t kp, int64_t rows, float* to) {
    for (int64_t t = 0; t < rows; ++t)
        for (int64_t c = 0; c < kp; c += L) {
            F y = load(x + t * kp + c) * load(rates.until + t * kp + c);
            if (t < kBlock) y *= load(rates.whole + kp + c);
            store(to + t * kp + c, y);
        }
}

// One block of score_gradient, L features. x, k, rate, d_x, d_k at the block's first token and those features.
PHISTATE_INLINE void block_gradient(const float* d, const float* x, const float* k, const float* rate, int64_t kp, float* d_x, float* d_k, float* d_rate) {
    F decayed[kBlock];  // the decay from after j to the token last visited
    for (F& e : decayed) e = splat(1.0f);
    for (int t0 = 0; t0 < kBlock; t0 += 8) {
        F rows[8];
#pragma GCC unroll 8
        for (F& r : rows) r = zero();
        for (int j = 0; j < t0 + 8; ++j) {
            F e = decayed[j], column = zero(), passing = zero();
            const F key = load(k + j * kp);
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                const int t = t0 + i;
                if (t < j) continue;
                if (t > j) e *= load(rate + t * kp);
                const F g = splat(d[t * C + j]) * e;
                const F y = load(x + t * kp);
                passing = fma(rows[i], y, passing);  // rows[i] holds what comes from before j
                rows[i] = fma(g, key, rows[i]);
                column = fma(g, y, column);
            }
            decayed[j] = e;
            store(d_k + j * kp, load(d_k + j * kp) + column);
            store(d_rate + j * kp, load(d_rate + j * kp) + passing);
        }
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) store(d_x + (t0 + i) * kp, load(d_x + (t0 + i) * kp) + rows[i]);
    }
}

// With decayed_scores' A of x and k, and d[t][j] its gradient: adds to d_x, d_k and d_rate (of the
// log-decays) theirs. strict: A has no diagonal.
// d's rows from `rows` on and its upper triangle are made zero; panels hold C rows.
inline void score_gradient(float* d, const float* x, const float* k, const Rates& rates, int64_t kp, int64_t rows, bool strict, float* scratch,
                           float* left, float* d_x, float* d_k, float* d_rate) {
    for (int64_t t = 0; t < C; ++t)
        for (int64_t j = 0; j < C; ++j)
            if (t >= rows || j > t || (strict && j == t)) d[t * C + j] = 0.0f;
    for (int64_t start = 0; start < rows; start += kBlock)
        for (int64_t c = 0; c < kp; c += L) {
            const int64_t at = start * kp + c;
            block_gradient(d + start * C + start, x + at, k + at, rates.rate + at, kp, d_x + at, d_k + at, d_rate + at);
        }
    if (rows <= kBlock) return;
    const int64_t late = rows - kBlock;
    const float* below = d + kBlock * C;
    for (int64_t j = 0; j < kBlock; ++j)
        for (int64_t c = 0; c < kp; c += L) store(left + j * kp + c, load(k + j * kp + c) * load(rates.until + j * kp + c));
    product<float>(late, kp / L, kBlock, {below, C, 1}, {left, kp}, {scratch, kp});
    for (int64_t c = 0; c < kp; c += L) {
        F passing = zero();  // to this token and later ones, from the first block
        for (int64_t t = late - 1; t >= 0; --t) {
            const int64_t at = (kBlock + t) * kp + c;
            const F decay = load(rates.since + at), found = load(scratch + t * kp + c) * decay, y = load(x + at);
            store(d_x + at, load(d_x + at) + found);
            store(d_rate + at, load(d_rate + at) + (passing = fma(y, found, passing)));
            store(left + t * kp + c, y * decay);
        }
    }
    product<float>(kBlock, kp / L, late, {below, 1, C}, {left, kp}, {scratch, kp});
    for (int64_t c = 0; c < kp; c += L) {
        F passing = zero();  // from tokens before this one, to the second block
        for (int64_t j = 0; j < kBlock; ++j) {
            const int64_t at = j * kp + c;
            const F found = load(scratch + at) * load(rates.until + at);
            store(d_k + at, load(d_k + at) + found);
            store(d_rate + at, load(d_rate + at) + passing);
            passing = fma(load(k + at), found, passing);
        }
    }
}

}  // namespace delta
}  // namespace PHISTATE_NS
