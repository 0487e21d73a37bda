// Log features of a chunk made relative to their running maximum, so that none overflows and none needs an epsilon:
//   C_t = max(C_{t-1}, log k_t)    k ← exp(log k − C)    q ← exp(log q + C − m), m the largest over the features
// The state holds sums divided by exp(C). A new maximum is then a decay per feature, exp(C_{t-1} − C_t) ≤ 1. Where no
// feature's maximum rises by more than kRise inside the chunk, all its tokens may as well be taken relative to the
// last: what that puts out of float32's reach is smaller than the largest by exp(−40), and the chunk needs no decay.
#pragma once

#include <math.h>

#include "pack.h"

namespace PHISTATE_NS {

constexpr float kRise = 20.0f;

template <int Tokens>
class RunningMaximum {
public:
    RunningMaximum(phistate::Scratch& scratch, int64_t features, int64_t columns)
        : features_(features), ld_(columns), now_(scratch.floats(Tokens * columns)), shift_(scratch.floats(columns)) {}

    bool steady = true;        // one reference serves the chunk
    float log_norm[Tokens];    // m of the queries last taken

    // On entry k [Tokens, ld] holds log k and reach [ld] C before the chunk; on return k holds features, reach C after
    // it, and unless steady, rate what each token keeps.
    void keys(float* k, float* reach, float* rate, int64_t rows, const uint8_t* live) {
        F rise = zero();
        for (int64_t c = 0; c < ld_; c += L) {
            F now = load(reach + c), base = now;
            const F pad = pads(c);
            bool first = true;
            for (int64_t t = 0; t < Tokens; ++t) {
                if (t < rows && !(live && !live[t])) {
                    const F x = load(k + t * ld_ + c) + pad;
                    now = maximum(x, now);
                    if (first) base = now;
                    first = false;
                }
                store(now_ + t * ld_ + c, now);
            }
            rise = maximum(now - base, rise);
        }
        float rises[L];
        store(rises, rise);
        steady = true;
        for (float x : rises) steady = steady && x <= kRise;

        for (int64_t c = 0; c < ld_; c += L) {
            const F start = load(reach + c), pad = pads(c), end = load(now_ + (Tokens - 1) * ld_ + c);
            store(shift_ + c, ratio(start, end));
            F before = start;
            for (int64_t t = 0; t < Tokens; ++t) {
                const bool token = t < rows && !(live && !live[t]);
                const F now = steady ? end : load(now_ + t * ld_ + c);
                store(k + t * ld_ + c, token ? exp(load(k + t * ld_ + c) + pad - finite(now)) : zero());
                if (!steady) store(rate + t * ld_ + c, ratio(before, now));
                before = now;
            }
            store(reach + c, end);
        }
    }

    // Brings what was summed before a steady chunk to its reference.
    void rescale(float* s, ptrdiff_t ld, float* z, bool normalize) const {
        for (int64_t i = 0; i < features_; ++i) {
            if (shift_[i] == 1.0f) continue;
            const F factor = splat(shift_[i]);
            for (ptrdiff_t c = 0; c < ld; c += L) store(s + i * ld + c, load(s + i * ld + c) * factor);
            if (normalize) z[i] *= shift_[i];
        }
    }

    // q [Tokens, ld] holds log q on entry, features ≤ 1 on return.
    void queries(float* q, int64_t rows, const uint8_t* live) {
        for (int64_t t = 0; t < Tokens; ++t) {
            float* row = q + t * ld_;
            const float* reach = now_ + (steady ? Tokens - 1 : t) * ld_;
            log_norm[t] = 0.0f;
            if (t >= rows || (live && !live[t])) {
                for (int64_t c = 0; c < ld_; c += L) store(row + c, zero());
                continue;
            }
            F largest = splat(-INFINITY);
            for (int64_t c = 0; c < ld_; c += L) {
                const F x = load(row + c) + load(reach + c);
                store(row + c, x);
                largest = maximum(x, largest);
            }
            float lanes[L], m = -INFINITY;
            store(lanes, largest);
            for (float x : lanes) m = x > m ? x : m;
            if (m == -INFINITY) m = 0.0f;
            log_norm[t] = m;
            const F norm = splat(m);
            for (int64_t c = 0; c < ld_; c += L) store(row + c, exp(load(row + c) - norm));
        }
    }

private:
    // −inf where a column only pads: its maximum stays −inf and its features 0.
    F pads(int64_t c) const {
        float lanes[L];
        for (int i = 0; i < L; ++i) lanes[i] = c + i < features_ ? 0.0f : -INFINITY;
        return load(lanes);
    }
    static F finite(F x) { return maximum(x, splat(-3.0e38f)); }
    // exp(a − b) for a ≤ b; 1 where both are the same, −inf too.
    static F ratio(F a, F b) { return select(reinterpret_cast<I>(a == b), splat(1.0f), exp(a - b)); }

    const int64_t features_, ld_;
    float *now_, *shift_;
};

}  // namespace PHISTATE_NS
