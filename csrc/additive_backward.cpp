// Backward pass of the additive family. States are kept by forward every PHISTATE_SEGMENT tokens; a segment's
// states are computed again chunk by chunk, then the chunks are walked backwards. With the names of the forward
// pass, Vb = βV, dS the gradient of the state after the chunk, and everything ⊙ its decay:
//   dA = dO Vbᵀ          dQ = dO Sᵀ + dA K        dK = Vb dSᵀ + dAᵀ Q
//   dVb = K dS + Aᵀ dO   dS ← D dS + Qᵀ dO
// States are held transposed, [value, key], so that all but dVb come out by rows. A normalised output is the
// quotient of two columns: V gets a column of ones, dO the gradient of the denominator beside that of the rest.
// What passes through a decay is decay_gradient.h's.
#include "decay_gradient.h"
#include "linear_attention.h"
#include "vector_decay.h"

namespace PHISTATE_NS {
namespace {

constexpr int C = 32;
static_assert(PHISTATE_SEGMENT % C == 0);

constexpr int64_t kGradientBytes = 256 << 10;  // of states' gradients held by a unit

int64_t gcd(int64_t a, int64_t b) { return b ? gcd(b, a % b) : a; }
int64_t lcm(int64_t a, int64_t b) { return a / gcd(a, b) * b; }

// States whose gradients meet in one q, k or v head are one unit's work.
int64_t sharing(const Heads& heads) {
    return lcm(lcm(heads.o / heads.q, heads.o / heads.k), lcm(heads.o / heads.v, heads.readers())) / heads.readers();
}

// Some neighbouring heads of one sequence.
struct Unit {
    const phistate_linear_attention& call;
    const Heads heads;
    const int64_t sequence, first, last, key_dim, value_dim, wide, kp, vp;  // wide: value_dim and the normaliser's column
    const Span span;
    phistate::Scratch scratch;
    float *k, *kt, *v, *vt, *raw, *q, *d_o, *scores, *between, *rate, *states, *gradients, *ds, *dq, *dk, *dvt, *dv;
    float *keep, *rounding, *forward_rounding, *backward_roundings;  // of the chunk at hand, and of the two walks (kept.h)
    float since[C], until[C], scales[C], d_beta[C];
    Ahead ahead;
    Tokens<C> tokens;
    VectorDecay<C> decayed;
    DecayGradient<C> passed;

    Unit(const phistate_linear_attention& call, int64_t sequence, int64_t first, int64_t last)
        : call(call), heads(call), sequence(sequence), first(first), last(last), key_dim(call.key_dim), value_dim(call.value_dim),
          wide(call.value_dim + (call.normalize ? 1 : 0)), kp(round_up(key_dim, L)), vp(round_up(wide, L)), span(span_of(call, sequence)),
          decayed(scratch, vector() ? kp : 0), passed(scratch, kp, vector()) {
        for (float& x : scales) x = call.normalize ? 1.0f : static_cast<float>(call.scale);
        k = scratch.floats(C * kp);
        kt = scratch.floats(C * kp);
        q = scratch.floats(C * kp);
        dq = scratch.floats(C * kp);
        dk = scratch.floats(C * kp);
        v = scratch.floats(C * vp);
        vt = scratch.floats(C * vp);
        raw = scratch.floats(C * vp);
        d_o = scratch.floats(C * vp);
        dv = scratch.floats(C * vp);
        dvt = scratch.zeros(C * vp);  // its rows past `wide` stay zero
        scores = scratch.floats(C * C);
        between = scratch.floats(2 * C * C);
        gradients = scratch.floats((last - first) * vp * kp);
        rate = vector() ? scratch.floats(C * kp) : nullptr;
        keep = scratch.floats(decays_per_head());
        *keep = 1.0f;
        forward_rounding = scratch.floats(decays_per_head());
        backward_roundings = scratch.zeros((last - first) * decays_per_head());
        states = scratch.zeros((call.causal ? PHISTATE_SEGMENT / C : 1) * vp * kp);
    }

    bool vector() const { return call.decay_kind == PHISTATE_DECAY_VECTOR; }
    bool decays() const { return call.decay_kind != PHISTATE_DECAY_NONE; }
    bool scalar_decay() const { return decays() && !vector(); }
    int64_t decays_per_head() const { return vector() ? kp : 1; }

    // A dense state and normaliser to a transposed panel, and back.
    void transpose_in(const float* s, const float* z, float* panel) {
        memset(panel, 0, vp * kp * sizeof(float));
        for (int64_t i = 0; s && i < key_dim; ++i)
            for (int64_t j = 0; j < value_dim; ++j) panel[j * kp + i] = s[i * value_dim + j];
        if (z && call.normalize) memcpy(panel + value_dim * kp, z, key_dim * sizeof(float));
    }
    void transpose_out(const float* panel, float* s, float* z) const {
        for (int64_t i = 0; s && i < key_dim; ++i)
            for (int64_t j = 0; j < value_dim; ++j) s[i * value_dim + j] = panel[j * kp + i];
        if (z && call.normalize) memcpy(z, panel + value_dim * kp, key_dim * sizeof(float));
    }

    // Values, and with the normaliser's column, weighted by β or not.
    void values(int64_t time, int64_t rows, int64_t head, const float* gain, float* panel) {
        if (wide > value_dim)
            for (int64_t r = 0; r < C; ++r) store(panel + r * vp + vp - L, zero());
        pack(call.v, span.batch, time, heads.value(head), rows, 0, value_dim, gain, tokens.mask, panel, vp, C);
        if (wide > value_dim)
            for (int64_t r = 0; r < rows; ++r) panel[r * vp + value_dim] = gain ? gain[r] : 1.0f;
    }

    void read(int64_t time, int64_t rows, int64_t head) {
        tokens.read(call, span, time, rows, head);
        pack_features(call, call.k, span.batch, time, heads.key(head), rows, nullptr, tokens.mask, k, kp, C);
        values(time, rows, head, tokens.beta, v);
        if (vector()) {
            pack(call.decay, span.batch, time, head, rows, 0, key_dim, nullptr, tokens.mask, rate, kp, C);
            exponentiate<C>(rate, kp, keep, rounding);
            decayed.keys(k, rate);
        } else if (decays()) {
            *keep = kept(tokens.log_decay, *rounding);
            relative_decay<C>(tokens.rate, C, between, since);
            memcpy(until, between + (C - 1) * C, sizeof until);
        }
    }

    // next = state after the chunk read, from the one before.
    void advance(int64_t rows, const float* state, float* next) {
        const float *keys = k, *by = keep, *from = state;
        if (vector()) {
            scale_rows(next, state, kp, vp, kp, keep);
            keys = decayed.keys_until_end();
            by = &kOne;
            from = next;
        } else if (decays()) {
            for (int64_t j = 0; j < rows; ++j) scale(k + j * kp, kp, until[j]);
        }
        product<float>(wide, kp / L, rows, {v, 1, vp}, {keys, kp}, {next, kp, by, 0, nullptr, from}, Part::All, &ahead);
    }

    static void scale(float* x, int64_t n, float factor) {
        const F f = splat(factor);
        for (int64_t c = 0; c < n; c += L) store(x + c, load(x + c) * f);
    }

    // One query head's rows: the query scaled, and the gradient of what it read.
    void reader(int64_t time, int64_t rows, int64_t output) {
        pack_features(call, call.q, span.batch, time, heads.query(output), rows, scales, tokens.mask, q, kp, C);
        if (wide > value_dim)
            for (int64_t r = 0; r < C; ++r) store(d_o + r * vp + vp - L, zero());
        pack(call.d_o, span.batch, time, output, rows, 0, value_dim, nullptr, tokens.mask, d_o, vp, C);
        if (!call.normalize) return;
        // o = n/d: dn = do/d and dd = −(do·o)/d. A zero denominator gave a zero row, and gives no gradient.
        pack(call.o, span.batch, time, output, rows, 0, value_dim, nullptr, tokens.mask, dv, vp, C);
        for (int64_t r = 0; r < rows; ++r) {
            const float d = call.denominators[(span.batch * call.time + time + r) * heads.o + output];
            const float inverse = d == 0.0f ? 0.0f : 1.0f / d;
            float* row = d_o + r * vp;
            F dot = zero();
            for (int64_t c = 0; c < value_dim; c += L) {
                const int n = static_cast<int>(least<int64_t>(L, value_dim - c));
                dot = fma(load(row + c, n), load(dv + r * vp + c, n), dot);
            }
            scale(row, vp, inverse);
            row[value_dim] = -sum(dot) * inverse;
        }
    }

    // triangle[t][j] ⊙= between, zero above the diagonal.
    void decay_triangle(float* triangle, int64_t rows) const {
        for (int64_t t = 0; t < rows; ++t)
            for (int64_t c = 0; c < C; c += L) {
                float* x = triangle + t * C + c;
                const int64_t keep = t + 1 - c;
                if (keep <= 0)
                    store(x, zero());
                else if (scalar_decay())
                    store(x, load(x) * load(between + t * C + c));
                else if (keep < L)
                    store(x, load(x, static_cast<int>(keep)));
            }
    }

    // What the chunk at `time` will read, or write (gradients), while others multiply.
    void look_ahead(int64_t time, int64_t rows, int64_t head, bool backwards) {
        const int64_t output = head * heads.readers();
        foresee(ahead, call.k, span.batch, time, heads.key(head), rows, 0, key_dim);
        foresee(ahead, call.v, span.batch, time, heads.value(head), rows, 0, value_dim);
        if (vector()) foresee(ahead, call.decay, span.batch, time, head, rows, 0, key_dim);
        if (!backwards) return;
        foresee(ahead, call.q, span.batch, time, heads.query(output), rows, 0, key_dim);
        foresee(ahead, call.d_o, span.batch, time, output, rows, 0, value_dim);
    }

    // One chunk backwards: `before` the state it began with; ds the gradient of the one it ended with, which
    // becomes that of the former. Returns the sum of its decays' gradients.
    float chunk(int64_t time, int64_t rows, int64_t head, const float* before) {
        read(time, rows, head);
        transpose_panel(v, vp, C, vp, vt, C);
        const bool wants_decay = decays() && call.d_decay.data;
        if (wants_decay) passed.carry(before, ds, vp, keep);
        // Through the state after the chunk.
        const float* keys = vector() ? decayed.keys_until_end() : k;
        transpose_panel(keys, kp, C, kp, kt, C);
        product<float>(C, kp / L, wide, {v, vp, 1}, {ds, kp}, {dk, kp, nullptr, 0, scalar_decay() ? until : nullptr}, Part::All,
                       &ahead);
        if (wants_decay) passed.after(keys, dk);
        product<float>(wide, C / L, key_dim, {ds, kp, 1}, {kt, C}, {dvt, C}, Part::All, &ahead);
        if (scalar_decay())
            for (int64_t i = 0; i < wide * C; i += L) store(dvt + i, load(dvt + i) * load(until + i % C));
        if (vector()) scale_rows(ds, ds, kp, vp, kp, keep);
        for (int64_t i = 0; i < heads.readers(); ++i) answer(time, rows, head, i, before, wants_decay);
        key_gradient(time, rows, head);
        value_gradient(time, rows, head);
        return wants_decay ? decay_gradient(time, rows, head) : 0.0f;
    }

    // What one query head read; dk, dvt and ds gather over the readers of a state.
    void answer(int64_t time, int64_t rows, int64_t head, int64_t index, const float* before, bool wants_decay) {
        const int64_t output = head * heads.readers() + index;
        const float* queries = q;
        float* d_scores = between + C * C;
        reader(time, rows, output);
        memset(d_scores, 0, C * C * sizeof(float));
        product<float>(rows, C / L, wide, {d_o, vp, 1}, {vt, C}, {d_scores, C}, Part::LowerOut, &ahead);
        decay_triangle(d_scores, rows);
        product<float>(C, kp / L, wide, {d_o, vp, 1}, {before, kp}, {dq, kp, nullptr, 0, scalar_decay() ? since : nullptr},
                       Part::All, &ahead);
        if (vector()) {
            decayed.queries(q);
            decayed.scores(scores);
            queries = decayed.queries_since_start();
            if (wants_decay) passed.before(queries, dq);
            // The first reader turns dk from the scaled keys' gradient into the keys'; the others add to it.
            phistate::Scratch once;
            float* dk_part = index > 0 ? once.zeros(C * kp) : dk;
            decayed.gradients(d_scores, dq, dk_part, wants_decay ? passed.data() : nullptr);
            for (int64_t i = 0; index > 0 && i < C * kp; i += L) store(dk + i, load(dk + i) + load(dk_part + i));
        } else {
            if (wants_decay) passed.before(q, dq);
            memset(scores, 0, C * C * sizeof(float));
            product<float>(rows, C / L, key_dim, {q, kp, 1}, {kt, C}, {scores, C}, Part::LowerOut, &ahead);
            if (wants_decay) passed.inside(d_scores, scores, rows);
            decay_triangle(scores, rows);
            product<float>(rows, kp / L, rows, {d_scores, C, 1}, {k, kp}, {dq, kp, &kOne}, Part::LowerIn, &ahead);
            product<float>(rows, kp / L, rows, {d_scores, 1, C}, {q, kp}, {dk, kp, &kOne}, Part::UpperIn, &ahead);
        }
        product<float>(wide, C / L, rows, {d_o, 1, vp}, {scores, C}, {dvt, C, &kOne}, Part::All, &ahead);
        query_gradient(time, rows, output);
        if (scalar_decay())
            for (int64_t t = 0; t < rows; ++t) scale(q + t * kp, kp, since[t]);
        const float* by = scalar_decay() && index == 0 ? keep : &kOne;
        product<float>(wide, kp / L, rows, {d_o, 1, vp}, {queries, kp}, {ds, kp, by}, Part::All, &ahead);
    }

    void query_gradient(int64_t time, int64_t rows, int64_t output) {
        unpack_features_gradient(call, dq, kp, rows, call.q, call.d_q, span.batch, time, heads.query(output), tokens.mask,
                                 output % (heads.o / heads.q) != 0, scales[0]);
    }

    void key_gradient(int64_t time, int64_t rows, int64_t head) {
        unpack_features_gradient(call, dk, kp, rows, call.k, call.d_k, span.batch, time, heads.key(head), tokens.mask,
                                 head % (heads.s / heads.k) != 0);
    }

    // From dvt, the gradient of βV: those of V and β.
    void value_gradient(int64_t time, int64_t rows, int64_t head) {
        transpose_panel(dvt, C, vp, C, dv, vp);
        if (call.d_beta.data) beta_gradient(time, rows, head);
        for (int64_t r = 0; r < rows; ++r) scale(dv + r * vp, vp, tokens.beta[r]);
        unpack(dv, vp, rows, value_dim, call.d_v, span.batch, time, heads.value(head), 0, head % (heads.s / heads.v) != 0);
    }

    void beta_gradient(int64_t time, int64_t rows, int64_t head) {
        values(time, rows, head, nullptr, raw);
        for (int64_t r = 0; r < rows; ++r) {
            F dot = zero();
            for (int64_t c = 0; c < vp; c += L) dot = fma(load(raw + r * vp + c), load(dv + r * vp + c), dot);
            d_beta[r] = tokens.mask && !tokens.live[r] ? 0.0f : sum(dot);
        }
        put_scalars(call.d_beta, time, rows, head, d_beta);
    }

    void put_scalars(const phistate_view& view, int64_t time, int64_t rows, int64_t head, const float* values) const {
        for (int64_t r = 0; r < rows; ++r) put_scalar(view, span.batch, time + r, head, values[r]);
    }

    // Writes d_decay, nothing for padding. Where a rate is 0 nothing passed, whatever rounding left.
    float decay_gradient(int64_t time, int64_t rows, int64_t head) {
        float *d_decay = passed.data(), total = 0.0f;
        for (int64_t t = 0; t < rows; ++t) {
            const bool padding = tokens.mask && !tokens.live[t];
            if (!vector()) {
                if (padding || tokens.rate[t] == 0.0f) d_decay[t] = 0.0f;
                total += d_decay[t];
                continue;
            }
            for (int64_t c = t * kp; c < (t + 1) * kp; c += L) {
                store(d_decay + c, padding ? zero() : where_positive(load(rate + c), load(d_decay + c)));
            }
        }
        if (vector())
            unpack(d_decay, kp, rows, key_dim, call.d_decay, span.batch, time, head, 0);
        else if (call.decay_kind == PHISTATE_DECAY_SCALAR)
            put_scalars(call.d_decay, time, rows, head, d_decay);
        return total;
    }

    // The gradient of a head's state, at the end of what has been walked back through.
    void choose(int64_t head) { ds = gradients + (head - first) * vp * kp; }
    void begin(int64_t head) {
        choose(head);
        const int64_t i = sequence * heads.s + head;
        transpose_in(call.d_s ? call.d_s + i * key_dim * value_dim : nullptr, call.d_z ? call.d_z + i * key_dim : nullptr, ds);
    }
    void finish(int64_t head) {
        choose(head);
        const int64_t i = sequence * heads.s + head;
        transpose_out(ds, call.d_s0 ? call.d_s0 + i * key_dim * value_dim : nullptr, call.d_z0 ? call.d_z0 + i * key_dim : nullptr);
    }

    // Segment by segment, each for all heads: their rows lie side by side.
    void causal() {
        const int64_t length = span.end - span.begin;
        phistate::Scratch once;
        double* decays_total = static_cast<double*>(once.bytes((last - first) * sizeof(double)));
        for (int64_t head = first; head < last; ++head) begin(head), decays_total[head - first] = 0.0;
        for (int64_t start = (most<int64_t>(length, 1) - 1) / PHISTATE_SEGMENT * PHISTATE_SEGMENT; start >= 0; start -= PHISTATE_SEGMENT)
            for (int64_t head = first; head < last; ++head) decays_total[head - first] += segment(head, start, least(length, start + PHISTATE_SEGMENT));
        for (int64_t head = first; head < last; ++head) {
            if (call.decay_kind == PHISTATE_DECAY_HEAD && call.d_decay.data)
                static_cast<float*>(call.d_decay.data)[sequence * heads.s + head] = static_cast<float>(decays_total[head - first]);
            finish(head);
        }
    }

    // Tokens [start, stop) of the sequence; returns the sum of its decays' gradients.
    double segment(int64_t head, int64_t start, int64_t stop) {
        const int64_t i = sequence * heads.s + head, size = vp * kp, chunks = (stop - start + C - 1) / C;
        choose(head);
        if (start > 0) {
            const float* kept = checkpoint(call, span, span.begin + start, head);
            transpose_in(kept, kept + key_dim * value_dim, states);
        } else {
            transpose_in(call.s0 ? call.s0 + i * key_dim * value_dim : nullptr, call.z0 ? call.z0 + i * key_dim : nullptr, states);
        }
        memset(forward_rounding, 0, decays_per_head() * sizeof(float));
        rounding = forward_rounding;
        for (int64_t c = 0; c + 1 < chunks; ++c) {
            const int64_t time = span.begin + start + c * C, rows = least<int64_t>(C, span.begin + stop - time);
            read(time, rows, head);
            ahead.clear();
            look_ahead(time + C, least<int64_t>(C, span.begin + stop - time - C), head, c + 2 == chunks);
            advance(rows, states + c * size, states + (c + 1) * size);
        }
        rounding = backward_roundings + (head - first) * decays_per_head();
        double total = 0.0;
        for (int64_t c = chunks - 1; c >= 0; --c) {
            const int64_t time = span.begin + start + c * C, rows = least<int64_t>(C, span.begin + stop - time);
            ahead.clear();
            foresee(ahead, call.d_q, span.batch, time, heads.query(head * heads.readers()), rows, 0, key_dim);
            foresee(ahead, call.d_k, span.batch, time, heads.key(head), rows, 0, key_dim);
            foresee(ahead, call.d_v, span.batch, time, heads.value(head), rows, 0, value_dim);
            if (c > 0) look_ahead(time - C, C, head, true);
            total += chunk(time, rows, head, states + c * size);
        }
        return total;
    }

    // Every query read the final state: dS gathers over all tokens before any key or value hears of it.
    void not_causal(int64_t head) {
        const int64_t i = sequence * heads.s + head;
        begin(head);
        transpose_in(call.s + i * key_dim * value_dim, call.z ? call.z + i * key_dim : nullptr, states);
        for (int64_t time = span.begin; time < span.end; time += C) {
            const int64_t rows = least<int64_t>(C, span.end - time);
            tokens.read(call, span, time, rows, head);
            for (int64_t r = 0; r < heads.readers(); ++r) {
                const int64_t output = head * heads.readers() + r;
                reader(time, rows, output);
                product<float>(rows, kp / L, wide, {d_o, vp, 1}, {states, kp}, {dq, kp});
                query_gradient(time, rows, output);
                product<float>(wide, kp / L, rows, {d_o, 1, vp}, {q, kp}, {ds, kp, &kOne});
            }
        }
        for (int64_t time = span.begin; time < span.end; time += C) {
            const int64_t rows = least<int64_t>(C, span.end - time);
            read(time, rows, head);
            transpose_panel(k, kp, C, kp, kt, C);
            product<float>(rows, kp / L, wide, {v, vp, 1}, {ds, kp}, {dk, kp});
            product<float>(wide, C / L, key_dim, {ds, kp, 1}, {kt, C}, {dvt, C});
            key_gradient(time, rows, head);
            value_gradient(time, rows, head);
        }
        finish(head);
    }
};

}  // namespace

int additive_backward(const phistate_linear_attention& call) {
    if (!check_offsets(call)) return -1;
    const Heads heads(call);
    expect_writes(call, call.d_q, heads.q, call.key_dim);
    expect_writes(call, call.d_k, heads.k, call.key_dim);
    expect_writes(call, call.d_v, heads.v, call.value_dim);
    if (call.decay_kind == PHISTATE_DECAY_VECTOR) expect_writes(call, call.d_decay, heads.s, call.key_dim);
    const int64_t states = call.sequences * heads.s, together = sharing(heads);
    const int64_t bytes = call.key_dim * call.value_dim * static_cast<int64_t>(sizeof(float));
    // As in the forward pass, heads of one page of memory run together; those that share a gradient must.
    int64_t group = together;
    while (heads.s % (2 * group) == 0 && states / (2 * group) >= phistate::num_threads() && 2 * group * bytes <= kGradientBytes) group *= 2;
    const int64_t groups = heads.s / group;
    parallel(call.sequences * groups, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t first = i % groups * group;
            Unit unit(call, i / groups, first, first + group);
            if (call.causal) unit.causal();
            for (int64_t head = first; !call.causal && head < first + group; ++head) unit.not_causal(head);
        }
    });
    return 0;
}

}  // namespace PHISTATE_NS
