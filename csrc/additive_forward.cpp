// Forward pass of the additive family. Per chunk of C tokens, with S the state before it (DESIGN: one equation):
//   A = (Q Kᵀ) ⊙ D on and below the diagonal, D[t][j] the decay from j to t
//   O = scale·(D[t][start] ⊙ Q S + A (βV))
//   S ← D[end][start] ⊙ S + (D[end][j] ⊙ K)ᵀ (βV)
// The normaliser is the same with a column of ones for V, done by dot products beside.
#include "linear_attention.h"
#include "additive_step.h"
#include "running_maximum.h"
#include "vector_decay.h"

namespace PHISTATE_NS {
namespace {

constexpr int C = 32;

// Neighbouring heads of a token lie in one page of memory, tokens do not: a unit takes a few heads through the
// sequence together, as many as keep their states in the nearer half of a usual L2.
constexpr int64_t kStateBytes = 256 << 10;

// A state that is not the caller's: dense [key_dim, value_dim] and [key_dim], and what a state before it keeps, [key_dim].
struct Carried {
    float *s, *z, *kept;
};

// Some neighbouring heads of one sequence, value columns [first, first + width).
struct Unit {
    const phistate_linear_attention& call;
    const Heads heads;
    const int64_t sequence, head_begin, head_end, first, width;
    const int64_t key_dim, kp, vp, sv;  // kp, vp: padded; sv: floats from one row of a state to the next
    const int64_t origin;  // of the sequence; span may be a part of it
    const Span span;
    phistate::Scratch scratch;
    float *k, *kt, *v, *q, *out, *products, *scores, *between, *states, *normalisers, *reaches, *s, *z, *reach, *rate;
    float *keeps, *roundings, *rounding;  // of the decays given: what the chunk keeps, and what rounding it took (kept.h)
    VectorDecay<C> decayed;
    RunningMaximum<C> running;
    float since[C], write[C], denominators[C];
    Tokens<C> tokens;
    Ahead ahead;
    int64_t key_loaded, query_loaded, multiplied;  // heads whose panels of the chunk at hand are in place; −1: none

    Unit(const phistate_linear_attention& call, int64_t sequence, const Span& span, int64_t head_begin, int64_t head_end, int64_t first, int64_t width)
        : call(call), heads(call), sequence(sequence), head_begin(head_begin), head_end(head_end), first(first), width(width),
          key_dim(call.key_dim), kp(round_up(call.key_dim, L)), vp(round_up(width, L)), sv(row_stride(vp)),
          origin(span_of(call, sequence).begin), span(span), decayed(scratch, may_be_vector() ? kp : 0), running(scratch, call.key_dim, logs() ? kp : 0) {
        k = scratch.floats(C * kp);
        kt = scratch.floats(C * kp);
        q = scratch.floats(C * kp);
        v = scratch.floats(C * vp);
        out = scratch.floats(C * vp);
        products = scratch.floats(C * C);
        scores = scratch.floats(C * C);
        between = scratch.floats(C * C);
        states = scratch.floats((head_end - head_begin) * kp * sv);
        normalisers = scratch.floats((head_end - head_begin) * kp);
        reaches = scratch.floats(logs() ? (head_end - head_begin) * kp : 0);
        rate = scratch.floats(may_be_vector() ? C * kp : 0);
        keeps = scratch.floats(decays_per_head());
        roundings = scratch.zeros((head_end - head_begin) * decays_per_head());
    }

    // A line more where a tile's columns of all rows would meet in half of the sets of L1.
    static int64_t row_stride(int64_t columns) { return columns > 64 && columns % 32 == 0 ? columns + L : columns; }

    bool logs() const { return call.log_features; }
    bool may_be_vector() const { return call.decay_kind == PHISTATE_DECAY_VECTOR || logs(); }
    // Of the chunk at hand: log features have a decay where a maximum rises too far for one reference.
    bool vector() const { return logs() ? !running.steady : call.decay_kind == PHISTATE_DECAY_VECTOR; }
    bool decays() const { return vector() || call.decay_kind != PHISTATE_DECAY_NONE; }
    int64_t decays_per_head() const { return call.decay_kind == PHISTATE_DECAY_VECTOR ? kp : 1; }
    // What the chunk at hand keeps of the state before it, per feature where the decay is.
    const float* keep() const { return logs() && vector() ? decayed.whole() : decays() ? keeps : &kOne; }

    void choose(int64_t head) {
        s = states + (head - head_begin) * kp * sv;
        z = normalisers + (head - head_begin) * kp;
        reach = reaches + (logs() ? (head - head_begin) * kp : 0);
        rounding = roundings + (head - head_begin) * decays_per_head();
    }

    void begin(int64_t head, const Carried* from) {
        choose(head);
        const int64_t i = sequence * heads.s + head;
        if (from) {
            load_state(from->s, key_dim, call.value_dim, first, width, s, sv, kp);
            if (call.normalize) load_state(from->z, 1, key_dim, 0, key_dim, z, kp, 1);
            return;
        }
        load_state(call.s0 ? call.s0 + i * key_dim * call.value_dim : nullptr, key_dim, call.value_dim, first, width, s, sv, kp);
        if (call.normalize) load_state(call.z0 ? call.z0 + i * key_dim : nullptr, 1, key_dim, 0, key_dim, z, kp, 1);
        if (!logs()) return;
        for (int64_t c = 0; c < kp; ++c) reach[c] = call.log_scale0 && c < key_dim ? call.log_scale0[i * key_dim + c] : -INFINITY;
    }

    void save(float* s_out, float* z_out) const {
        unpack_rows(s, sv, key_dim, width, s_out + first, call.value_dim);
        if (z_out && first == 0) unpack_rows(z, kp, 1, key_dim, z_out, key_dim);
    }

    void finish(int64_t head) {
        if (span.end != span_of(call, sequence).end) return;
        choose(head);
        const int64_t i = sequence * heads.s + head;
        save(call.s + i * key_dim * call.value_dim, call.normalize ? call.z + i * key_dim : nullptr);
        if (logs() && first == 0) unpack_rows(reach, kp, 1, key_dim, call.log_scale + i * key_dim, key_dim);
    }

    void next_chunk() { key_loaded = query_loaded = multiplied = -1; }

    // Keys, values and rates of a chunk. Heads that share keys read them once.
    void read(int64_t time, int64_t rows, int64_t head) {
        tokens.read(call, span, time, rows, head);
        const bool fresh = vector() || logs() || key_loaded != heads.key(head);
        if (fresh) {
            pack_features(call, call.k, span.batch, time, heads.key(head), rows, nullptr, tokens.mask, k, kp, C);
            key_loaded = heads.key(head);
            multiplied = -1;
        }
        pack(call.v, span.batch, time, heads.value(head), rows, first, width, tokens.beta, tokens.mask, v, vp, C);
        if (logs()) {
            running.keys(k, reach, rate, rows, tokens.mask);
            if (running.steady) running.rescale(s, sv, z, call.normalize);
        } else if (vector()) {
            pack(call.decay, span.batch, time, head, rows, 0, key_dim, nullptr, tokens.mask, rate, kp, C);
            exponentiate<C>(rate, kp, keeps, rounding);
        } else if (decays()) {
            *keeps = kept(tokens.log_decay, *rounding);
        }
        if (vector()) {
            decayed.keys(k, rate);
        } else {
            if (fresh) transpose_panel(k, kp, C, kp, kt, C);
            if (decays()) relative_decay<C>(tokens.rate, C, between, since);
        }
    }

    // Scores of one query head.
    void score(int64_t rows) {
        if (vector()) {
            decayed.queries(q);
            decayed.scores(scores);
            return;
        }
        if (multiplied != query_loaded)
            product<float>(rows, C / L, key_dim, {q, kp, 1}, {kt, C}, {products, C}, Part::LowerOut, &ahead);
        multiplied = query_loaded;
        const bool weighed = decays();
        for (int64_t t = 0; t < rows; ++t) {
            float* row = scores + t * C;
            const float* from = products + t * C;
            const int64_t diagonal = t / L;
            const auto weighted = [&](int64_t c) {
                const F x = load(from + c * L);
                return weighed ? x * load(between + t * C + c * L) : x;
            };
            for (int64_t c = 0; c < diagonal; ++c) store(row + c * L, weighted(c));
            store(row + diagonal * L, first_lanes(weighted(diagonal), t % L + 1));
            // A block of rows reads its triangle's columns up to its last row.
            for (int64_t c = diagonal + 1; c * L < least<int64_t>(C, t + kRows); ++c) store(row + c * L, zero());
        }
    }

    // out = what the chunk's queries read; scores unused when not causal.
    void read_state(int64_t time, int64_t rows, int64_t output) {
        const float* gain = decays() && !vector() ? since : nullptr;
        const float* queries = vector() ? decayed.queries_since_start() : q;
        const Out to{out, vp, nullptr, 0, gain};
        if (call.causal)
            causal_read(rows, vectors(width), key_dim, {queries, kp, 1}, {s, sv}, {scores, C, 1}, {v, vp}, to, &ahead, &ahead);
        else
            product<float>(rows, vectors(width), key_dim, {queries, kp, 1}, {s, sv}, to, Part::All, &ahead);
        if (logs() && !call.normalize) {
            for (int64_t t = 0; t < rows; ++t) {
                const F norm = exp(splat(running.log_norm[t]));
                for (int64_t c = 0; c < vp; c += L) store(out + t * vp + c, load(out + t * vp + c) * norm);
            }
        }
        if (!call.normalize) return;
        for (int64_t t = 0; t < rows; ++t) {
            F dot = zero();
            for (int64_t c = 0; c < kp; c += L) dot = fma(load(queries + t * kp + c), load(z + c), dot);
            if (gain) dot *= splat(gain[t]);
            if (call.causal)
                for (int64_t c = 0; c <= t; c += L) dot = fma(load(scores + t * C + c), first_lanes(load(tokens.beta + c), least<int64_t>(L, t + 1 - c)), dot);
            const float denominator = sum(dot);
            if (call.denominators && first == 0)
                call.denominators[(span.batch * call.time + time + t) * heads.o + output] = denominator;
            const F inverse = splat(denominator == 0.0f ? 0.0f : 1.0f / denominator);
            for (int64_t c = 0; c < vp; c += L) store(out + t * vp + c, load(out + t * vp + c) * inverse);
        }
    }

    // The state after the chunk.
    void write_state(int64_t rows) {
        const float* keys = vector() ? decayed.keys_until_end() : k;
        if (decays() && !vector()) {
            for (int64_t j = 0; j < rows; ++j) {
                write[j] = between[(C - 1) * C + j];
                const F w = splat(write[j]);
                for (int64_t c = 0; c < vp; c += L) store(v + j * vp + c, load(v + j * vp + c) * w);
            }
        }
        product<float>(key_dim, vectors(width), rows, {keys, 1, kp}, {v, vp}, {s, sv, keep(), vector()}, Part::All, &ahead);
        if (!call.normalize) return;
        for (int64_t c = 0; c < kp; c += L) {
            F total = load(z + c) * (vector() ? load(keep() + c) : splat(*keep()));
            for (int64_t j = 0; j < rows; ++j) {
                const float weight = tokens.beta[j] * (vector() || !decays() ? 1.0f : write[j]);
                total = fma(splat(weight), load(keys + j * kp + c), total);
            }
            store(z + c, total);
        }
    }

    void query(int64_t time, int64_t rows, int64_t output) {
        if (!vector() && !logs() && query_loaded == heads.query(output)) return;
        query_loaded = heads.query(output);
        multiplied = -1;
        pack_features(call, call.q, span.batch, time, heads.query(output), rows, nullptr, tokens.mask, q, kp, C);
        if (logs()) running.queries(q, rows, tokens.mask);
        // Before anything else: the scale is part of the result's rounding in every form.
        const F scale = splat(call.normalize ? 1.0f : static_cast<float>(call.scale));
        for (int64_t i = 0; i < C * kp; i += L) store(q + i, load(q + i) * scale);
    }

    // What this chunk of a head writes and what the next one reads.
    void look_ahead(int64_t time, int64_t rows, int64_t head) {
        ahead.clear();
        if (call.causal) foresee(ahead, call.o, span.batch, time, head * heads.readers(), rows, first, width);
        if (++head == head_end) head = head_begin, time += C;
        rows = least<int64_t>(C, span.end - time);
        if (rows <= 0) return;
        if (call.causal) foresee(ahead, call.q, span.batch, time, heads.query(head * heads.readers()), rows, 0, key_dim);
        foresee_state(time, head);
    }

    // What a chunk reads to bring the state past it.
    void foresee_state(int64_t time, int64_t head) {
        const int64_t rows = least<int64_t>(C, span.end - time);
        if (rows <= 0) return;
        foresee(ahead, call.k, span.batch, time, heads.key(head), rows, 0, key_dim);
        foresee(ahead, call.v, span.batch, time, heads.value(head), rows, first, width);
        if (call.decay_kind == PHISTATE_DECAY_VECTOR) foresee(ahead, call.decay, span.batch, time, head, rows, 0, key_dim);
    }

    void answer(int64_t time, int64_t rows, int64_t head) {
        for (int64_t reader = 0; reader < heads.readers(); ++reader) {
            const int64_t output = head * heads.readers() + reader;
            query(time, rows, output);
            if (call.causal) score(rows);
            read_state(time, rows, output);
            unpack(out, vp, rows, width, call.o, span.batch, time, output, first);
        }
    }

    // Only what the span's tokens leave of themselves in an empty state, and what they keep of one before them.
    void run_state(int64_t head, const Carried& to) {
        choose(head);
        memset(s, 0, kp * sv * sizeof(float));
        memset(z, 0, kp * sizeof(float));
        for (int64_t c = 0; c < key_dim; ++c) to.kept[c] = 1.0f;
        for (int64_t time = span.begin; time < span.end; time += C) {
            const int64_t rows = least<int64_t>(C, span.end - time);
            next_chunk();
            read(time, rows, head);
            ahead.clear();
            foresee_state(time + C, head);
            write_state(rows);
            for (int64_t c = 0; c < key_dim; ++c) to.kept[c] *= keep()[vector() ? c : 0];
        }
        save(to.s, call.normalize ? to.z : nullptr);
    }

    void run(const Carried* from = nullptr) {
        for (int64_t head = head_begin; head < head_end; ++head) begin(head, from);
        for (int64_t time = span.begin; time < span.end; time += C) {
            const int64_t rows = least<int64_t>(C, span.end - time);
            next_chunk();
            for (int64_t head = head_begin; head < head_end; ++head) {
                choose(head);
                if (call.checkpoints && time > origin && (time - origin) % PHISTATE_SEGMENT == 0) {
                    float* kept = checkpoint(call, {span.batch, origin, span.end}, time, head);
                    save(kept, call.normalize ? kept + key_dim * call.value_dim : nullptr);
                }
                read(time, rows, head);
                look_ahead(time, rows, head);
                if (call.causal) answer(time, rows, head);
                write_state(rows);
            }
        }
        for (int64_t head = head_begin; head < head_end; ++head) finish(head);
        if (call.causal) return;
        ahead.clear();
        for (int64_t time = span.begin; time < span.end; time += C) {
            const int64_t rows = least<int64_t>(C, span.end - time);
            next_chunk();
            for (int64_t head = head_begin; head < head_end; ++head) {
                choose(head);
                tokens.read(call, span, time, rows, head);
                answer(time, rows, head);
            }
        }
    }
};

// A long sequence of fewer heads than there are threads, in parts that run at once. What a part begins with is what the
// parts before it leave, which takes no queries and so less than half of the work: it is found first, in pieces small
// enough to keep all threads busy.
class Parts {
public:
    explicit Parts(const phistate_linear_attention& call) : call_(call), heads_(call), states_(call.sequences * heads_.s) {
        const int64_t threads = phistate::num_threads();
        if (!call.causal || call.log_features || states_ >= threads) return;
        count_ = most<int64_t>(1, least(threads / most<int64_t>(states_, 1), call.time / kShortest));
    }
    bool worthwhile() const { return count_ > 1; }

    void run() {
        const int64_t size = call_.key_dim * (call_.value_dim + 2), pieces = count_ * (count_ - 1);
        phistate::Scratch scratch;
        float* left = scratch.floats(states_ * pieces * size);
        float* begun = scratch.floats(states_ * count_ * size);
        parallel(states_ * pieces, 1, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
                const int64_t state = i / pieces, head = state % heads_.s, piece = i % pieces;
                Unit(call_, state / heads_.s, cut(state, piece, piece + 1, count_ * count_), head, head + 1, 0, call_.value_dim)
                    .run_state(head, carried(left + i * size));
            }
        });
        for (int64_t state = 0; state < states_; ++state) follow(state, left + state * pieces * size, begun + state * count_ * size, size);
        parallel(states_ * count_, 1, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
                const int64_t state = i / count_, head = state % heads_.s, part = i % count_;
                const Carried from = carried(begun + i * size);
                Unit(call_, state / heads_.s, cut(state, part, part + 1, count_), head, head + 1, 0, call_.value_dim).run(part ? &from : nullptr);
            }
        });
    }

private:
    static constexpr int64_t kShortest = 4 * PHISTATE_SEGMENT;

    Carried carried(float* data) const {
        return {data, data + call_.key_dim * call_.value_dim, data + call_.key_dim * (call_.value_dim + 1)};
    }

    // Of a state's sequence, the tokens from part `first` of `of` up to part `last`; parts begin where chunks do.
    Span cut(int64_t state, int64_t first, int64_t last, int64_t of) const {
        const Span span = span_of(call_, state / heads_.s);
        const int64_t chunks = (span.end - span.begin + C - 1) / C;
        return {span.batch, span.begin + chunks * first / of * C, least(span.end, span.begin + chunks * last / of * C)};
    }

    // From what each piece leaves, the states that the parts begin with; the first begins with the caller's.
    void follow(int64_t state, float* left, float* begun, int64_t size) const {
        const int64_t K = call_.key_dim, V = call_.value_dim;
        phistate::Scratch scratch;
        const Carried now = carried(scratch.zeros(size));
        if (call_.s0) memcpy(now.s, call_.s0 + state * K * V, K * V * sizeof(float));
        if (call_.normalize && call_.z0) memcpy(now.z, call_.z0 + state * K, K * sizeof(float));
        for (int64_t piece = 0; piece < count_ * (count_ - 1); ++piece) {
            const Carried more = carried(left + piece * size);
            for (int64_t i = 0; i < K; ++i) {
                for (int64_t j = 0; j < V; ++j) now.s[i * V + j] = more.kept[i] * now.s[i * V + j] + more.s[i * V + j];
                if (call_.normalize) now.z[i] = more.kept[i] * now.z[i] + more.z[i];
            }
            if ((piece + 1) % count_ == 0) memcpy(begun + (piece + 1) / count_ * size, now.s, size * sizeof(float));
        }
    }

    const phistate_linear_attention& call_;
    const Heads heads_;
    const int64_t states_;
    int64_t count_ = 1;
};

}  // namespace

int additive_forward(const phistate_linear_attention& call) {
    if (!check_offsets(call)) return -1;
    if (call.time == 1 && call.causal && !call.cu_seqlens && !call.log_features) {
        step(call);
        return 0;
    }
    const Heads heads(call);
    expect_writes(call, call.o, heads.o, call.value_dim);
    if (Parts parts(call); parts.worthwhile()) {
        parts.run();
        return 0;
    }
    const int64_t states = call.sequences * heads.s, threads = phistate::num_threads();
    // Columns of the state do not meet: where states are fewer than threads and too short to be cut along the sequence,
    // each is cut into strips of values. A strip repeats the scores, so none is narrower than two vectors.
    const int64_t strips = most<int64_t>(1, least((threads + states - 1) / most<int64_t>(states, 1), call.value_dim / (2 * L)));
    const int64_t strip = round_up((call.value_dim + strips - 1) / strips, L);
    const int64_t bytes = call.key_dim * strip * static_cast<int64_t>(sizeof(float));
    const int64_t group = most<int64_t>(1, least((states + threads - 1) / threads, kStateBytes / bytes));
    const int64_t groups = (heads.s + group - 1) / group;
    parallel(call.sequences * groups * strips, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t first = i % strips * strip, width = least(strip, call.value_dim - first);
            const int64_t head = i / strips % groups * group;
            if (width > 0) Unit(call, i / strips / groups, span_of(call, i / strips / groups), head, least(head + group, heads.s), first, width).run();
        }
    });
    return 0;
}

}  // namespace PHISTATE_NS
