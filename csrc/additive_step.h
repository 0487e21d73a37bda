// One token: the state is read once and written once, in place or not, and each query head reads it on the way.
#pragma once

#include "linear_attention.h"

namespace PHISTATE_NS {

constexpr int kStepReaders = 4, kStepVectors = 4;

// Rows of `from`, decayed and written to, become `to`; sums[r] gathers queries[r]·row. n columns, N vectors of them.
template <int N, int R>
void step_columns(int64_t key_dim, int64_t stride, int64_t n, const float* from, float* to, const float* rate, const float* k,
                  const float* v, const float* const* queries, float* const* sums) {
    const int tail = static_cast<int>(n - (N - 1) * L);
    F total[R][N], write[N];
    for (int i = 0; i < N; ++i) {
        write[i] = load(v + i * L);
        for (int r = 0; r < R; ++r) total[r][i] = zero();
    }
    for (int64_t row = 0; row < key_dim; ++row) {
        const F a = splat(rate[row]), key = splat(k[row]);
#pragma GCC unroll 4
        for (int i = 0; i < N; ++i) {
            const float* source = from + row * stride + i * L;
            F x = i + 1 < N || tail == L ? load(source) : load(source, tail);
            x = fma(a, x, key * write[i]);
            if (i + 1 < N || tail == L)
                store(to + row * stride + i * L, x);
            else
                store(to + row * stride + i * L, x, tail);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) total[r][i] = fma(splat(queries[r][row]), x, total[r][i]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < N; ++i) store(sums[r] + i * L, total[r][i]);
}

template <int R>
void step_state(int64_t key_dim, int64_t value_dim, const float* from, float* to, const float* rate, const float* k, const float* v,
                const float* const* queries, float* const* out) {
    for (int64_t c = 0; c < value_dim; c += kStepVectors * L) {
        const int64_t n = least<int64_t>(kStepVectors * L, value_dim - c);
        float* sums[R];
        for (int r = 0; r < R; ++r) sums[r] = out[r] + c;
        switch (vectors(n)) {
            case 4: step_columns<4, R>(key_dim, value_dim, n, from + c, to + c, rate, k, v + c, queries, sums); break;
            case 3: step_columns<3, R>(key_dim, value_dim, n, from + c, to + c, rate, k, v + c, queries, sums); break;
            case 2: step_columns<2, R>(key_dim, value_dim, n, from + c, to + c, rate, k, v + c, queries, sums); break;
            default: step_columns<1, R>(key_dim, value_dim, n, from + c, to + c, rate, k, v + c, queries, sums);
        }
    }
}

// Sequence `batch`, state head `head` of a call whose time is 1.
inline void step_unit(const phistate_linear_attention& call, int64_t batch, int64_t head) {
    const Heads heads(call);
    const int64_t K = call.key_dim, V = call.value_dim, kp = round_up(K, L), vp = round_up(V, L), i = batch * heads.s + head;
    phistate::Scratch scratch;
    const Span span{batch, 0, 1};
    Tokens<L> token;
    token.read(call, span, 0, 1, head);
    float* k = scratch.floats(kp);
    float* v = scratch.floats(vp);
    float* rate = scratch.floats(kp);
    float* zeros = scratch.zeros(kp);  // what a later pass over the same state writes: nothing
    float* ones = scratch.floats(kp);
    pack_features(call, call.k, batch, 0, heads.key(head), 1, nullptr, token.mask, k, kp, 1);
    pack(call.v, batch, 0, heads.value(head), 1, 0, V, token.beta, token.mask, v, vp, 1);
    if (call.decay_kind == PHISTATE_DECAY_VECTOR)
        pack(call.decay, batch, 0, head, 1, 0, K, nullptr, token.mask, rate, kp, 1);
    for (int64_t c = 0; c < kp; c += L) {
        store(rate + c, call.decay_kind == PHISTATE_DECAY_VECTOR ? exp(load(rate + c)) : splat(token.rate[0]));
        store(ones + c, splat(1.0f));
    }
    float* to = call.s + i * K * V;
    const float* from = call.s0 ? call.s0 + i * K * V : to;
    if (!call.s0) memset(to, 0, K * V * sizeof(float));
    float* z = call.normalize ? call.z + i * K : nullptr;
    for (int64_t c = 0; z && c < K; c += L) {
        const int n = static_cast<int>(least<int64_t>(L, K - c));
        const F old = call.z0 ? load(call.z0 + i * K + c, n) : zero();
        store(z + c, fma(load(rate + c), old, splat(token.beta[0]) * load(k + c)), n);
    }
    const int64_t readers = heads.readers();
    for (int64_t first = 0; first < readers; first += kStepReaders) {
        const int64_t count = least<int64_t>(kStepReaders, readers - first);
        float *queries[kStepReaders], *out[kStepReaders];
        phistate::Scratch pass;
        for (int64_t r = 0; r < count; ++r) {
            queries[r] = pass.floats(kp);
            out[r] = pass.floats(round_up(V, kStepVectors * L));
            pack_features(call, call.q, batch, 0, heads.query(head * readers + first + r), 1, nullptr, token.mask, queries[r], kp, 1);
        }
        const float *source = first ? to : from, *a = first ? ones : rate, *key = first ? zeros : k;
        switch (count) {
            case 4: step_state<4>(K, V, source, to, a, key, v, queries, out); break;
            case 3: step_state<3>(K, V, source, to, a, key, v, queries, out); break;
            case 2: step_state<2>(K, V, source, to, a, key, v, queries, out); break;
            default: step_state<1>(K, V, source, to, a, key, v, queries, out);
        }
        for (int64_t r = 0; r < count; ++r) {
            const int64_t output = head * readers + first + r;
            float factor = static_cast<float>(call.scale);
            if (z) {
                F dot = zero();
                for (int64_t c = 0; c < K; c += L) dot = fma(load(queries[r] + c), load(z + c, static_cast<int>(least<int64_t>(L, K - c))), dot);
                const float denominator = sum(dot);
                if (call.denominators) call.denominators[batch * heads.o + output] = denominator;
                factor = denominator == 0.0f ? 0.0f : 1.0f / denominator;
            }
            for (int64_t c = 0; c < vp; c += L) store(out[r] + c, load(out[r] + c) * splat(factor));
            unpack(out[r], vp, 1, V, call.o, batch, 0, output, 0);
        }
    }
}

inline void step(const phistate_linear_attention& call) {
    const int64_t state = call.key_dim * call.value_dim;
    // A thread's wake-up costs as much as a few hundred kilobytes.
    const int64_t grain = most<int64_t>(1, (64 << 10) / state);
    parallel(call.batch * call.heads_s, grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) step_unit(call, i / call.heads_s, i % call.heads_s);
    });
}

}  // namespace PHISTATE_NS
