// Forward pass of the additive family. Per chunk of C tokens, with S the state before it (DESIGN: one equation):
//   A = (Q Kᵀ) ⊙ D on and below the diagonal, D[t][j] the decay from j to t
//   O = scale·(D[t][start] ⊙ Q S + A (βV))
//   S ← D[end][start] ⊙ S + (D[end][j] ⊙ K)ᵀ (βV)
// The normaliser is the same with a column of ones for V, done by dot products beside.
#include "additive.h"
#include "vector_decay.h"

namespace PHISTATE_NS {
namespace {

constexpr int C = 32;

struct Unit {
    const phistate_additive& call;
    const Heads heads;
    const int64_t key_dim, first, width;  // value columns [first, first + width)
    const int64_t kp, vp;                 // padded
    phistate::Scratch scratch;
    float *k, *kt, *v, *q, *out, *scores, *between, *s, *z, *rate, *since_panel, *until, *whole, *k_once;
    float since[C], write[C], denominators[C];
    Tokens<C> tokens;

    Unit(const phistate_additive& c, int64_t first_column, int64_t columns)
        : call(c), heads(c), key_dim(c.key_dim), first(first_column), width(columns), kp(round_up(c.key_dim, L)), vp(round_up(columns, L)) {
        k = scratch.floats(C * kp);
        kt = scratch.floats(C * kp);
        q = scratch.floats(C * kp);
        v = scratch.floats(C * vp);
        out = scratch.floats(C * vp);
        scores = scratch.floats(C * C);
        between = scratch.floats(C * C);
        s = scratch.floats(kp * vp);
        z = scratch.floats(kp);
        if (vector()) {
            rate = scratch.floats(C * kp);
            since_panel = scratch.floats(C * kp);
            until = scratch.floats(C * kp);
            whole = scratch.floats(C / kDirect * kp);
            k_once = scratch.floats(C * kp);
        }
    }

    bool vector() const { return call.decay_kind == PHISTATE_DECAY_VECTOR; }
    bool decays() const { return call.decay_kind != PHISTATE_DECAY_NONE; }

    void begin(int64_t sequence, int64_t head) {
        const int64_t i = sequence * heads.s + head;
        load_state(call.s0 ? call.s0 + i * key_dim * call.value_dim : nullptr, key_dim, call.value_dim, first, width, s, vp, kp);
        if (call.normalize) load_state(call.z0 ? call.z0 + i * key_dim : nullptr, 1, key_dim, 0, key_dim, z, kp, 1);
    }

    void finish(float* states, float* normalisers, int64_t i) const {
        unpack_rows(s, vp, key_dim, width, states + i * key_dim * call.value_dim + first, call.value_dim);
        if (normalisers && first == 0) unpack_rows(z, kp, 1, key_dim, normalisers + i * key_dim, key_dim);
    }

    // Keys, values and rates of a chunk.
    void read(const Span& span, int64_t time, int64_t rows, int64_t head) {
        tokens.read(call, span, time, rows, head);
        pack(call.k, span.batch, time, heads.key(head), rows, 0, key_dim, nullptr, tokens.mask, k, kp, C);
        pack(call.v, span.batch, time, heads.value(head), rows, first, width, tokens.beta, tokens.mask, v, vp, C);
        if (vector()) {
            pack(call.decay, span.batch, time, head, rows, 0, key_dim, nullptr, tokens.mask, rate, kp, C);
            for (int64_t i = 0; i < C * kp; i += L) store(rate + i, exp(load(rate + i)));
        } else {
            transpose_panel(k, kp, C, kp, kt, C);
            if (decays()) relative_decay<C>(tokens.rate, C, between, since);
        }
    }

    // Scores of one query head, and in q what the state is to be read with.
    void score(int64_t rows) {
        if (vector()) {
            memcpy(k_once, k, C * kp * sizeof(float));  // each query head scales its keys anew
            vector_decay_scores(q, k_once, rate, kp, C, kp, kt, since_panel, until, whole, scores, C);
            return;
        }
        product<float>(rows, C / L, key_dim, {q, kp, 1}, {kt, C}, {scores, C}, Part::LowerOut);
        for (int64_t t = 0; t < rows; ++t) {
            float* row = scores + t * C;
            const int64_t diagonal = t / L;
            if (decays()) {
                for (int64_t c = 0; c <= diagonal; ++c) store(row + c * L, load(row + c * L) * load(between + t * C + c * L));
            } else {
                const int keep = static_cast<int>(t % L) + 1;
                float* edge = row + diagonal * L;
                store(edge, load(edge, keep));
            }
            // A block of rows reads its triangle's columns up to its last row.
            for (int64_t c = diagonal + 1; c * L < least<int64_t>(C, t + kRows); ++c) store(row + c * L, zero());
        }
    }

    // out = what the chunk's queries read; scores unused when not causal.
    void read_state(int64_t rows, bool causal) {
        const float* gain = decays() && !vector() ? since : nullptr;
        product<float>(rows, vectors(width), key_dim, {q, kp, 1}, {s, vp}, {out, vp, nullptr, 0, gain});
        if (causal) product<float>(rows, vectors(width), rows, {scores, C, 1}, {v, vp}, {out, vp, &kOne}, Part::LowerIn);
        if (!call.normalize) return;
        for (int64_t t = 0; t < rows; ++t) {
            F dot = zero();
            for (int64_t c = 0; c < kp; c += L) dot = fma(load(q + t * kp + c), load(z + c), dot);
            if (gain) dot *= splat(gain[t]);
            if (causal)
                for (int64_t c = 0; c <= t; c += L) dot = fma(load(scores + t * C + c), load(tokens.beta + c), dot);
            const float denominator = sum(dot);
            const F inverse = splat(denominator == 0.0f ? 0.0f : 1.0f / denominator);
            for (int64_t c = 0; c < vp; c += L) store(out + t * vp + c, load(out + t * vp + c) * inverse);
        }
    }

    // The state after the chunk. Under vector decay k_once holds the scaled keys, whole[0] the chunk's product.
    void write_state(int64_t rows) {
        const float *keys = k, *keep = &kOne;
        ptrdiff_t keep_step = 0;
        if (vector()) {
            keys = k_once;
            keep = whole;
            keep_step = 1;
        } else if (decays()) {
            keep = since + C - 1;
            for (int64_t j = 0; j < rows; ++j) {
                write[j] = between[(C - 1) * C + j];
                const F w = splat(write[j]);
                for (int64_t c = 0; c < vp; c += L) store(v + j * vp + c, load(v + j * vp + c) * w);
            }
        }
        product<float>(key_dim, vectors(width), rows, {keys, 1, kp}, {v, vp}, {s, vp, keep, keep_step});
        if (!call.normalize) return;
        for (int64_t c = 0; c < kp; c += L) {
            F total = load(z + c) * (vector() ? load(whole + c) : splat(*keep));
            for (int64_t j = 0; j < rows; ++j) {
                const float weight = tokens.beta[j] * (vector() || !decays() ? 1.0f : write[j]);
                total = fma(splat(weight), load(keys + j * kp + c), total);
            }
            store(z + c, total);
        }
    }

    void query(const Span& span, int64_t time, int64_t rows, int64_t output) {
        pack(call.q, span.batch, time, heads.query(output), rows, 0, key_dim, nullptr, tokens.mask, q, kp, C);
        // Before anything else: the scale is part of the result's rounding in every form.
        const F scale = splat(call.normalize ? 1.0f : static_cast<float>(call.scale));
        for (int64_t i = 0; i < C * kp; i += L) store(q + i, load(q + i) * scale);
    }

    void run(int64_t sequence, int64_t head) {
        const Span span = span_of(call, sequence);
        begin(sequence, head);
        const int64_t readers = heads.readers();
        for (int64_t time = span.begin; time < span.end; time += C) {
            const int64_t rows = least<int64_t>(C, span.end - time);
            if (call.checkpoints) checkpoint(sequence, head, span, time);
            read(span, time, rows, head);
            for (int64_t reader = 0; call.causal && reader < readers; ++reader) {
                const int64_t output = head * readers + reader;
                query(span, time, rows, output);
                score(rows);
                read_state(rows, true);
                unpack(out, vp, rows, width, call.o, span.batch, time, output, first);
            }
            write_state(rows);
        }
        finish(call.s, call.z, sequence * heads.s + head);
        for (int64_t time = span.begin; !call.causal && time < span.end; time += C) {
            const int64_t rows = least<int64_t>(C, span.end - time);
            tokens.read(call, span, time, rows, head);
            for (int64_t reader = 0; reader < readers; ++reader) {
                const int64_t output = head * readers + reader;
                query(span, time, rows, output);
                read_state(rows, false);
                unpack(out, vp, rows, width, call.o, span.batch, time, output, first);
            }
        }
    }

    void checkpoint(int64_t, int64_t, const Span&, int64_t) {}
};

}  // namespace

int additive_forward(const phistate_additive& call) {
    const Heads heads(call);
    const int64_t states = call.sequences * heads.s, threads = phistate::num_threads();
    // Columns of the state do not meet: where states are fewer than threads, each is cut into strips of values.
    // A strip repeats the scores, so none is narrower than two vectors.
    const int64_t strips = most<int64_t>(1, least((threads + states - 1) / most<int64_t>(states, 1), call.value_dim / (2 * L)));
    const int64_t strip = round_up((call.value_dim + strips - 1) / strips, L);
    parallel(states * strips, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t first = i % strips * strip, columns = least(strip, call.value_dim - first);
            if (columns <= 0) continue;
            Unit unit(call, first, columns);
            unit.run(i / strips / heads.s, i / strips % heads.s);
        }
    });
    return 0;
}

}  // namespace PHISTATE_NS
