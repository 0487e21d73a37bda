// Scores of a chunk under a decay per feature: A[t][j] = Σ_f q[t][f] k[j][f] Π_{j<i≤t} rate[i][f], j ≤ t.
//
// The chunk is halved. For a pair of neighbouring blocks of h tokens, split at m, every factor falls apart into
// one from m to t, put on the query, and one from j+1 to m, put on the key: both are products of rates ≤ 1, so
// nothing overflows however strong the decay. From blocks of h to blocks of 2h the queries of right blocks take
// the left block's whole product, and the keys of left blocks the right one's. At the end the queries carry
// everything since the chunk began, the keys everything until it ends, which is what the state needs.
#pragma once

#include "pack.h"
#include "runtime.h"

namespace PHISTATE_NS {

constexpr int kDirect = 8;  // blocks this small are summed pair by pair

// a[r][c] = b[r][c]·factor[c]
inline void scale_rows(float* a, const float* b, ptrdiff_t ld, int64_t rows, int64_t columns, const float* factor) {
    for (int64_t c = 0; c < columns; c += L) {
        const F f = load(factor + c);
        for (int64_t r = 0; r < rows; ++r) store(a + r * ld + c, load(b + r * ld + c) * f);
    }
}
inline void add(float* a, const float* b, int64_t n) {
    for (int64_t i = 0; i < n; i += L) store(a + i, load(a + i) + load(b + i));
}
inline void multiply(float* a, const float* b, const float* c, int64_t n) {
    for (int64_t i = 0; i < n; i += L) store(a + i, load(b + i) * load(c + i));
}

// d[t] += Σ_{i≥t} x[i]⊙y[i], and d[t] += Σ_{j<t} x[j]⊙y[j]: decays' gradients, see additive_backward.cpp.
inline void sum_from_end(const float* x, const float* y, ptrdiff_t ld, int64_t rows, int64_t columns, float* d) {
    for (int64_t c = 0; c < columns; c += L) {
        F total = zero();
        for (int64_t i = (rows - 1) * ld + c; i >= 0; i -= ld) {
            total = fma(load(x + i), load(y + i), total);
            store(d + i, load(d + i) + total);
        }
    }
}
inline void sum_from_start(const float* x, const float* y, ptrdiff_t ld, int64_t rows, int64_t columns, float* d) {
    for (int64_t c = 0; c < columns; c += L) {
        F total = zero();
        for (int64_t i = c; i < rows * ld; i += ld) {
            store(d + i, load(d + i) + total);
            total = fma(load(x + i), load(y + i), total);
        }
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

// Gradients of one block's scores: adds to dq, dk and, unless null, d_decay. Sums go by Horner's rule over rates.
inline void direct_gradients(const float* q, const float* k, const float* rate, ptrdiff_t ld, int64_t columns, const float* d_scores,
                             ptrdiff_t scores_ld, float* dq, float* dk, float* d_decay) {
    for (int64_t c = 0; c < columns; c += L) {
        F passed[kDirect];  // what pairs of two different tokens give to d_decay, query's side less key's
        for (int t = 0; t < kDirect; ++t) {
            F total = zero();
            for (int j = 0; j < t; ++j) total = load(rate + (j + 1) * ld + c) * fma(splat(d_scores[t * scores_ld + j]), load(k + j * ld + c), total);
            passed[t] = load(q + t * ld + c) * total;
            total = fma(splat(d_scores[t * scores_ld + t]), load(k + t * ld + c), total);
            store(dq + t * ld + c, load(dq + t * ld + c) + total);
        }
        for (int j = 0; j < kDirect; ++j) {
            F total = zero();
            for (int t = kDirect - 1; t > j; --t) total = load(rate + t * ld + c) * fma(splat(d_scores[t * scores_ld + j]), load(q + t * ld + c), total);
            passed[j] -= load(k + j * ld + c) * total;
            total = fma(splat(d_scores[j * scores_ld + j]), load(q + j * ld + c), total);
            store(dk + j * ld + c, load(dk + j * ld + c) + total);
        }
        if (!d_decay) continue;
        F total = zero();
        for (int t = kDirect - 1; t > 0; --t) {
            total += passed[t];
            store(d_decay + t * ld + c, load(d_decay + t * ld + c) + total);
        }
    }
}

// One chunk of `Tokens` (a power of two times kDirect, a multiple of L), panels of `ld` columns.
// Level l has blocks of kDirect·2^l tokens; on the last, the block is the chunk.
template <int Tokens>
class VectorDecay {
public:
    static constexpr int kLevels = Tokens == kDirect ? 1 : Tokens == 2 * kDirect ? 2 : Tokens == 4 * kDirect ? 3 : 4;
    static_assert(Tokens == kDirect << (kLevels - 1) && Tokens % L == 0);

    // columns 0: not to be used, takes no memory.
    VectorDecay(phistate::Scratch& scratch, int64_t columns) : ld_(columns) {
        since_ = scratch.floats(Tokens * ld_);
        until_ = scratch.floats(Tokens * ld_);
        kt_ = scratch.floats(Tokens * ld_);
        for (int l = 0; l < kLevels; ++l) {
            q_[l] = scratch.floats(Tokens * ld_);
            k_[l] = scratch.floats(Tokens * ld_);
            whole_[l] = scratch.floats((Tokens / kDirect >> l) * ld_);
        }
    }

    // Takes the chunk's rates and keys (which must stay where they are).
    void keys(const float* k, const float* rate) {
        key_ = k;
        rate_ = rate;
        // Products from each small block's start through each token, and from after it through the block's end.
        for (int64_t b = 0; b < Tokens; b += kDirect)
            for (int64_t c = 0; c < ld_; c += L) {
                F forward = splat(1.0f), backward = splat(1.0f);
                for (int i = 0; i < kDirect; ++i) {
                    forward *= load(rate + (b + i) * ld_ + c);
                    store(since_ + (b + i) * ld_ + c, forward);
                    const int64_t j = b + kDirect - 1 - i;
                    store(until_ + j * ld_ + c, backward);
                    backward *= load(rate + j * ld_ + c);
                }
                store(whole_[0] + b / kDirect * ld_ + c, forward);
            }
        multiply(k_[0], k, until_, Tokens * ld_);
        for (int l = 0; l + 1 < kLevels; ++l) {
            const int64_t h = kDirect << l;
            for (int64_t b = 0; b < Tokens; b += 2 * h) {
                const float *left = block(whole_[l], l, b), *right = block(whole_[l], l, b + h);
                multiply(block(whole_[l + 1], l + 1, b), left, right, ld_);
                scale_rows(k_[l + 1] + b * ld_, k_[l] + b * ld_, ld_, h, ld_, right);
                memcpy(k_[l + 1] + (b + h) * ld_, k_[l] + (b + h) * ld_, h * ld_ * sizeof(float));
            }
        }
    }

    // Takes one head's queries.
    void queries(const float* q) {
        query_ = q;
        multiply(q_[0], q, since_, Tokens * ld_);
        for (int l = 0; l + 1 < kLevels; ++l) {
            const int64_t h = kDirect << l;
            for (int64_t b = 0; b < Tokens; b += 2 * h) {
                memcpy(q_[l + 1] + b * ld_, q_[l] + b * ld_, h * ld_ * sizeof(float));
                scale_rows(q_[l + 1] + (b + h) * ld_, q_[l] + (b + h) * ld_, ld_, h, ld_, block(whole_[l], l, b));
            }
        }
    }

    const float* queries_since_start() const { return q_[kLevels - 1]; }
    const float* keys_until_end() const { return k_[kLevels - 1]; }
    const float* whole() const { return whole_[kLevels - 1]; }

    // scores [Tokens, Tokens], zeros above the diagonal.
    void scores(float* scores) {
        memset(scores, 0, Tokens * Tokens * sizeof(float));
        for (int64_t b = 0; b < Tokens; b += kDirect)
            direct_scores(query_ + b * ld_, key_ + b * ld_, rate_ + b * ld_, ld_, ld_, scores + b * Tokens + b, Tokens);
        for (int l = 0; l + 1 < kLevels; ++l) {
            const int64_t h = kDirect << l, wide = round_up(h, L);
            for (int64_t b = 0; b < Tokens; b += 2 * h) {
                const float* q = q_[l] + (b + h) * ld_;
                float* to = scores + (b + h) * Tokens + b;
                // Only left blocks are read, but a transpose moves whole vectors of tokens.
                transpose_panel(k_[l] + b * ld_, ld_, wide, ld_, kt_, wide);
                if (h % L == 0) {
                    product<float>(h, h / L, ld_, {q, ld_, 1}, {kt_, wide}, {to, Tokens});
                } else {  // a whole vector would overwrite the right block's diagonal
                    float part[kDirect * L];
                    product<float>(h, 1, ld_, {q, ld_, 1}, {kt_, wide}, {part, L});
                    for (int64_t r = 0; r < h; ++r) store(to + r * Tokens, load(part + r * L), static_cast<int>(h));
                }
            }
        }
    }

    // On entry dq and dk hold the gradients of queries_since_start and keys_until_end; on return those of the
    // queries and the keys, d_scores [Tokens, Tokens] (its lower triangle) included. d_decay, unless null, gets
    // what passes between tokens of the chunk.
    void gradients(const float* d_scores, float* dq, float* dk, float* d_decay) {
        for (int l = kLevels - 2; l >= 0; --l) {
            const int64_t h = kDirect << l;
            for (int64_t b = 0; b < Tokens; b += 2 * h) {
                const int64_t left = b * ld_, right = (b + h) * ld_;
                const float* d = d_scores + (b + h) * Tokens + b;
                scale_rows(dq + right, dq + right, ld_, h, ld_, block(whole_[l], l, b));
                scale_rows(dk + left, dk + left, ld_, h, ld_, block(whole_[l], l, b + h));
                float* part = kt_;
                product<float>(h, ld_ / L, h, {d, Tokens, 1}, {k_[l] + left, ld_}, {part, ld_});
                if (d_decay) sum_from_end(q_[l] + right, part, ld_, h, ld_, d_decay + right);
                add(dq + right, part, h * ld_);
                product<float>(h, ld_ / L, h, {d, 1, Tokens}, {q_[l] + right, ld_}, {part, ld_});
                if (d_decay) sum_from_start(k_[l] + left, part, ld_, h, ld_, d_decay + left);
                add(dk + left, part, h * ld_);
            }
        }
        multiply(dq, dq, since_, Tokens * ld_);
        multiply(dk, dk, until_, Tokens * ld_);
        for (int64_t b = 0; b < Tokens; b += kDirect)
            direct_gradients(query_ + b * ld_, key_ + b * ld_, rate_ + b * ld_, ld_, ld_, d_scores + b * Tokens + b, Tokens,
                             dq + b * ld_, dk + b * ld_, d_decay ? d_decay + b * ld_ : nullptr);
    }

private:
    float* block(float* whole, int level, int64_t token) const { return whole + token / (kDirect << level) * ld_; }

    const int64_t ld_;
    const float *key_ = nullptr, *query_ = nullptr, *rate_ = nullptr;
    float *since_, *until_, *kt_, *q_[kLevels], *k_[kLevels], *whole_[kLevels];
};

}  // namespace PHISTATE_NS
