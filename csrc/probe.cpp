// What tests and the benchmark ask of the building blocks themselves.
#include <time.h>

#include "pack.h"
#include "runtime.h"
#include "tile.h"
#include "vec.h"

namespace PHISTATE_NS {

void probe_exp(int64_t n, const float* x, float* y) {
    for (int64_t i = 0; i < n; i += L) {
        const int count = static_cast<int>(least<int64_t>(L, n - i));
        store(y + i, exp(load(x + i, count)), count);
    }
}

int probe_product(int64_t m, int64_t n, int64_t k, const float* a, const float* b, float* c, bool pairs) {
    phistate::Scratch scratch;
    const int64_t ka = round_up(k, 2 * L), nb = round_up(n, L);
    float* left = scratch.floats(m * ka);
    float* right = scratch.floats(ka * nb);
    float* out = scratch.floats(m * nb);
    for (int64_t i = 0; i < m * ka; ++i) left[i] = 0;
    pack_rows(a, k, m, k, nullptr, nullptr, left, ka, m);
    pack_rows(b, n, k, n, nullptr, nullptr, right, nb, ka);
    if (!pairs) {
        product<float>(m, vectors(n), k, {left, ka, 1}, {right, nb}, {out, nb});
    } else {
#if defined(PHISTATE_PAIRS)
        Pair* left_pairs = static_cast<Pair*>(scratch.bytes(m * ka * 2));
        Pair* right_pairs = static_cast<Pair*>(scratch.bytes(ka * nb * 2));
        pair_columns(left, ka, m, ka, left_pairs, ka / 2);
        pair_rows(right, nb, ka, nb, right_pairs, nb);
        product<Pair>(m, vectors(n), ka / 2, {left_pairs, ka / 2, 1}, {right_pairs, nb}, {out, nb});
#else
        return phistate::fail("pairs: this instruction set multiplies no bfloat16");
#endif
    }
    unpack_rows(out, nb, m, n, c, n);
    return 0;
}

double probe_peak(bool pairs) {
#if !defined(PHISTATE_PAIRS)
    if (pairs) return 0.0;
#endif
    double best = 0.0;
    for (int attempt = 0; attempt < 5; ++attempt) {
        timespec start, stop;
        clock_gettime(CLOCK_MONOTONIC, &start);
        F sums[12];
        for (F& x : sums) x = splat(1.0f);
        F factor = splat(0.5f);
        constexpr int64_t kSteps = 2000000;
        for (int64_t i = 0; i < kSteps; ++i) {
#pragma GCC unroll 12
            for (int j = 0; j < 12; ++j) {
#if defined(PHISTATE_PAIRS)
                if (pairs)
                    sums[j] = _mm512_dpbf16_ps(sums[j], reinterpret_cast<__m512bh>(factor), reinterpret_cast<__m512bh>(factor));
                else
#endif
                    sums[j] = fma(sums[j], factor, factor);
                asm volatile("" : "+x"(sums[j]));
            }
        }
        clock_gettime(CLOCK_MONOTONIC, &stop);
        const double seconds = (stop.tv_sec - start.tv_sec) + 1e-9 * (stop.tv_nsec - start.tv_nsec);
        best = most(best, kSteps * 12.0 * L * (pairs ? 4 : 2) / seconds);
    }
    return best;
}

}  // namespace PHISTATE_NS
