// What a chunk keeps of the state before it: the exponential of its summed log-decays, as the float the state is
// multiplied by. Near 1 that float is off by up to 2⁻²⁵, and a slow decay rounds the same way chunk after chunk, so
// that a long memory would drift. What the rounding took is therefore added, as a log-decay, to the next chunk's: the
// product over any number of chunks is off by one rounding.
#pragma once

#include "vec.h"

namespace PHISTATE_NS {

constexpr float kSlow = -0.5f;  // a faster chunk forgets before anything drifts

// exp(total + carried); carried becomes what rounding took from it, 0 after a fast chunk.
PHISTATE_INLINE F kept(F total, F& carried) {
    const F x = total + carried;
    // exp(x) − 1 by its Taylor series to degree 8, whose remainder at kSlow is 5e-9; above 1 only by what was carried.
    F p = splat(1.0f / 40320);
    p = fma(p, x, splat(1.0f / 5040));
    p = fma(p, x, splat(1.0f / 720));
    p = fma(p, x, splat(1.0f / 120));
    p = fma(p, x, splat(1.0f / 24));
    p = fma(p, x, splat(1.0f / 6));
    p = fma(p, x, splat(0.5f));
    p = fma(p * x, x, x);
    const F one = splat(1.0f), factor = one + p, lost = (p - (factor - one)) / factor;
    const I slow = reinterpret_cast<I>(x >= splat(kSlow));
    carried = select(slow, lost, zero());
    return select(slow, factor, exp(x));
}

inline float kept(float total, float& carried) {
    F lost = splat(carried);
    const F factor = kept(splat(total), lost);
    carried = lost[0];
    return factor[0];
}

}  // namespace PHISTATE_NS
