// Backward pass of the delta family. With the forward formulas of delta.h, U = diag β W, Ẽ = E ⊙ D[·][start],
// K̂ = K ⊙ D[end][·], Q̃ as Ẽ, P = lower (Q Kᵀ ⊙ D), and dS the gradient of the state after the chunk:
//   dU = K̂ dS + Pᵀ dO
//   (I + Aᵀ diag β) G = dU, from the last row up; dβ = rows of G · W; H = diag β G = dV
//   dP = lower (dO Uᵀ), dA = −strict lower (H Uᵀ), dQ̃ = dO Sᵀ, dẼ = −H Sᵀ, dK̂ = U dSᵀ
//   dS ← D[end][start] ⊙ dS + Q̃ᵀ dO − Ẽᵀ H
// Where keys erase for themselves, dK is the sum of both.
// A log-decay at i scales every path from a token before i, or the state, to one at or after it. Its gradient is the sum
// over these paths, each with its decay: no difference of sums that would leave rounding where little passes.
// States are kept by the forward pass every PHISTATE_SEGMENT tokens and recomputed between.
#include "delta_chunk.h"

namespace PHISTATE_NS {
namespace {

using namespace delta;

constexpr int64_t kChunks = PHISTATE_SEGMENT / C;

struct Backward : Chunk {
    Ahead ahead;
    float *forward_rounding, *backward_rounding;
    // A segment's states and writes, strip after strip.
    float *states, *found;
    // Gradients.
    float *d_state, *d_out, *d_value, *written, *transposed, *state_transposed, *d_p, *d_a, *d_queries, *d_erase, *d_write, *through, *d_rates;

    explicit Backward(const phistate_linear_attention& c) : Chunk(c) {
        states = scratch.floats(kChunks * state_size());
        for (int64_t i = 0; i < kChunks * strips; ++i)  // rows of no feature are read and never written
            memset(states + (i * kp + key_dim) * kStrip, 0, (kp - key_dim) * kStrip * sizeof(float));
        found = scratch.floats(kChunks * strips * C * kStrip + kStateSlack);
        d_state = scratch.floats(state_size());
        d_out = scratch.floats(readers * C * kStrip + kStateSlack);
        d_value = scratch.floats(C * kStrip);
        written = scratch.floats(C * kStrip);
        transposed = scratch.floats(kStrip * C + kStateSlack);
        state_transposed = scratch.floats(kStrip * kp);
        d_p = scratch.floats(readers * C * C);
        d_a = scratch.floats(C * C);
        d_queries = scratch.floats(readers * C * kp);
        d_erase = scratch.floats(C * kp);
        d_write = scratch.floats(C * kp);
        through = scratch.floats(kp);
        d_rates = scratch.floats(C * kp);
        forward_rounding = scratch.floats(decays_per_state());
        backward_rounding = scratch.floats(decays_per_state());
    }

    int64_t state_size() const { return strips * kp * kStrip; }
    float* found_strip(int64_t chunk, int64_t j) const { return found + (chunk * strips + j) * C * kStrip; }

    // What a neighbouring chunk reads first, to be fetched during this one.
    void look_ahead(const Span& span, int64_t time, int64_t rows, int64_t head, bool recomputed) {
        ahead.clear();
        if (rows == 0) return;
        foresee(ahead, call.k, span.batch, time, heads.key(head), rows, 0, key_dim);
        if (call.erase.data) foresee(ahead, call.erase, span.batch, time, heads.key(head), rows, 0, key_dim);
        if (vector()) foresee(ahead, call.decay, span.batch, time, head, rows, 0, key_dim);
        if (recomputed) {
            foresee(ahead, call.v, span.batch, time, heads.value(head), rows, 0, call.value_dim);
            return;
        }
        foresee(ahead, call.q, span.batch, time, heads.query(head * readers), rows, 0, key_dim);
        foresee(ahead, call.d_o, span.batch, time, head * readers, rows, 0, call.value_dim);
        if (call.d_v.data) foresee(ahead, call.d_v, span.batch, time, heads.value(head), rows, 0, call.value_dim);
        if (call.d_k.data) foresee(ahead, call.d_k, span.batch, time, heads.key(head), rows, 0, key_dim);
        if (call.d_q.data) foresee(ahead, call.d_q, span.batch, time, heads.query(head * readers), rows, 0, key_dim);
    }

    // The gradient of a strip of Q̃ S + P U, column of ones included.
    void read_gradient(const Span& span, int64_t time, int64_t rows, int64_t head, int64_t j) {
        const int64_t skip = columns.skip(j);
        for (int64_t i = 0; i < readers; ++i) {
            float* panel = d_out + i * C * kStrip;
            if (skip) memset(panel, 0, C * kStrip * sizeof(float));
            float gain[C];
            for (int64_t t = 0; t < rows; ++t) gain[t] = columns.ones ? denominators[i * C + t] : static_cast<float>(call.scale);
            if (columns.count(j) > 0)
                pack(call.d_o, span.batch, time, head * readers + i, rows, columns.value(j), columns.count(j), gain, tokens.mask, panel + skip,
                     kStrip, C);
            if (skip)
                for (int64_t t = 0; t < C; ++t) panel[t * kStrip] = t < rows ? -gain[t] * denominators[(readers + i) * C + t] : 0.0f;
        }
    }

    // Forward through a segment's chunk: what its writes find missing and, if another follows, the state after it.
    void recompute(const Span& span, int64_t time, int64_t rows, int64_t head, int64_t chunk, bool another) {
        prepare(span, time, rows, head);
        float* state = states + chunk * state_size();
        for (int64_t j = 0; j < strips; ++j) {
            const int64_t n = columns.width_vectors(j);
            float* w = found_strip(chunk, j);
            const float* s = state + j * kp * kStrip;
            pack_values(call.v, span.batch, time, heads.value(head), rows, columns, j, tokens.mask, w);
            float minus[C];
            for (float& x : minus) x = -1.0f;
            product<float>(rows, n, key_dim, {read_erases, kp, 1}, {s, kStrip}, {w, kStrip, &kOne, 0, minus},
                           Part::All, &ahead);
            solve_down(rows, n, folded, w);
            if (!another) continue;
            write(w);
            product<float>(key_dim, n, rows, {write_keys, 1, kp}, {written, kStrip},
                           {state + state_size() + j * kp * kStrip, kStrip, keep, keep_step, nullptr, s}, Part::All, &ahead);
        }
    }

    // written = U of a strip.
    void write(const float* w) {
        memcpy(written, w, C * kStrip * sizeof(float));
        scale_each_row(written, kStrip, C, tokens.beta);
    }

    // What passes through the whole chunk: through[f] = D[end][start] Σ_v S dS.
    void pass_through(const float* state) {
        for (int64_t r = 0; r < kp; ++r) {
            through[r] = 0.0f;
            for (int64_t j = 0; j < strips; ++j) {
                const int64_t at = j * kp * kStrip + r * kStrip;
                through[r] += dot(state + at, d_state + at, columns.width_vectors(j) * L);
            }
            through[r] *= keep[r * keep_step];
        }
    }

    void backward(const Span& span, int64_t time, int64_t rows, int64_t head, int64_t chunk, float* d_decay) {
        const float* state = states + chunk * state_size();
        prepare(span, time, rows, head);
        prepare_queries(span, time, rows, head);
        if (call.d_decay.data) pass_through(state);
        float d_beta[C] = {}, unfolded[C * C];
        // −Aᵀ diag β, upper triangular.
        transpose_panel(a, C, C, C, unfolded, C);
        for (int64_t t = 0; t < C; ++t)
            for (int64_t j = 0; j < C; j += L)
                store(unfolded + t * C + j, PHISTATE_NS::load(unfolded + t * C + j) * PHISTATE_NS::load(tokens.beta + j) * splat(-1.0f));
        for (int64_t j = 0; j < strips; ++j) {
            const int64_t n = columns.width_vectors(j), features = columns.count(j) + columns.skip(j);
            const float *w = found_strip(chunk, j), *s = state + j * kp * kStrip;
            float* d_s = d_state + j * kp * kStrip;
            const float* first = j == 0 ? nullptr : &kOne;
            write(w);
            read_gradient(span, time, rows, head, j);
            memset(d_value, 0, C * kStrip * sizeof(float));
            product<float>(rows, n, key_dim, {write_keys, kp, 1}, {d_s, kStrip}, {d_value, kStrip}, Part::All, &ahead);
            for (int64_t i = 0; i < readers; ++i)
                product<float>(rows, n, rows, {p + i * C * C, 1, C}, {d_out + i * C * kStrip, kStrip}, {d_value, kStrip, &kOne}, Part::UpperIn, &ahead);
            solve_up(rows, n, unfolded, d_value);
            for (int64_t t = 0; t < rows; ++t) d_beta[t] += dot(d_value + t * kStrip, w + t * kStrip, n * L);
            float minus[C];
            for (int64_t t = 0; t < C; ++t) minus[t] = -tokens.beta[t];
            scale_each_row(d_value, kStrip, C, minus);  // −H
            value_gradient(span, time, rows, head, j);

            transpose_panel(s, kStrip, kp, n * L, state_transposed, kp);
            for (int64_t i = 0; i < readers; ++i)
                product<float>(rows, kp / L, features, {d_out + i * C * kStrip, kStrip, 1}, {state_transposed, kp},
                               {d_queries + i * C * kp, kp, first}, Part::All, &ahead);
            product<float>(rows, kp / L, features, {d_value, kStrip, 1}, {state_transposed, kp}, {d_erase, kp, first}, Part::All, &ahead);
            transpose_panel(d_s, kStrip, kp, n * L, state_transposed, kp);
            product<float>(rows, kp / L, features, {written, kStrip, 1}, {state_transposed, kp}, {d_write, kp, first}, Part::All, &ahead);
            transpose_panel(written, kStrip, C, n * L, transposed, C);
            product<float>(rows, C / L, features, {d_value, kStrip, 1}, {transposed, C}, {d_a, C, first}, Part::All, &ahead);
            for (int64_t i = 0; i < readers; ++i)
                product<float>(rows, C / L, features, {d_out + i * C * kStrip, kStrip, 1}, {transposed, C}, {d_p + i * C * C, C, first}, Part::All, &ahead);

            product<float>(key_dim, n, rows, {read_erases, 1, kp}, {d_value, kStrip}, {d_s, kStrip, keep, keep_step}, Part::All, &ahead);
            for (int64_t i = 0; i < readers; ++i)
                product<float>(key_dim, n, rows, {read_queries + i * C * kp, 1, kp}, {d_out + i * C * kStrip, kStrip}, {d_s, kStrip, &kOne},
                               Part::All, &ahead);
        }
        inside_chunk(rows);
        if (call.d_beta.data)
            for (int64_t t = 0; t < rows; ++t) put_scalar(call.d_beta, span.batch, time + t, head, tokens.mask && !tokens.live[t] ? 0.0f : d_beta[t]);
        decay_gradient(span, time, rows, head, d_decay);
        finish(span, time, rows, head);
    }

    // dV = H, from −H.
    void value_gradient(const Span& span, int64_t time, int64_t rows, int64_t head, int64_t j) {
        if (!call.d_v.data || columns.count(j) <= 0) return;
        for (int64_t i = 0; i < rows * kStrip; i += L) store(written_back() + i, PHISTATE_NS::load(d_value + i) * splat(-1.0f));
        unpack(written_back() + columns.skip(j), kStrip, rows, columns.count(j), call.d_v, span.batch, time, heads.value(head), columns.value(j),
               head % (heads.s / heads.v) != 0);
    }
    float* written_back() const { return transposed; }  // free at that time, C·kStrip long

    // From gradients of scores and of decayed operands to those of queries and keys: d_erase of rows of A and what
    // erases from the state, d_write of columns and what writes to it. d_rates: of the log-decays, per feature or in all.
    void inside_chunk(int64_t rows) {
        if (vector()) {
            decay_since(d_erase, rates, kp, rows, d_erase);
            decay_until(d_write, rates, kp, rows, d_write);
            for (int64_t i = 0; i < readers; ++i) decay_since(d_queries + i * C * kp, rates, kp, rows, d_queries + i * C * kp);
            if (call.d_decay.data) outer_rates(rows);
            score_gradient(d_a, erases, keys, rates, kp, rows, true, kt, left, d_erase, d_write, d_rates);
            for (int64_t i = 0; i < readers; ++i)
                score_gradient(d_p + i * C * C, queries + i * C * kp, keys, rates, kp, rows, false, kt, left, d_queries + i * C * kp, d_write,
                               d_rates);
            return;
        }
        const int64_t n = kp / L;
        scale_each_row(d_erase, kp, rows, since);
        scale_each_row(d_write, kp, rows, between + (C - 1) * C);
        for (int64_t i = 0; i < readers; ++i) scale_each_row(d_queries + i * C * kp, kp, rows, since);
        if (call.d_decay.data) scalar_rates(rows);
        mask_lower(d_a, rows);
        for (int64_t t = 0; t < rows; ++t) d_a[t * C + t] = 0.0f;
        product<float>(rows, n, rows, {d_a, C, 1}, {keys, kp}, {d_erase, kp, &kOne}, Part::LowerIn);
        product<float>(rows, n, rows, {d_a, 1, C}, {erases, kp}, {d_write, kp, &kOne}, Part::UpperIn);
        for (int64_t i = 0; i < readers; ++i) {
            float *d_q = d_queries + i * C * kp, *d = d_p + i * C * C;
            mask_lower(d, rows);
            product<float>(rows, n, rows, {d, C, 1}, {keys, kp}, {d_q, kp, &kOne}, Part::LowerIn);
            product<float>(rows, n, rows, {d, 1, C}, {queries + i * C * kp, kp}, {d_write, kp, &kOne}, Part::UpperIn);
        }
    }

    // x · dx of what token t reads from the state before the chunk, feature by feature.
    PHISTATE_INLINE F read_along(int64_t t, int64_t c) const {
        F x = PHISTATE_NS::load(erases + t * kp + c) * PHISTATE_NS::load(d_erase + t * kp + c);
        for (int64_t i = 0; i < readers; ++i)
            x = fma(PHISTATE_NS::load(queries + (i * C + t) * kp + c), PHISTATE_NS::load(d_queries + (i * C + t) * kp + c), x);
        return x;
    }

    // d_rates[i] = paths from the state to tokens from i on, from tokens before i to the state, and through.
    void outer_rates(int64_t rows) {
        memset(d_rates, 0, C * kp * sizeof(float));
        for (int64_t c = 0; c < kp; c += L) {
            F later = zero(), earlier = PHISTATE_NS::load(through + c);
            for (int64_t t = rows - 1; t >= 0; --t) {
                later += read_along(t, c);
                store(d_rates + t * kp + c, later);
            }
            for (int64_t t = 0; t < rows; ++t) {
                store(d_rates + t * kp + c, PHISTATE_NS::load(d_rates + t * kp + c) + earlier);
                earlier = fma(PHISTATE_NS::load(keys + t * kp + c), PHISTATE_NS::load(d_write + t * kp + c), earlier);
            }
        }
    }

    // The same and the paths inside the chunk, summed over features.
    void scalar_rates(int64_t rows) {
        float earlier = 0.0f, later = 0.0f;
        for (int64_t r = 0; r < kp; ++r) earlier += through[r];
        for (int64_t t = rows - 1; t >= 0; --t) {
            F total = zero();
            for (int64_t c = 0; c < kp; c += L) total += read_along(t, c);
            d_rates[t] = later += sum(total);
        }
        for (int64_t t = 0; t < rows; ++t) {
            d_rates[t] += earlier;
            earlier += dot(keys + t * kp, d_write + t * kp, kp);
        }
        float paths[C] = {};  // from each token to those from t on
        for (int64_t t = rows - 1; t > 0; --t) {
            F total = zero();
            for (int64_t c = 0; c < t; c += L) {
                const int64_t at = t * C + c;
                F x = fma(PHISTATE_NS::load(a + at), PHISTATE_NS::load(d_a + at), PHISTATE_NS::load(paths + c));
                for (int64_t i = 0; i < readers; ++i)
                    x = fma(PHISTATE_NS::load(p + i * C * C + at), PHISTATE_NS::load(d_p + i * C * C + at), x);
                store(paths + c, x);
                total += PHISTATE_NS::load(static_cast<const float*>(paths) + c, static_cast<int>(least<int64_t>(L, t - c)));
            }
            d_rates[t] += sum(total);
        }
    }

    void decay_gradient(const Span& span, int64_t time, int64_t rows, int64_t head, float* total) {
        for (int64_t t = 0; t < rows && call.d_decay.data; ++t) {
            const bool live = !(tokens.mask && !tokens.live[t]);
            if (vector()) {
                float* row = d_rates + t * kp;
                if (!live) memset(row, 0, kp * sizeof(float));
                unpack(row, kp, 1, key_dim, call.d_decay, span.batch, time + t, head, 0);
            } else if (call.decay_kind == PHISTATE_DECAY_SCALAR) {
                put_scalar(call.d_decay, span.batch, time + t, head, live ? d_rates[t] : 0.0f);
            } else if (live) {
                *total += d_rates[t];
            }
        }
    }

    // Through the L2 norm, x = n·√(Σx² + ε): dx = (dn − n (n · dn)) / √(Σx² + ε); then out.
    void through_norm(const float* x, const float* norm, int64_t rows, float* d) const {
        if (!call.qk_l2norm) return;
        for (int64_t t = 0; t < rows; ++t) {
            const F along = splat(-dot(x + t * kp, d + t * kp, kp)), r = splat(norm[t]);
            for (int64_t c = 0; c < kp; c += L)
                store(d + t * kp + c, fma(along, PHISTATE_NS::load(x + t * kp + c), PHISTATE_NS::load(d + t * kp + c)) * r);
        }
    }

    void finish(const Span& span, int64_t time, int64_t rows, int64_t head) {
        const bool gathered = head % (heads.s / heads.k) != 0;
        if (erases == keys)
            for (int64_t i = 0; i < rows * kp; i += L) store(d_write + i, PHISTATE_NS::load(d_erase + i) + PHISTATE_NS::load(d_write + i));
        through_norm(keys, key_norm, rows, d_write);
        if (call.d_k.data) unpack(d_write, kp, rows, key_dim, call.d_k, span.batch, time, heads.key(head), 0, gathered);
        if (call.d_erase.data) unpack(d_erase, kp, rows, key_dim, call.d_erase, span.batch, time, heads.key(head), 0, gathered);
        for (int64_t i = 0; i < readers && call.d_q.data; ++i) {
            through_norm(queries + i * C * kp, query_norms + i * C, rows, d_queries + i * C * kp);
            const int64_t output = head * readers + i;
            unpack(d_queries + i * C * kp, kp, rows, key_dim, call.d_q, span.batch, time, heads.query(output), 0, output % (heads.o / heads.q) != 0);
        }
    }

    void run_head(int64_t sequence, int64_t head) {
        const Span span = span_of(call, sequence);
        const int64_t at = sequence * heads.s + head, size = key_dim * call.value_dim, length = span.end - span.begin;
        load_state(call.d_s ? call.d_s + at * size : nullptr, call.d_z ? call.d_z + at * key_dim : nullptr, key_dim, call.value_dim, columns, kp,
                   d_state);
        memset(backward_rounding, 0, decays_per_state() * sizeof(float));
        float d_decay = 0.0f;
        for (int64_t start = (most<int64_t>(length, 1) - 1) / PHISTATE_SEGMENT * PHISTATE_SEGMENT; start >= 0; start -= PHISTATE_SEGMENT) {
            const float *s = call.s0 ? call.s0 + at * size : nullptr, *z = call.z0 ? call.z0 + at * key_dim : nullptr;
            if (start > 0) {
                s = checkpoint(call, span, span.begin + start, head);
                z = columns.ones ? s + size : nullptr;
            }
            load_state(s, z, key_dim, call.value_dim, columns, kp, states);
            const int64_t begin = span.begin + start, end = least(begin + PHISTATE_SEGMENT, span.end), chunks = (end - begin + C - 1) / C;
            memset(forward_rounding, 0, decays_per_state() * sizeof(float));
            rounding = forward_rounding;
            for (int64_t i = 0; i < chunks; ++i) {
                const int64_t time = begin + i * C;
                look_ahead(span, time + C, most<int64_t>(0, least<int64_t>(C, end - time - C)), head, true);
                recompute(span, time, least<int64_t>(C, end - time), head, i, i + 1 < chunks);
            }
            rounding = backward_rounding;
            for (int64_t i = chunks - 1; i >= 0; --i) {
                const int64_t time = begin + i * C;
                look_ahead(span, time - C, i > 0 ? C : 0, head, false);
                backward(span, time, least<int64_t>(C, end - time), head, i, &d_decay);
            }
        }
        if (call.decay_kind == PHISTATE_DECAY_HEAD && call.d_decay.data) static_cast<float*>(call.d_decay.data)[at] = d_decay;
        save_state(d_state, key_dim, call.value_dim, columns, kp, call.d_s0 ? call.d_s0 + at * size : nullptr,
                   call.d_z0 ? call.d_z0 + at * key_dim : nullptr);
    }
};

inline int64_t common_divisor(int64_t a, int64_t b) { return b == 0 ? a : common_divisor(b, a % b); }

}  // namespace

// d_q, d_k, d_erase and d_v of heads that several states or readers share are gathered head after head, best in
// float32; states that share any of them are one thread's.
int delta_backward(const phistate_linear_attention& call) {
    if (!check_offsets(call)) return -1;
    const Heads heads(call);
    const int64_t groups = common_divisor(common_divisor(heads.q, heads.k), heads.v), share = heads.s / groups;
    expect_writes(call, call.d_q, heads.q, call.key_dim);
    expect_writes(call, call.d_k, heads.k, call.key_dim);
    if (call.d_erase.data) expect_writes(call, call.d_erase, heads.k, call.key_dim);
    expect_writes(call, call.d_v, heads.v, call.value_dim);
    parallel(call.sequences * groups, 1, [&](int64_t begin, int64_t end) {
        Backward backward(call);
        for (int64_t i = begin * share; i < end * share; ++i) backward.run_head(i / heads.s, i % heads.s);
    });
    return 0;
}

}  // namespace PHISTATE_NS
