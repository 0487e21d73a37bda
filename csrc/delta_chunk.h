// One chunk of the delta family as its backward pass needs it: operands, and the products of keys with erase keys and queries.
#pragma once

#include "delta_decay.h"

namespace PHISTATE_NS {
namespace delta {

PHISTATE_INLINE float dot(const float* a, const float* b, int64_t n) {
    F total = zero();
    for (int64_t c = 0; c < n; c += L) total = fma(load(a + c), load(b + c), total);
    return sum(total);
}

// The names are those of delta_backward.cpp.
struct Chunk {
    const phistate_linear_attention& call;
    const Heads heads;
    const Columns columns;
    const int64_t key_dim, kp, strips, readers;
    phistate::Scratch scratch;
    // Keys and queries, normalised where asked, and erase keys.
    float *keys, *erases, *read_erases, *write_keys, *queries, *read_queries, *kt, *left, *run, *between, *a, *folded, *p;
    float key_norm[C], since[C];
    float *query_norms, *denominators;
    float keep_one;
    const float* keep;  // D[end][start]
    ptrdiff_t keep_step;
    float* rounding;  // of what is kept, on the walk at hand (kept.h)
    Rates rates;
    Tokens<C> tokens;

    explicit Chunk(const phistate_linear_attention& c)
        : call(c), heads(c), columns{0, c.value_dim, c.normalize ? 1 : 0}, key_dim(c.key_dim), kp(round_up(c.key_dim, L)),
          strips(columns.strips()), readers(heads.readers()) {
        const int64_t panel = C * kp;
        keys = scratch.zeros(panel);
        erases = call.erase.data ? scratch.zeros(panel) : keys;
        read_erases = scratch.zeros(panel);
        write_keys = scratch.zeros(panel);
        queries = scratch.zeros(readers * panel);
        read_queries = scratch.zeros(readers * panel);
        kt = scratch.floats(panel);
        left = scratch.floats(kBlock * kp);
        run = scratch.floats(kp);
        between = scratch.floats(C * C);
        a = scratch.zeros(C * C);
        folded = scratch.zeros(C * C);
        p = scratch.zeros(readers * C * C);
        query_norms = scratch.floats(readers * C);
        denominators = scratch.floats(2 * readers * C);
        if (vector()) rates = Rates(scratch, kp);
    }

    bool vector() const { return call.decay_kind == PHISTATE_DECAY_VECTOR; }
    int64_t decays_per_state() const { return vector() ? kp : 1; }

    // Keys and decays of a chunk: a = A, folded = −A diag β, and the keys that erase from and write to the state.
    void prepare(const Span& span, int64_t time, int64_t rows, int64_t head) {
        tokens.read(call, span, time, rows, head);
        pack(call.k, span.batch, time, heads.key(head), rows, 0, key_dim, nullptr, tokens.mask, keys, kp, C);
        inverse_norms(keys, kp, C, call.qk_l2norm, key_norm);
        if (call.qk_l2norm) scale_each_row(keys, kp, rows, key_norm);
        if (call.erase.data) pack(call.erase, span.batch, time, heads.key(head), rows, 0, key_dim, nullptr, tokens.mask, erases, kp, C);
        if (vector()) {
            rates.read(call, span, time, rows, head, tokens.mask, kp, rounding);
            decayed_scores(erases, nullptr, keys, rates, kp, rows, kt, left, run, a, nullptr);
            decay_since(erases, rates, kp, rows, read_erases);
            decay_until(keys, rates, kp, rows, write_keys);
            keep = rates.whole + 2 * kp;
            keep_step = 1;
        } else {
            relative_decay<C>(tokens.rate, C, between, since);
            scores(erases, rows, a);
            memcpy(read_erases, erases, C * kp * sizeof(float));
            scale_each_row(read_erases, kp, rows, since);
            memcpy(write_keys, keys, C * kp * sizeof(float));
            scale_each_row(write_keys, kp, rows, between + (C - 1) * C);
            keep_one = call.decay_kind == PHISTATE_DECAY_NONE ? 1.0f : kept(tokens.log_decay, *rounding);
            keep = &keep_one;
            keep_step = 0;
        }
        for (int64_t t = 0; t < C; ++t) {
            float* row = a + t * C;
            row[t] = 0.0f;
            for (int64_t c = 0; c < C; c += L) {
                if (t >= rows) store(row + c, zero());
                store(folded + t * C + c, PHISTATE_NS::load(row + c) * PHISTATE_NS::load(tokens.beta + c) * splat(-1.0f));
            }
        }
    }

    // to = lower (x Kᵀ ⊙ D) under a decay per token.
    void scores(const float* x, int64_t rows, float* to) {
        transpose_panel(keys, kp, C, kp, kt, C);
        product<float>(rows, vectors(rows), key_dim, {x, kp, 1}, {kt, C}, {to, C}, Part::LowerOut);
        mask_lower(to, rows);
    }
    void mask_lower(float* to, int64_t rows) const {
        for (int64_t t = 0; t < C; ++t)
            for (int64_t c = 0; c < C; c += L)
                store(to + t * C + c, t < rows && c <= t ? PHISTATE_NS::load(to + t * C + c) * PHISTATE_NS::load(between + t * C + c) : zero());
    }

    // Queries of a chunk, their scores, and for a normalised call one over the denominators, and o·dO.
    void prepare_queries(const Span& span, int64_t time, int64_t rows, int64_t head) {
        for (int64_t i = 0; i < readers; ++i) {
            float *q = queries + i * C * kp, *norm = query_norms + i * C;
            pack(call.q, span.batch, time, heads.query(head * readers + i), rows, 0, key_dim, nullptr, tokens.mask, q, kp, C);
            inverse_norms(q, kp, C, call.qk_l2norm, norm);
            if (call.qk_l2norm) scale_each_row(q, kp, rows, norm);
            if (vector()) {
                decayed_scores(q, nullptr, keys, rates, kp, rows, kt, left, run, p + i * C * C, nullptr);
                decay_since(q, rates, kp, rows, read_queries + i * C * kp);
            } else {
                scores(q, rows, p + i * C * C);
                memcpy(read_queries + i * C * kp, q, C * kp * sizeof(float));
                scale_each_row(read_queries + i * C * kp, kp, rows, since);
            }
        }
        if (!columns.ones) return;
        for (int64_t i = 0; i < readers; ++i)
            for (int64_t t = 0; t < rows; ++t) {
                const float below = call.denominators[(span.batch * call.time + time + t) * heads.o + head * readers + i];
                denominators[i * C + t] = below == 0.0f ? 0.0f : 1.0f / below;
            }
        float* along = denominators + readers * C;
        for (int64_t i = 0; i < readers * C; ++i) along[i] = 0.0f;
        phistate::Scratch once;
        float *outputs = once.floats(C * kStrip), *gradients = once.floats(C * kStrip);
        for (int64_t j = 0; j < strips; ++j)
            for (int64_t i = 0; i < readers && columns.count(j) > 0; ++i) {
                const int64_t n = columns.count(j), output = head * readers + i;
                pack(call.o, span.batch, time, output, rows, columns.value(j), n, nullptr, tokens.mask, outputs, kStrip, rows);
                pack(call.d_o, span.batch, time, output, rows, columns.value(j), n, nullptr, tokens.mask, gradients, kStrip, rows);
                for (int64_t t = 0; t < rows; ++t) along[i * C + t] += dot(outputs + t * kStrip, gradients + t * kStrip, round_up(n, L));
            }
    }
};

}  // namespace delta
}  // namespace PHISTATE_NS
