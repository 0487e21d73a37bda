// Functions of one vector that gates and step sizes need.
#pragma once

#include "vec.h"

namespace PHISTATE_NS {

// 2^x in the parts it is made of: x = n + r with |r| ≤ 1/2, and 2^r = 1 + rest; minimax polynomial of degree 6 that is 1
// at 0, relative error 2e-8. Multiplying by 1 + rest without forming it loses nothing to the rounding of a factor near 1.
struct Exp2 {
    F rest;
#if defined(PHISTATE_AVX512)
    F n;
#else
    F first, second;  // 2ⁿ in two factors, as it may itself be out of range where the result is not
#endif

    PHISTATE_INLINE explicit Exp2(F x) {
#if defined(PHISTATE_AVX512)
        const F r = _mm512_reduce_ps(x, 0);  // 0 for an infinite x
        n = x - r;
#else
        x = clamp(x, -150.0f, 129.0f);
        const F magic = splat(12582912.0f);  // 1.5·2²³: adding it rounds to an integer
        const F shifted = x + magic;
        const F r = x - (shifted - magic);
        const I whole = reinterpret_cast<I>(shifted) - 0x4b400000;
        const I half = whole >> 1;
        first = reinterpret_cast<F>((half + 127) << 23);
        second = reinterpret_cast<F>((whole - half + 127) << 23);
#endif
        F p = splat(1.53533605e-4f);
        p = fma(p, r, splat(1.33988750e-3f));
        p = fma(p, r, splat(9.61843692e-3f));
        p = fma(p, r, splat(5.55033237e-2f));
        p = fma(p, r, splat(2.40226477e-1f));
        p = fma(p, r, splat(6.93147182e-1f));
        rest = p * r;
    }

    // 2^x·h + a·b
    PHISTATE_INLINE F keep(F h, F a, F b) const {
        const F kept = fma(rest, h, h);
#if defined(PHISTATE_AVX512)
        return fma(a, b, _mm512_scalef_ps(kept, n));
#else
        return fma(kept * first, second, a * b);
#endif
    }
};

// 2^x to about two units in the last place; 0 from −150 down to −inf, exactly 1 at 0, NaN for NaN.
PHISTATE_INLINE F exp2(F x) {
    const Exp2 parts(x);
    const F p = splat(1.0f) + parts.rest;
#if defined(PHISTATE_AVX512)
    return _mm512_scalef_ps(p, parts.n);
#else
    return p * parts.first * parts.second;
#endif
}

constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147182f;

PHISTATE_INLINE F magnitude(F x) { return reinterpret_cast<F>(reinterpret_cast<U>(x) & 0x7fffffffu); }

// 1/x for a positive, finite x.
PHISTATE_INLINE F reciprocal(F x) {
#if defined(PHISTATE_AVX512)
    const F y = _mm512_rcp14_ps(x);
    return y * fma(splat(-1.0f) * x, y, splat(2.0f));  // Newton: 14 bits become 28
#else
    return splat(1.0f) / x;
#endif
}

PHISTATE_INLINE F sigmoid(F x) { return reciprocal(splat(1.0f) + exp2(clamp(x, -80.0f, 80.0f) * splat(-kLog2E))); }
PHISTATE_INLINE F silu(F x) { return x * sigmoid(x); }
// The derivative of silu, where s = sigmoid(x).
PHISTATE_INLINE F silu_slope(F x, F s) { return s * fma(x, splat(1.0f) - s, splat(1.0f)); }

// log(1 + e^x) with its relative accuracy kept where it is small: max(x,0) + log1p(e), e = e^-|x| ≤ 1, and
// log1p(e) = 2 atanh(e/(2+e)), whose argument is at most 1/3: eight terms.
PHISTATE_INLINE F softplus(F x) {
    const F e = exp(zero() - magnitude(x));
    const F s = e / (splat(2.0f) + e), q = s * s;
    F p = splat(1.0f / 15);
    p = fma(p, q, splat(1.0f / 13));
    p = fma(p, q, splat(1.0f / 11));
    p = fma(p, q, splat(1.0f / 9));
    p = fma(p, q, splat(1.0f / 7));
    p = fma(p, q, splat(1.0f / 5));
    p = fma(p, q, splat(1.0f / 3));
    p = fma(p * q, s, s);
    return maximum(x, zero()) + p + p;
}

}  // namespace PHISTATE_NS
