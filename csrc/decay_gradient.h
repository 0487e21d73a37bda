// The gradient of a chunk's log-decays: the sum of all that passes through each of them, pairs of a later query and an
// earlier key, later queries that read the state before the chunk, earlier keys that reach the state after it, and what
// of the one state reaches the other. Each is summed from the side where nothing else enters, so that no two large sums
// cancel: gradients of strong decays come out small, not as rounding errors, and errors do not grow with T.
#pragma once

#include "vector_decay.h"

namespace PHISTATE_NS {

// Of `Tokens` tokens, one number each or, for a decay per feature, [Tokens, columns].
template <int Tokens>
class DecayGradient {
public:
    DecayGradient(phistate::Scratch& scratch, int64_t columns, bool per_feature)
        : columns_(columns), per_feature_(per_feature), sums_(scratch.floats(per_feature ? Tokens * columns : Tokens)) {}

    float* data() { return sums_; }

    // Begins with what passes from the state before the chunk to the one after it: `before` and the gradient `ds` of the
    // latter, both [rows, columns], rows a multiple of 4, and what the chunk keeps, per feature or in all.
    void carry(const float* before, const float* ds, int64_t rows, const float* keep) {
        F total = zero();
        for (int64_t c = 0; c < columns_; c += L) {
            F sums[4] = {};  // enough at once to hide an addition's latency
            for (int64_t j = 0; j < rows; j += 4)
#pragma GCC unroll 4
                for (int64_t i = 0; i < 4; ++i) sums[i] = fma(load(before + (j + i) * columns_ + c), load(ds + (j + i) * columns_ + c), sums[i]);
            F x = (sums[0] + sums[1]) + (sums[2] + sums[3]);
            total += x;
            if (!per_feature_) continue;
            x *= load(keep + c);
            for (int64_t t = 0; t < Tokens; ++t) store(sums_ + t * columns_ + c, x);
        }
        if (per_feature_) return;
        for (int64_t t = 0; t < Tokens; ++t) sums_[t] = sum(total) * *keep;
    }

    // What queries x read from before the chunk passed every decay up to them.
    void before(const float* x, const float* dx) {
        if (per_feature_) return sum_from_end(x, dx, columns_, Tokens, columns_, sums_);
        float total = 0.0f;
        for (int64_t t = Tokens - 1; t >= 0; --t) sums_[t] += total += dot(x + t * columns_, dx + t * columns_);
    }
    // What keys x gave to after the chunk passes every decay past them.
    void after(const float* x, const float* dx) {
        if (per_feature_) return sum_from_start(x, dx, columns_, Tokens, columns_, sums_);
        float total = 0.0f;
        for (int64_t t = 0; t < Tokens; ++t) {
            sums_[t] += total;
            total += dot(x + t * columns_, dx + t * columns_);
        }
    }
    // Pairs inside the chunk, in all: sums[t] += Σ_{i≥t} Σ_{j<t} d_scores[i][j]·scores[i][j], one of the two decayed.
    // Those of a decay per feature are VectorDecay's.
    void inside(const float* d_scores, const float* scores, int64_t rows) {
        float passed[Tokens] = {};
        for (int64_t t = rows - 1; t > 0; --t) {
            F total = zero();
            for (int64_t c = 0; c < t; c += L) {
                const F x = fma(load(d_scores + t * Tokens + c), load(scores + t * Tokens + c), load(passed + c));
                store(passed + c, x);
                total += load(passed + c, static_cast<int>(least<int64_t>(L, t - c)));
            }
            sums_[t] += sum(total);
        }
    }

private:
    float dot(const float* x, const float* y) const {
        F total = zero();
        for (int64_t c = 0; c < columns_; c += L) total = fma(load(x + c), load(y + c), total);
        return sum(total);
    }

    const int64_t columns_;
    const bool per_feature_;
    float* sums_;
};

}  // namespace PHISTATE_NS
