// One vector of L floats behind one interface, whatever the instruction set: F is a compiler vector type, so
// + - * / work on it; loads and stores convert from and to the storage types and take a count for tails.
#pragma once

#include <stdint.h>
#include <string.h>

#include "isa.h"

#if defined(PHISTATE_AVX512) || defined(PHISTATE_AVX2)
#include <immintrin.h>
#elif defined(PHISTATE_NEON)
#include <arm_neon.h>
#endif

#define PHISTATE_INLINE inline __attribute__((always_inline))

namespace PHISTATE_NS {

#if defined(PHISTATE_AVX512)
constexpr int L = 16;
using F = __m512;
#elif defined(PHISTATE_AVX2)
constexpr int L = 8;
using F = __m256;
#elif defined(PHISTATE_NEON)
constexpr int L = 4;
using F = float32x4_t;
#else
constexpr int L = 4;
typedef float F __attribute__((vector_size(16)));
#endif
typedef int32_t I __attribute__((vector_size(4 * L)));
typedef uint32_t U __attribute__((vector_size(4 * L)));

// Storage types. Arithmetic is always float32.
struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};
// Two neighbours along the summed dimension, rounded to bfloat16: low half the even one.
struct Pair {
    uint32_t bits;
};

constexpr int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
constexpr int64_t vectors(int64_t n) { return (n + L - 1) / L; }
template <class T>
constexpr T least(T a, T b) {
    return a < b ? a : b;
}
template <class T>
constexpr T most(T a, T b) {
    return a > b ? a : b;
}

PHISTATE_INLINE F splat(float x) {
#if defined(PHISTATE_AVX512)
    return _mm512_set1_ps(x);
#elif defined(PHISTATE_AVX2)
    return _mm256_set1_ps(x);
#elif defined(PHISTATE_NEON)
    return vdupq_n_f32(x);
#else
    return F{x, x, x, x};
#endif
}
PHISTATE_INLINE F zero() { return F{}; }

PHISTATE_INLINE F fma(F a, F b, F c) {
#if defined(PHISTATE_AVX512)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(PHISTATE_AVX2)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(PHISTATE_NEON)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}

// a·b + c rounded once, where fma() may round twice: for what thousands of chunks are added to.
PHISTATE_INLINE F fma_exactly(F a, F b, F c) {
#if defined(PHISTATE_AVX512) || defined(PHISTATE_AVX2) || defined(PHISTATE_NEON)
    return fma(a, b, c);
#else
    typedef double D __attribute__((vector_size(8 * L)));
    return __builtin_convertvector(__builtin_convertvector(a, D) * __builtin_convertvector(b, D) + __builtin_convertvector(c, D), F);
#endif
}

// ---- scalars of the storage types -------------------------------------------------------------------------

PHISTATE_INLINE float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
PHISTATE_INLINE uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
PHISTATE_INLINE float get(float x) { return x; }
PHISTATE_INLINE float get(bf16 x) { return from_bits(uint32_t{x.bits} << 16); }
PHISTATE_INLINE float get(f16 x) {
    // A subnormal is a count of 2^-24. Its bits, moved to where a float's are, would be a float's subnormal and flushed.
    const uint32_t sign = uint32_t{x.bits} & 0x8000u, rest = uint32_t{x.bits} & 0x7fffu;
    const uint32_t small = to_bits(static_cast<float>(static_cast<int32_t>(rest)) * 0x1p-24f);
    const uint32_t bits = rest >= 0x7c00u ? (rest << 13) | 0x7f800000u : rest >= 0x400u ? (rest << 13) + 0x38000000u : small;
    return from_bits(bits | sign << 16);
}
PHISTATE_INLINE void put(float* p, float x) { *p = x; }
PHISTATE_INLINE void put(bf16* p, float x) {
    uint32_t bits = to_bits(x);
    p->bits = x != x ? 0x7fc0u : static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
PHISTATE_INLINE void put(f16* p, float x) {
    const uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    uint32_t half;
    if (rest > 0x7f800000u)
        half = 0x7e00u;
    else if (rest >= 0x477ff000u)  // rounds to 65520 or more
        half = 0x7c00u;
    else if (rest < 0x38800000u)  // subnormal: the adder does the rounding
        half = to_bits(from_bits(rest) + 0.5f) - to_bits(0.5f);
    else
        half = (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13;
    p->bits = static_cast<uint16_t>(half | sign);
}

// ---- loads and stores -------------------------------------------------------------------------------------

PHISTATE_INLINE F load(const float* p) {
#if defined(PHISTATE_AVX512)
    return _mm512_loadu_ps(p);
#elif defined(PHISTATE_AVX2)
    return _mm256_loadu_ps(p);
#else
    F x;
    memcpy(&x, p, sizeof x);
    return x;
#endif
}
PHISTATE_INLINE void store(float* p, F x) {
#if defined(PHISTATE_AVX512)
    _mm512_storeu_ps(p, x);
#elif defined(PHISTATE_AVX2)
    _mm256_storeu_ps(p, x);
#else
    memcpy(p, &x, sizeof x);
#endif
}

#if defined(PHISTATE_AVX512)
PHISTATE_INLINE __mmask16 first(int n) { return static_cast<__mmask16>(n >= 16 ? 0xffff : (1u << n) - 1u); }

PHISTATE_INLINE F widen(__m256i x, bf16) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
PHISTATE_INLINE F widen(__m256i x, f16) { return _mm512_cvtph_ps(x); }
PHISTATE_INLINE __m256i narrow(F x, bf16) {
#if defined(PHISTATE_PAIRS)
    return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));
#else
    const __m512i bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
    __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(_mm512_set1_epi32(0x7fff), _mm512_and_si512(_mm512_srli_epi32(bits, 16), one)));
    up = _mm512_srli_epi32(up, 16);
    up = _mm512_mask_mov_epi32(up, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    return _mm512_cvtepi32_epi16(up);
#endif
}
PHISTATE_INLINE __m256i narrow(F x, f16) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

PHISTATE_INLINE F load(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
PHISTATE_INLINE void store(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
template <class T>
PHISTATE_INLINE F load(const T* p) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), T{});
}
template <class T>
PHISTATE_INLINE F load(const T* p, int n) {
    return widen(_mm256_maskz_loadu_epi16(first(n), p), T{});
}
template <class T>
PHISTATE_INLINE void store(T* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x, T{}));
}
template <class T>
PHISTATE_INLINE void store(T* p, F x, int n) {
    _mm256_mask_storeu_epi16(p, first(n), narrow(x, T{}));
}

#else  // 4 or 8 lanes

#if defined(PHISTATE_AVX2)
PHISTATE_INLINE F load(const bf16* p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
PHISTATE_INLINE F load(const f16* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
PHISTATE_INLINE void store(f16* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
PHISTATE_INLINE void store(bf16* p, F x) {
    const __m256i bits = _mm256_castps_si256(x), one = _mm256_set1_epi32(1);
    __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(_mm256_set1_epi32(0x7fff), _mm256_and_si256(_mm256_srli_epi32(bits, 16), one)));
    up = _mm256_srli_epi32(up, 16);
    up = _mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    up = _mm256_permute4x64_epi64(_mm256_packus_epi32(up, up), 0x8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(up));
}
#elif defined(PHISTATE_NEON)
PHISTATE_INLINE F load(const bf16* p) {
    uint16x4_t x;
    memcpy(&x, p, 8);
    return vreinterpretq_f32_u32(vshll_n_u16(x, 16));
}
PHISTATE_INLINE F load(const f16* p) {
    float16x4_t x;
    memcpy(&x, p, 8);
    return vcvt_f32_f16(x);
}
PHISTATE_INLINE void store(f16* p, F x) {
    const float16x4_t y = vcvt_f16_f32(x);
    memcpy(p, &y, 8);
}
PHISTATE_INLINE void store(bf16* p, F x) {
    for (int i = 0; i < L; ++i) put(p + i, x[i]);
}
#else
// Called, not inlined: element by element they are long, and this set is for any machine, not for speed.
template <class T>
__attribute__((noinline)) F load(const T* p) {
    F x;
    for (int i = 0; i < L; ++i) x[i] = get(p[i]);
    return x;
}
template <class T>
__attribute__((noinline)) void store(T* p, F x) {
    for (int i = 0; i < L; ++i) put(p + i, x[i]);
}
#endif

template <class T>
PHISTATE_INLINE F load(const T* p, int n) {
    if (n >= L) return load(p);
    float x[L] = {};
    for (int i = 0; i < n; ++i) x[i] = get(p[i]);
    return load(static_cast<const float*>(x));
}
template <class T>
PHISTATE_INLINE void store(T* p, F x, int n) {
    if (n >= L) return store(p, x);
    float y[L];
    store(static_cast<float*>(y), x);
    for (int i = 0; i < n; ++i) put(p + i, y[i]);
}
#endif

// ---- functions --------------------------------------------------------------------------------------------

PHISTATE_INLINE F select(I where, F yes, F no) {
    return reinterpret_cast<F>((where & reinterpret_cast<I>(yes)) | (~where & reinterpret_cast<I>(no)));
}
// x in the first n lanes, 0 ≤ n ≤ L, and 0 in the others, whatever stands there.
PHISTATE_INLINE F first_lanes(F x, int64_t n) {
#if defined(PHISTATE_AVX512)
    return _mm512_maskz_mov_ps(first(static_cast<int>(n)), x);
#else
    static constexpr struct Edge {
        int32_t at[2 * L];
        constexpr Edge() : at{} {
            for (int i = 0; i < L; ++i) at[i] = -1;
        }
    } edge;
    I lanes;
    memcpy(&lanes, edge.at + L - n, sizeof lanes);
    return reinterpret_cast<F>(reinterpret_cast<I>(x) & lanes);
#endif
}
// x where a > 0, else 0.
PHISTATE_INLINE F where_positive(F a, F x) {
#if defined(PHISTATE_AVX512)
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, zero(), _CMP_GT_OQ), x);
#else
    return select(reinterpret_cast<I>(a > zero()), x, zero());
#endif
}
// A NaN in x stays a NaN.
PHISTATE_INLINE F clamp(F x, float low, float high) {
#if defined(PHISTATE_AVX512)
    return _mm512_min_ps(splat(high), _mm512_max_ps(splat(low), x));
#elif defined(PHISTATE_AVX2)
    return _mm256_min_ps(splat(high), _mm256_max_ps(splat(low), x));
#else
    x = select(reinterpret_cast<I>(x < splat(low)), splat(low), x);
    return select(reinterpret_cast<I>(x > splat(high)), splat(high), x);
#endif
}
PHISTATE_INLINE F maximum(F a, F b) { return select(reinterpret_cast<I>(a > b), a, b); }

PHISTATE_INLINE float sum(F x) {
#if defined(PHISTATE_AVX512)
    return _mm512_reduce_add_ps(x);
#elif defined(PHISTATE_NEON)
    return vaddvq_f32(x);
#elif defined(PHISTATE_AVX2)
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
#else
    return (x[0] + x[1]) + (x[2] + x[3]);
#endif
}

// exp to about one unit in the last place; exactly 0 from −110 down to −inf, inf above 89, NaN for NaN.
// x = n·ln 2 + r with |r| ≤ ln 2 / 2; Taylor to degree 7, whose remainder r⁸/8! is 5e-9.
PHISTATE_INLINE F exp(F x) {
    x = clamp(x, -110.0f, 89.0f);
    const F magic = splat(12582912.0f);  // 1.5·2²³: adding it rounds to an integer
    const F shifted = fma(x, splat(1.44269504f), magic);
    const F n = shifted - magic;
    F r = fma(n, splat(-0.693145752f), x);  // ln 2 in two parts, the first short enough for n·part to be exact
    r = fma(n, splat(-1.42860677e-6f), r);
    F p = splat(1.0f / 5040);
    p = fma(p, r, splat(1.0f / 720));
    p = fma(p, r, splat(1.0f / 120));
    p = fma(p, r, splat(1.0f / 24));
    p = fma(p, r, splat(1.0f / 6));
    p = fma(p, r, splat(0.5f));
    p = fma(p * r, r, r) + splat(1.0f);
#if defined(PHISTATE_AVX512)
    return _mm512_scalef_ps(p, n);
#else
    // In two steps, as 2ⁿ itself may be out of range where the result is not.
    const I whole = reinterpret_cast<I>(shifted) - 0x4b400000;
    const I half = whole >> 1;
    return p * reinterpret_cast<F>((half + 127) << 23) * reinterpret_cast<F>((whole - half + 127) << 23);
#endif
}

// Subnormals cost over a hundred cycles each and come in crowds when a state decays; kernels flush them.
class FlushSubnormals {
public:
#if defined(PHISTATE_AVX512) || defined(PHISTATE_AVX2) || defined(__SSE2__)
    FlushSubnormals() : saved_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(saved_ | 0x8040u); }
    ~FlushSubnormals() { __builtin_ia32_ldmxcsr(saved_); }

private:
    unsigned saved_;
#elif defined(PHISTATE_NEON)
    FlushSubnormals() {
        asm volatile("mrs %0, fpcr" : "=r"(saved_));
        asm volatile("msr fpcr, %0" ::"r"(saved_ | uint64_t{1} << 24));
    }
    ~FlushSubnormals() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

private:
    uint64_t saved_;
#else
    FlushSubnormals() {}
    ~FlushSubnormals() {}
#endif
};

// ---- transpose of an L×L block in registers ---------------------------------------------------------------

template <int... N>
struct Lanes {};
template <int N, int... M>
struct MakeLanes : MakeLanes<N - 1, N - 1, M...> {};
template <int... M>
struct MakeLanes<0, M...> {
    using type = Lanes<M...>;
};

template <int D, int... N>
PHISTATE_INLINE void exchange(F& a, F& b, Lanes<N...>) {
    const F low = __builtin_shufflevector(a, b, ((N & D) ? L + N - D : N)...);
    const F high = __builtin_shufflevector(a, b, ((N & D) ? L + N : N + D)...);
    a = low;
    b = high;
}
template <int D>
PHISTATE_INLINE void exchange_all(F (&x)[L]) {
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i)
        if (!(i & D)) exchange<D>(x[i], x[i | D], typename MakeLanes<L>::type{});
}
PHISTATE_INLINE void transpose(F (&x)[L]) {
    exchange_all<1>(x);
    exchange_all<2>(x);
    if constexpr (L >= 8) exchange_all<4>(x);
    if constexpr (L >= 16) exchange_all<8>(x);
}

}  // namespace PHISTATE_NS
