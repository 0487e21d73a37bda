// A few tokens of the delta family, one after the other: what decoding asks for. Each strip of the state is read
// once for both Sᵀe and Sᵀq, while it comes from memory, and updated from cache:
//   w = v − a Sᵀe;  o = a Sᵀq + β (k·q) w;  S ← a S + β k wᵀ
// s may be s0: the state is then updated in place.
#include "delta.h"

namespace PHISTATE_NS {
namespace {

using namespace delta;

// sums[r][c] = Σ_f x[r][f] s[f][c], for NR vectors of columns, R operands.
template <int R, int NR>
PHISTATE_INLINE void read_columns(const float* const* x, int64_t key_dim, const float* s, ptrdiff_t ld, float* const* sums) {
    F total[R][NR];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) total[r][n] = zero();
    for (int64_t f = 0; f < key_dim; ++f)
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) {
            const F y = load(s + f * ld + n * L);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) total[r][n] = fma(splat(x[r][f]), y, total[r][n]);
        }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) store(sums[r] + n * L, total[r][n]);
}

struct Step {
    const phistate_linear_attention& call;
    const Heads heads;
    const int64_t key_dim, value_dim, kp, vp, readers;
    phistate::Scratch scratch;
    float *key, *queries, *rate, *read_erase, *read_queries, *value, *held, *out, *tail;
    float* products;  // k·q of each reader

    explicit Step(const phistate_linear_attention& c)
        : call(c), heads(c), key_dim(c.key_dim), value_dim(c.value_dim), kp(round_up(c.key_dim, L)), vp(round_up(c.value_dim, L)),
          readers(heads.readers()) {
        key = scratch.floats(kp);
        queries = scratch.floats(readers * kp);
        rate = scratch.floats(kp);
        read_erase = scratch.floats(kp);
        read_queries = scratch.floats(readers * kp);
        value = scratch.floats(vp);
        held = scratch.floats(vp);
        out = scratch.floats(readers * vp);
        tail = scratch.floats(key_dim * L);
        products = scratch.floats(readers);
    }

    void normalise(float* x) const {
        if (!call.qk_l2norm) return;
        float norm;
        inverse_norms(x, kp, 1, true, &norm);
        scale_each_row(x, kp, 1, &norm);
    }
    // to = x ⊙ rate
    void decay(const float* x, float* to) const {
        for (int64_t c = 0; c < kp; c += L) store(to + c, load(x + c) * load(rate + c));
    }

    // Columns [c, c + NR·L) of the state, from `from` to `to`, row stride ld.
    template <int NR>
    void columns(const float* from, float* to, ptrdiff_t ld, int64_t c, float beta) {
        int64_t reader = 0;
        {
            const float* x[2] = {read_erase, read_queries};
            float* y[2] = {held + c, out + c};
            read_columns<2, NR>(x, key_dim, from, ld, y);
            reader = 1;
        }
        for (; reader < readers; ++reader) {
            const float* x[1] = {read_queries + reader * kp};
            float* y[1] = {out + reader * vp + c};
            read_columns<1, NR>(x, key_dim, from, ld, y);
        }
        F u[NR];
#pragma GCC unroll 4
        for (int n = 0; n < NR; ++n) {
            u[n] = (load(value + c + n * L) - load(held + c + n * L)) * splat(beta);
            for (int64_t i = 0; i < readers; ++i) {
                float* o = out + i * vp + c + n * L;
                store(o, fma(splat(products[i]), u[n], load(o)));
            }
        }
        for (int64_t f = 0; f < key_dim; ++f) {
            const F k = splat(key[f]), a = splat(rate[f]);
#pragma GCC unroll 4
            for (int n = 0; n < NR; ++n) store(to + f * ld + n * L, fma(k, u[n], load(from + f * ld + n * L) * a));
        }
    }

    bool live(const Span& span, int64_t time) const {
        return !call.mask || call.mask[span.batch * call.mask_batch + time * call.mask_time];
    }

    void padding(const Span& span, int64_t time, int64_t head) {
        memset(out, 0, vp * sizeof(float));
        for (int64_t i = 0; i < readers; ++i) {
            unpack(out, vp, 1, value_dim, call.o, span.batch, time, head * readers + i, 0);
            if (call.denominators) call.denominators[(span.batch * call.time + time) * heads.o + head * readers + i] = 0.0f;
        }
    }

    // The state goes from `from` to `to`, which may be the same; z is updated in place.
    void token(const Span& span, int64_t time, int64_t head, const float* from, float* to, float* z) {
        const float beta = call.beta.data ? scalar(call.beta, span.batch, time, head) : 1.0f;
        if (call.decay_kind == PHISTATE_DECAY_VECTOR)
            pack(call.decay, span.batch, time, head, 1, 0, key_dim, nullptr, nullptr, rate, kp, 1);
        else
            for (int64_t c = 0; c < kp; c += L)
                store(rate + c, splat(call.decay_kind == PHISTATE_DECAY_NONE ? 0.0f : scalar(call.decay, span.batch, time, head)));
        if (call.decay_kind != PHISTATE_DECAY_NONE)
            for (int64_t c = 0; c < kp; c += L) store(rate + c, exp(load(rate + c)));
        else
            for (int64_t c = 0; c < kp; c += L) store(rate + c, splat(1.0f));
        pack(call.k, span.batch, time, heads.key(head), 1, 0, key_dim, nullptr, nullptr, key, kp, 1);
        pack(call.v, span.batch, time, heads.value(head), 1, 0, value_dim, nullptr, nullptr, value, vp, 1);
        normalise(key);
        if (call.erase.data) pack(call.erase, span.batch, time, heads.key(head), 1, 0, key_dim, nullptr, nullptr, read_erase, kp, 1);
        decay(call.erase.data ? read_erase : key, read_erase);
        for (int64_t i = 0; i < readers; ++i) {
            float* q = queries + i * kp;
            pack(call.q, span.batch, time, heads.query(head * readers + i), 1, 0, key_dim, nullptr, nullptr, q, kp, 1);
            normalise(q);
            decay(q, read_queries + i * kp);
            F both = zero();
            for (int64_t c = 0; c < kp; c += L) both = fma(load(key + c), load(q + c), both);
            products[i] = sum(both);
        }
        int64_t c = 0;
        for (; c + kCols * L <= value_dim; c += kCols * L) columns<kCols>(from + c, to + c, value_dim, c, beta);
        for (; c + L <= value_dim; c += L) columns<1>(from + c, to + c, value_dim, c, beta);
        if (c < value_dim) {
            const int left = static_cast<int>(value_dim - c);
            for (int64_t f = 0; f < key_dim; ++f) store(tail + f * L, load(from + f * value_dim + c, left));
            columns<1>(tail, tail, L, c, beta);
            for (int64_t f = 0; f < key_dim; ++f) store(to + f * value_dim + c, load(tail + f * L), left);
        }
        for (int64_t i = 0; i < readers; ++i) {
            float gain = static_cast<float>(call.scale);
            if (call.normalize) {
                const float below = denominator(z, read_queries + i * kp, products[i], beta);
                if (call.denominators) call.denominators[(span.batch * call.time + time) * heads.o + head * readers + i] = below;
                gain = below == 0.0f ? 0.0f : 1.0f / below;
            }
            scale_each_row(out + i * vp, vp, 1, &gain);
            unpack(out + i * vp, vp, 1, value_dim, call.o, span.batch, time, head * readers + i, 0);
        }
        if (!call.normalize) return;
        const float u = beta * (1.0f - read_normaliser(z, read_erase));
        for (int64_t f = 0; f < key_dim; ++f) z[f] = rate[f] * z[f] + key[f] * u;
    }

    float read_normaliser(const float* z, const float* x) const {
        F total = zero();
        for (int64_t f = 0; f < key_dim; f += L) {
            const int n = static_cast<int>(least<int64_t>(L, key_dim - f));
            total = fma(load(x + f), load(z + f, n), total);
        }
        return sum(total);
    }
    float denominator(const float* z, const float* query, float along_key, float beta) const {
        return read_normaliser(z, query) + along_key * beta * (1.0f - read_normaliser(z, read_erase));
    }

    void run_head(int64_t sequence, int64_t head) {
        const Span span = span_of(call, sequence);
        const int64_t at = sequence * heads.s + head, size = key_dim * value_dim;
        float *s = call.s + at * size, *z = call.normalize ? call.z + at * key_dim : nullptr;
        if (!call.s0) start(s, nullptr, at, size);
        if (z) start(z, call.z0, at, key_dim);
        const float* from = call.s0 ? call.s0 + at * size : s;
        for (int64_t time = span.begin; time < span.end; ++time) {
            if (!live(span, time)) {
                padding(span, time, head);
                continue;
            }
            token(span, time, head, from, s, z);
            from = s;
        }
        if (from != s) memcpy(s, from, size * sizeof(float));
    }
    static void start(float* to, const float* from, int64_t at, int64_t size) {
        if (!from)
            memset(to, 0, size * sizeof(float));
        else if (from + at * size != to)
            memcpy(to, from + at * size, size * sizeof(float));
    }
};

}  // namespace

void delta_step(const phistate_linear_attention& call) {
    const Heads heads(call);
    // A thread is worth waking for some ten thousand entries of state.
    const int64_t grain = most<int64_t>(1, 16384 / most<int64_t>(1, call.key_dim * call.value_dim));
    parallel(call.sequences * heads.s, grain, [&](int64_t begin, int64_t end) {
        Step step(call);
        for (int64_t i = begin; i < end; ++i) step.run_head(i / heads.s, i % heads.s);
    });
}

}  // namespace PHISTATE_NS
