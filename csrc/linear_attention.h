// What the kernels of linear attention, additive and delta, share: which heads and tokens a unit of work holds, reading them in
// chunks, and states between the caller's dense arrays and padded panels.
#pragma once

#include <math.h>

#include "kept.h"
#include "pack.h"
#include "parallel.h"
#include "runtime.h"

namespace PHISTATE_NS {

// Tokens [begin, end) of one sequence, in row `batch` of the tensors.
struct Span {
    int64_t batch, begin, end;
};

inline Span span_of(const phistate_linear_attention& call, int64_t sequence) {
    if (call.cu_seqlens) return {0, call.cu_seqlens[sequence], call.cu_seqlens[sequence + 1]};
    return {sequence, 0, call.time};
}

// False: the offsets of packed sequences do not fit, and the error is set.
inline bool check_offsets(const phistate_linear_attention& call) {
    if (!call.cu_seqlens) return true;
    bool fit = call.batch == 1 && call.cu_seqlens[0] == 0 && call.cu_seqlens[call.sequences] == call.time;
    for (int64_t n = 0; n < call.sequences && fit; ++n) fit = call.cu_seqlens[n] <= call.cu_seqlens[n + 1];
    if (!fit) phistate::fail(phistate::kOffsets);
    return fit;
}

// Head counts divide each other in whole groups: a head of the larger uses head / (larger / smaller).
struct Heads {
    int64_t q, k, v, s, o;
    explicit Heads(const phistate_linear_attention& call)
        : q(call.heads_q), k(call.heads_k), v(call.heads_v), s(call.heads_s), o(most(call.heads_q, call.heads_s)) {}
    int64_t key(int64_t state) const { return state / (s / k); }
    int64_t value(int64_t state) const { return state / (s / v); }
    int64_t query(int64_t output) const { return output / (o / q); }
    int64_t readers() const { return o / s; }  // output heads that read one state
};

template <class T>
PHISTATE_INLINE T* at(const phistate_view& view, int64_t batch, int64_t time, int64_t head) {
    return static_cast<T*>(view.data) + batch * view.batch + time * view.time + head * view.head;
}

inline float scalar(const phistate_view& view, int64_t batch, int64_t time, int64_t head) {
    if (view.dtype == PHISTATE_BF16) return get(*at<bf16>(view, batch, time, head));
    if (view.dtype == PHISTATE_F16) return get(*at<f16>(view, batch, time, head));
    return *at<float>(view, batch, time, head);
}

inline void put_scalar(const phistate_view& view, int64_t batch, int64_t time, int64_t head, float x) {
    if (view.dtype == PHISTATE_BF16)
        put(at<bf16>(view, batch, time, head), x);
    else if (view.dtype == PHISTATE_F16)
        put(at<f16>(view, batch, time, head), x);
    else
        put(at<float>(view, batch, time, head), x);
}

inline void pack(const phistate_view& view, int64_t batch, int64_t time, int64_t head, int64_t rows, int64_t first, int64_t n,
                 const float* gain, const uint8_t* live, float* panel, ptrdiff_t ld, int64_t padded_rows) {
    if (view.dtype == PHISTATE_BF16)
        pack_rows(at<bf16>(view, batch, time, head) + first, view.time, rows, n, gain, live, panel, ld, padded_rows);
    else if (view.dtype == PHISTATE_F16)
        pack_rows(at<f16>(view, batch, time, head) + first, view.time, rows, n, gain, live, panel, ld, padded_rows);
    else
        pack_rows(at<float>(view, batch, time, head) + first, view.time, rows, n, gain, live, panel, ld, padded_rows);
}

// The maps of enum phistate_map. What they make of padding stays zero, and of a NaN, NaN.
PHISTATE_INLINE F mapped(int64_t map, F x) {
    const F positive = clamp(x, 0.0f, INFINITY);
    return map == PHISTATE_MAP_ELU ? positive + exp(clamp(x, -INFINITY, 0.0f)) : positive;
}
PHISTATE_INLINE F slope(int64_t map, F x) {
    return map == PHISTATE_MAP_ELU ? exp(clamp(x, -INFINITY, 0.0f)) : where_positive(x, splat(1.0f));
}

// pack() of queries or keys, mapped where the call says so.
inline void pack_features(const phistate_linear_attention& call, const phistate_view& view, int64_t batch, int64_t time, int64_t head, int64_t rows,
                          const float* gain, const uint8_t* live, float* panel, ptrdiff_t ld, int64_t padded_rows) {
    const int64_t n = call.key_dim;
    pack(view, batch, time, head, rows, 0, n, call.map ? nullptr : gain, live, panel, ld, padded_rows);
    if (!call.map) return;
    const F factor = splat(static_cast<float>(call.map_scale));
    for (int64_t r = 0; r < rows; ++r) {
        if (live && !live[r]) continue;
        const F g = splat(gain ? gain[r] : 1.0f);
        for (int64_t c = 0; c < n; c += L) {
            float* x = panel + r * ld + c;
            store(x, mapped(call.map, load(x) * factor) * g, static_cast<int>(least<int64_t>(L, n - c)));
        }
    }
}

inline void unpack(const float* panel, ptrdiff_t ld, int64_t rows, int64_t n, const phistate_view& view, int64_t batch, int64_t time,
                   int64_t head, int64_t first, bool add = false, float factor = 1.0f) {
    if (view.dtype == PHISTATE_BF16)
        unpack_rows(panel, ld, rows, n, at<bf16>(view, batch, time, head) + first, view.time, add, factor);
    else if (view.dtype == PHISTATE_F16)
        unpack_rows(panel, ld, rows, n, at<f16>(view, batch, time, head) + first, view.time, add, factor);
    else
        unpack_rows(panel, ld, rows, n, at<float>(view, batch, time, head) + first, view.time, add, factor);
}

// unpack() of their gradient: of the features on entry, of what was mapped to them in `target`. `panel` is spent.
inline void unpack_features_gradient(const phistate_linear_attention& call, float* panel, ptrdiff_t ld, int64_t rows, const phistate_view& view,
                                     const phistate_view& target, int64_t batch, int64_t time, int64_t head, const uint8_t* live, bool add,
                                     float factor = 1.0f) {
    const int64_t n = call.key_dim;
    if (call.map) {
        phistate::Scratch scratch;
        float* x = scratch.floats(rows * ld);
        pack(view, batch, time, head, rows, 0, n, nullptr, live, x, ld, rows);
        const F scale = splat(static_cast<float>(call.map_scale));
        for (int64_t r = 0; r < rows; ++r) {
            const bool padding = live && !live[r];  // its features are zero whatever it holds
            for (int64_t c = r * ld; c < r * ld + n; c += L)
                store(panel + c, padding ? zero() : load(panel + c) * slope(call.map, load(x + c) * scale) * scale);
        }
    }
    unpack(panel, ld, rows, n, target, batch, time, head, 0, add, factor);
}

// Before a dense output [batch, time, heads, n] is written.
inline void expect_writes(const phistate_linear_attention& call, const phistate_view& view, int64_t heads, int64_t n) {
    const int64_t size = view.dtype == PHISTATE_F32 ? 4 : 2;
    if (view.time == heads * n) phistate::expect_writes(view.data, call.batch * call.time * heads * n * size);
}

// Marks rows of an operand for prefetching.
inline void foresee(Ahead& ahead, const phistate_view& view, int64_t batch, int64_t time, int64_t head, int64_t rows, int64_t first, int64_t n) {
    const int64_t size = view.dtype == PHISTATE_F32 ? 4 : 2;
    const char* data = static_cast<const char*>(view.data) + (batch * view.batch + time * view.time + head * view.head + first) * size;
    ahead.add(data, view.time * size, rows, n * size);
}

// A dense [key_dim, value_dim] state's columns [first, first + n) to and from a panel whose pads stay zero.
inline void load_state(const float* state, int64_t key_dim, int64_t value_dim, int64_t first, int64_t n, float* panel, ptrdiff_t ld,
                       int64_t padded_rows) {
    if (state)
        pack_rows(state + first, value_dim, key_dim, n, nullptr, nullptr, panel, ld, padded_rows);
    else
        memset(panel, 0, padded_rows * ld * sizeof(float));
}

// Where the state at token `time` of a sequence is kept: time − begin a multiple of PHISTATE_SEGMENT, not zero.
// Sequences of one row take slots from begin / SEGMENT on; as ⌊a⌋ + ⌊b⌋ ≤ ⌊a + b⌋ they never meet.
inline float* checkpoint(const phistate_linear_attention& call, const Span& span, int64_t time, int64_t head) {
    const int64_t slots = call.time / PHISTATE_SEGMENT, slot = span.begin / PHISTATE_SEGMENT + (time - span.begin) / PHISTATE_SEGMENT - 1;
    const int64_t size = call.key_dim * (call.value_dim + (call.normalize ? 1 : 0));
    return call.checkpoints + ((span.batch * call.heads_s + head) * slots + slot) * size;
}

// The per-token scalars of one chunk.
template <int Max>
struct Tokens {
    float rate[Max];   // exp(decay), 1 without; only for decay per head or per token
    float beta[Max];   // 0 for padding
    float log_decay;   // sum over the tokens; only where there are rates
    uint8_t live[Max];
    const uint8_t* mask;  // live, or null when all are
    bool beta_given;

    // Reads rows tokens from `time` on; the rest up to Max write nothing and forget nothing.
    void read(const phistate_linear_attention& call, const Span& span, int64_t time, int64_t rows, int64_t state_head) {
        mask = nullptr;
        if (call.mask) {
            const uint8_t* from = call.mask + span.batch * call.mask_batch;
            for (int64_t r = 0; r < rows; ++r) {
                live[r] = from[(time + r) * call.mask_time] != 0;
                if (!live[r]) mask = live;
            }
        }
        beta_given = call.beta.data != nullptr;
        const bool decays = call.decay_kind == PHISTATE_DECAY_HEAD || call.decay_kind == PHISTATE_DECAY_SCALAR;
        for (int64_t r = 0; r < Max; ++r) {
            const bool token = r < rows && !(mask && !live[r]);
            beta[r] = !token ? 0.0f : beta_given ? scalar(call.beta, span.batch, time + r, state_head) : 1.0f;
            rate[r] = token && decays ? scalar(call.decay, span.batch, time + r, state_head) : 0.0f;
        }
        if (!decays) {
            for (int64_t r = 0; r < Max; ++r) rate[r] = 1.0f;
            return;
        }
        F total = zero();
        for (int64_t r = 0; r < Max; r += L) {
            total += load(rate + r);
            store(rate + r, exp(load(rate + r)));
        }
        log_decay = sum(total);
    }
};

// A chunk's log-decays [Max, ld] become rates, and `keep` [ld] what it keeps of the state before it (kept.h).
template <int Max>
inline void exponentiate(float* rate, ptrdiff_t ld, float* keep, float* rounding) {
    memset(keep, 0, ld * sizeof(float));
    for (int t = 0; t < Max; ++t, rate += ld)
        for (ptrdiff_t c = 0; c < ld; c += L) {
            const F x = load(rate + c);
            store(keep + c, load(keep + c) + x);
            store(rate + c, exp(x));
        }
    for (ptrdiff_t c = 0; c < ld; c += L) {
        F lost = load(rounding + c);
        store(keep + c, kept(load(keep + c), lost));
        store(rounding + c, lost);
    }
}

// between[t][j] = Π rate over j < i ≤ t for j ≤ t, else 0; since[t] = Π rate over i ≤ t. Products of factors ≤ 1:
// no difference of cumulative sums is taken, so a reset of −inf or −1e37 is exact and nothing overflows.
template <int Max>
inline void relative_decay(const float* rate, int64_t rows, float* between, float* since) {
    float product = 1.0f;
    F running[Max / L];
    for (int v = 0; v < Max / L; ++v) running[v] = zero();
    for (int64_t t = 0; t < rows; ++t) {
        product *= rate[t];
        since[t] = product;
        const F factor = splat(rate[t]);
        float* row = between + t * Max;
        for (int v = 0; v < Max / L; ++v) store(row + v * L, running[v] *= factor);
        row[t] = 1.0f;
        const int v = static_cast<int>(t / L);
        running[v] = load(row + v * L);
    }
}

}  // namespace PHISTATE_NS
