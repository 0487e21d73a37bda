// Forward pass of the delta family; the formulas are in delta.h. States that share a key head are taken together,
// for their scores differ only in decay. Columns of V meet nowhere but in the normaliser, so everything after the
// scores runs strip by strip: a strip of S is fetched once a chunk.
#include "delta_decay.h"

namespace PHISTATE_NS {
namespace {

using namespace delta;

constexpr int64_t kFewTokens = 4;  // up to here one token after the other costs less than a chunk

struct Forward {
    const phistate_linear_attention& call;
    const Heads heads;
    const Columns columns;
    const int64_t key_dim, kp, together;
    phistate::Scratch scratch;
    float *keys, *erases, *kt, *queries, *key_scores, *query_scores, *between, *a, *p, *values, *out, *states;
    float *read_erases, *write_keys, *read_queries, *left, *run;  // vector decay
    float *denominators, *roundings;  // roundings: of what chunks keep, of each state (kept.h)
    float keep;                       // of the chunk at hand; under a decay per feature rates.whole says it
    float key_norm[C], erase_norm[C], query_norm[C], since[C], erase_gain[C], query_gain[C], write[C];
    Rates rates;
    Tokens<C> tokens;
    Ahead ahead;
    int64_t query_loaded = -1;

    Forward(const phistate_linear_attention& c, const Columns& part, int64_t states_together)
        : call(c), heads(c), columns(part), key_dim(c.key_dim), kp(round_up(c.key_dim, L)), together(states_together) {
        const int64_t readers = heads.readers();
        keys = scratch.floats(C * kp);
        erases = call.erase.data ? scratch.floats(C * kp) : keys;
        kt = scratch.floats(C * kp);
        queries = scratch.floats(readers * C * kp);
        key_scores = scratch.floats(C * C);
        query_scores = scratch.floats(readers * C * C);
        between = scratch.floats(C * C);
        a = scratch.zeros(C * C);
        p = scratch.zeros(readers * C * C);
        values = scratch.floats(C * kStrip + kStateSlack);
        out = scratch.floats(C * kStrip + kStateSlack);
        states = scratch.floats(together * columns.strips() * kp * kStrip);
        denominators = scratch.floats(readers * C);
        roundings = scratch.floats(together * decays_per_state());
        if (!vector()) return;
        read_erases = scratch.floats(C * kp);
        write_keys = scratch.floats(C * kp);
        read_queries = scratch.floats(readers * C * kp);
        left = scratch.floats(kBlock * kp);
        run = scratch.floats(kp);
        rates = Rates(scratch, kp);
    }

    bool vector() const { return call.decay_kind == PHISTATE_DECAY_VECTOR; }
    int64_t decays_per_state() const { return vector() ? kp : 1; }
    float* rounding(int64_t i) const { return roundings + i * decays_per_state(); }
    float* state(int64_t i) const { return states + i * columns.strips() * kp * kStrip; }
    float scale() const { return call.normalize ? 1.0f : static_cast<float>(call.scale); }

    void save(int64_t i, int64_t at, float* s, float* z) const {
        save_state(state(i), key_dim, call.value_dim, columns, kp, s + at * key_dim * call.value_dim, z ? z + at * key_dim : nullptr);
    }

    void checkpoint_state(int64_t i, float* to) const {
        save_state(state(i), key_dim, call.value_dim, columns, kp, to, columns.first == 0 ? to + key_dim * call.value_dim : nullptr);
    }

    void read_keys_of(const Span& span, int64_t time, int64_t rows, int64_t key_head) {
        pack(call.k, span.batch, time, key_head, rows, 0, key_dim, nullptr, tokens.mask, keys, kp, C);
        inverse_norms(keys, kp, C, call.qk_l2norm, key_norm);
        if (call.erase.data) {
            pack(call.erase, span.batch, time, key_head, rows, 0, key_dim, nullptr, tokens.mask, erases, kp, C);
            inverse_norms(erases, kp, C, false, erase_norm);
        }
        if (vector()) {
            if (call.qk_l2norm) scale_each_row(keys, kp, rows, key_norm);
            return;
        }
        transpose_panel(keys, kp, C, kp, kt, C);
        product<float>(rows, vectors(rows), key_dim, {erases, kp, 1}, {kt, C}, {key_scores, C}, Part::LowerOut);
    }

    void read_queries_of(const Span& span, int64_t time, int64_t rows, int64_t reader, int64_t query_head) {
        float* panel = queries + reader * C * kp;
        pack(call.q, span.batch, time, query_head, rows, 0, key_dim, nullptr, tokens.mask, panel, kp, C);
        inverse_norms(panel, kp, C, call.qk_l2norm, query_norm);
        const F s = splat(scale());
        for (int64_t r = 0; r < C; r += L) store(query_norm + r, PHISTATE_NS::load(query_norm + r) * s);
        scale_each_row(panel, kp, rows, query_norm);
        if (!vector())
            product<float>(rows, vectors(rows), key_dim, {panel, kp, 1}, {kt, C}, {query_scores + reader * C * C, C}, Part::LowerOut);
    }

    // a = −A diag(β) and p = P diag(β), from products of keys, of queries and keys, and the decays between.
    void weigh_scalar(int64_t rows, float* rounding) {
        relative_decay<C>(tokens.rate, C, between, since);
        keep = call.decay_kind == PHISTATE_DECAY_NONE ? 1.0f : kept(tokens.log_decay, *rounding);
        const float* norms = call.erase.data ? erase_norm : key_norm;
        float weight[C];
        for (int64_t r = 0; r < C; r += L) {
            const F w = PHISTATE_NS::load(tokens.beta + r) * PHISTATE_NS::load(key_norm + r);
            store(weight + r, w);
            store(erase_gain + r, PHISTATE_NS::load(since + r) * PHISTATE_NS::load(norms + r) * splat(-1.0f));
            store(write + r, w * PHISTATE_NS::load(between + (C - 1) * C + r));
        }
        for (int64_t t = 0; t < C; ++t) {
            const F norm = splat(t < rows ? -norms[t] : 0.0f);
            for (int64_t c = 0; c < C; c += L) {
                const int64_t lanes = t < rows ? most<int64_t>(0, least<int64_t>(L, t + 1 - c)) : 0;  // up to the diagonal
                const F d = PHISTATE_NS::load(between + t * C + c) * PHISTATE_NS::load(weight + c);
                store(a + t * C + c, lanes ? first_lanes(PHISTATE_NS::load(key_scores + t * C + c) * d * norm, lanes) : zero());
                for (int64_t i = 0; i < heads.readers(); ++i)
                    store(p + (i * C + t) * C + c, lanes ? first_lanes(PHISTATE_NS::load(query_scores + (i * C + t) * C + c) * d, lanes) : zero());
            }
            a[t * C + t] = 0.0f;
        }
    }

    void weigh_vector(const Span& span, int64_t time, int64_t rows, int64_t head, float* rounding) {
        rates.read(call, span, time, rows, head, tokens.mask, kp, rounding);
        decayed_scores(queries, erases, keys, rates, kp, rows, kt, left, run, p, a);
        for (int64_t i = 1; i < heads.readers(); ++i)
            decayed_scores(queries + i * C * kp, nullptr, keys, rates, kp, rows, kt, left, run, p + i * C * C, nullptr);
        decay_since(erases, rates, kp, rows, read_erases);
        decay_until(keys, rates, kp, rows, write_keys);
        for (int64_t i = 0; i < heads.readers(); ++i) decay_since(queries + i * C * kp, rates, kp, rows, read_queries + i * C * kp);
        for (int64_t r = 0; r < C; ++r) erase_gain[r] = -1.0f;
        memcpy(write, tokens.beta, sizeof write);
        for (int64_t t = 0; t < C; ++t) {
            for (int64_t c = 0; c < C; c += L) {
                const F w = PHISTATE_NS::load(tokens.beta + c);
                float* row = a + t * C + c;
                store(row, t < rows ? PHISTATE_NS::load(row) * w * splat(-1.0f) : zero());
                for (int64_t i = 0; i < heads.readers(); ++i) {
                    row = p + (i * C + t) * C + c;
                    store(row, first_lanes(PHISTATE_NS::load(row) * w, most<int64_t>(0, least<int64_t>(L, t + 1 - c))));
                }
            }
            a[t * C + t] = 0.0f;
        }
    }

    // Everything that touches the state, one strip of columns.
    void strip(const Span& span, int64_t time, int64_t rows, int64_t head, int64_t i, float* s) {
        const int64_t n = columns.width_vectors(i), readers = heads.readers();
        pack_values(call.v, span.batch, time, heads.value(head), rows, columns, i, tokens.mask, values);
        product<float>(rows, n, key_dim, {vector() ? read_erases : erases, kp, 1}, {s, kStrip}, {values, kStrip, &kOne, 0, erase_gain},
                       Part::All, &ahead);
        solve_down(rows, n, a, values);
        for (int64_t reader = 0; reader < readers; ++reader) {
            const float* q = (vector() ? read_queries : queries) + reader * C * kp;
            causal_read(rows, n, key_dim, {q, kp, 1}, {s, kStrip}, {p + reader * C * C, C, 1}, {values, kStrip},
                        {out, kStrip, nullptr, 0, vector() ? nullptr : since}, &ahead, nullptr);
            float* below = denominators + reader * C;
            if (columns.skip(i))
                for (int64_t t = 0; t < rows; ++t) {
                    const float denominator = out[t * kStrip];
                    below[t] = denominator == 0.0f ? 0.0f : 1.0f / denominator;
                    if (call.denominators && columns.first == 0)
                        call.denominators[(span.batch * call.time + time + t) * heads.o + head * readers + reader] = denominator;
                }
            if (columns.ones) scale_each_row(out, kStrip, rows, below);
            if (columns.count(i) > 0)
                unpack(out + columns.skip(i), kStrip, rows, columns.count(i), call.o, span.batch, time, head * readers + reader,
                       columns.value(i));
        }
        scale_each_row(values, kStrip, rows, write);
        if (vector())
            product<float>(key_dim, n, rows, {write_keys, 1, kp}, {values, kStrip}, {s, kStrip, rates.whole + 2 * kp, 1}, Part::All,
                           &ahead);
        else
            product<float>(key_dim, n, rows, {keys, 1, kp}, {values, kStrip}, {s, kStrip, &keep}, Part::All, &ahead);
    }

    // What the next chunk reads and writes first, to be fetched during this one.
    void look_ahead(const Span& span, int64_t time, int64_t first) {
        ahead.clear();
        const int64_t rows = least<int64_t>(C, span.end - time);
        if (rows <= 0) return;
        foresee(ahead, call.k, span.batch, time, heads.key(first), rows, 0, key_dim);
        if (call.erase.data) foresee(ahead, call.erase, span.batch, time, heads.key(first), rows, 0, key_dim);
        foresee(ahead, call.q, span.batch, time, heads.query(first * heads.readers()), rows, 0, key_dim);
        if (vector()) foresee(ahead, call.decay, span.batch, time, first, rows, 0, key_dim);
        for (int64_t head = first; head < first + together; ++head) {
            foresee(ahead, call.v, span.batch, time, heads.value(head), rows, columns.first, columns.width);
            foresee(ahead, call.o, span.batch, time, head * heads.readers(), rows, columns.first, columns.width);
        }
    }

    // State heads [first, first + together), which share a key head.
    void run_heads(int64_t sequence, int64_t first) {
        const Span span = span_of(call, sequence);
        for (int64_t i = 0; i < together; ++i) {
            const int64_t at = sequence * heads.s + first + i;
            load_state(call.s0 ? call.s0 + at * key_dim * call.value_dim : nullptr, call.z0 ? call.z0 + at * key_dim : nullptr, key_dim,
                       call.value_dim, columns, kp, state(i));
        }
        memset(roundings, 0, together * decays_per_state() * sizeof(float));
        const int64_t readers = heads.readers();
        for (int64_t time = span.begin; time < span.end; time += C) {
            const int64_t rows = least<int64_t>(C, span.end - time);
            query_loaded = -1;
            look_ahead(span, time + C, first);
            for (int64_t i = 0; i < together; ++i) {
                const int64_t head = first + i;
                if (call.checkpoints && time > span.begin && (time - span.begin) % PHISTATE_SEGMENT == 0) checkpoint_state(i, checkpoint(call, span, time, head));
                tokens.read(call, span, time, rows, head);
                if (i == 0) read_keys_of(span, time, rows, heads.key(head));
                for (int64_t reader = 0; reader < readers; ++reader) {
                    const int64_t query = heads.query(head * readers + reader);
                    if (readers == 1 && query == query_loaded) continue;
                    read_queries_of(span, time, rows, reader, query);
                    query_loaded = query;
                }
                if (vector())
                    weigh_vector(span, time, rows, head, rounding(i));
                else
                    weigh_scalar(rows, rounding(i));
                for (int64_t j = 0; j < columns.strips(); ++j) strip(span, time, rows, head, j, state(i) + j * kp * kStrip);
            }
        }
        for (int64_t i = 0; i < together; ++i) save(i, sequence * heads.s + first + i, call.s, columns.first == 0 ? call.z : nullptr);
    }
};

}  // namespace

int delta_forward(const phistate_linear_attention& call) {
    if (!check_offsets(call)) return -1;
    if (call.time <= kFewTokens) {
        delta_step(call);
        return 0;
    }
    const Heads heads(call);
    expect_writes(call, call.o, heads.o, call.value_dim);
    const int64_t threads = phistate::num_threads(), share = heads.s / heads.k;
    int64_t together = 1;
    if (call.decay_kind != PHISTATE_DECAY_VECTOR)
        for (int64_t n = 2; n <= 4; ++n)
            if (share % n == 0 && call.sequences * heads.s / n >= threads) together = n;
    const int64_t units = call.sequences * heads.s / together;
    // Where units are fewer than threads, each is cut into strips of values, which repeat the scores.
    const int64_t strips = most<int64_t>(1, least((threads + units - 1) / most<int64_t>(units, 1), call.value_dim / (2 * L)));
    const int64_t strip = round_up((call.value_dim + strips - 1) / strips, L);
    parallel(units * strips, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t first = i % strips * strip, unit = i / strips * together;
            const Columns columns{first, least(strip, call.value_dim - first), call.normalize ? 1 : 0};
            if (columns.width <= 0 && first > 0) continue;
            Forward forward(call, columns, together);
            forward.run_heads(unit / heads.s, unit % heads.s);
        }
    });
    return 0;
}

}  // namespace PHISTATE_NS
