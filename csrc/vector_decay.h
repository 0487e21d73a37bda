// Scores of a chunk under a decay per feature: A[t][j] = Σ_f q[t][f] k[j][f] Π_{j<i≤t} rate[i][f], j ≤ t.
//
// The chunk is halved. For a pair of neighbouring blocks of h tokens, split at m, every factor falls apart into
// one from m to t, put on the query, and one from j+1 to m, put on the key: both are products of rates ≤ 1, so
// nothing overflows however strong the decay. From blocks of h to blocks of 2h the queries of right blocks take
// the left block's whole product, and the keys of left blocks the right one's. At the end the queries carry
// everything since the chunk began, the keys everything until it ends, which is what the state needs.
#pragma once

#include "pack.h"

namespace PHISTATE_NS {

constexpr int kDirect = 8;  // blocks this small are summed pair by pair

// Rows of `a` times one row of factors.
inline void scale_rows(float* a, ptrdiff_t ld, int64_t rows, int64_t columns, const float* factor) {
    for (int64_t c = 0; c < columns; c += L) {
        const F f = load(factor + c);
        for (int64_t r = 0; r < rows; ++r) store(a + r * ld + c, load(a + r * ld + c) * f);
    }
}

// One block of kDirect tokens, pair by pair.
inline void direct_scores(const float* q, const float* k, const float* rate, ptrdiff_t ld, int64_t columns, float* scores,
                          ptrdiff_t scores_ld) {
    for (int t = 0; t < kDirect; ++t) {
        F sums[kDirect];
        for (F& x : sums) x = zero();
        for (int64_t c = 0; c < columns; c += L) {
            F running = load(q + t * ld + c);
#pragma GCC unroll 8
            for (int j = kDirect - 1; j >= 0; --j) {
                if (j > t) continue;
                sums[j] = fma(running, load(k + j * ld + c), sums[j]);
                running *= load(rate + j * ld + c);
            }
        }
        float* row = scores + t * scores_ld;
        for (int j = 0; j < kDirect; ++j) row[j] = sum(sums[j]);  // zeros above the diagonal
    }
}

// Products of rates from each kDirect-block's start through each token (`since`) and from after each token
// through the block's end (`until`), and of whole blocks.
inline void local_products(const float* rate, ptrdiff_t ld, int64_t tokens, int64_t columns, float* since, float* until, float* whole) {
    for (int64_t b = 0; b < tokens; b += kDirect)
        for (int64_t c = 0; c < columns; c += L) {
            F forward = splat(1.0f), backward = splat(1.0f);
            for (int i = 0; i < kDirect; ++i) {
                forward *= load(rate + (b + i) * ld + c);
                store(since + (b + i) * ld + c, forward);
                const int64_t j = b + kDirect - 1 - i;
                store(until + j * ld + c, backward);
                backward *= load(rate + j * ld + c);
            }
            store(whole + b / kDirect * ld + c, forward);
        }
}

// q, k, rate: [tokens, ld] panels; tokens a power of two times kDirect and a multiple of L. On return q and k are
// scaled as told above, whole[0] is the chunk's product of rates, and scores [tokens, scores_ld] holds zeros above
// the diagonal. kt: scratch [columns, tokens].
// whole: [tokens / kDirect, ld].
inline void vector_decay_scores(float* q, float* k, const float* rate, ptrdiff_t ld, int64_t tokens, int64_t columns, float* kt,
                                float* since, float* until, float* whole, float* scores, ptrdiff_t scores_ld) {
    local_products(rate, ld, tokens, columns, since, until, whole);
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t c = 0; c < tokens; c += L) store(scores + t * scores_ld + c, zero());
    for (int64_t b = 0; b < tokens; b += kDirect)
        direct_scores(q + b * ld, k + b * ld, rate + b * ld, ld, columns, scores + b * scores_ld + b, scores_ld);
    for (int64_t r = 0; r < tokens; ++r)
        for (int64_t c = 0; c < columns; c += L) {
            store(q + r * ld + c, load(q + r * ld + c) * load(since + r * ld + c));
            store(k + r * ld + c, load(k + r * ld + c) * load(until + r * ld + c));
        }
    for (int64_t h = kDirect; h < tokens; h *= 2) {
        // Only left blocks are read, but a transpose moves whole vectors of tokens.
        for (int64_t b = 0; b < tokens; b += 2 * h) {
            const int64_t wide = round_up(h, L);
            transpose_panel(k + b * ld, ld, least(wide, tokens - b), columns, kt, wide);
            // The product is whole vectors wide: with h < L it would overwrite the right block's diagonal.
            if (h % L == 0) {
                product<float>(h, h / L, columns, {q + (b + h) * ld, ld, 1}, {kt, wide}, {scores + (b + h) * scores_ld + b, scores_ld});
            } else {
                float part[L * L];
                product<float>(h, 1, columns, {q + (b + h) * ld, ld, 1}, {kt, wide}, {part, L});
                for (int64_t r = 0; r < h; ++r) store(scores + (b + h + r) * scores_ld + b, load(part + r * L), static_cast<int>(h));
            }
            float* left = whole + b / kDirect * ld;
            float* right = whole + (b + h) / kDirect * ld;
            scale_rows(q + (b + h) * ld, ld, h, columns, left);
            scale_rows(k + b * ld, ld, h, columns, right);
            for (int64_t c = 0; c < columns; c += L) store(left + c, load(left + c) * load(right + c));
        }
    }
}

}  // namespace PHISTATE_NS
