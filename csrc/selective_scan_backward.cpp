// Mamba-1's selective scan, backward: segments in reverse, each recomputed from the state kept before it.
//
//     g_t      = C_t dy_t + exp(Δ_{t+1} A) g_{t+1}          gradient of h_t
//     dC_t     = Σ_channels h_t dy_t                        dB_t = Σ_channels g_t u_t,   u = Δ x
//     du_t     = Σ_n g_t B_t
//     e_t      = g_t exp(Δ_t A) h_{t-1}                     gradient of Δ_t A
//     dΔ_t     = Σ_n e_t A + du_t x_t                       dA = Σ_t e_t Δ_t
#include "parallel.h"
#include "selective.h"

namespace PHISTATE_NS {
namespace {

constexpr int kBlock = 4;  // state entries taken together: their history of one segment fits the first-level cache

struct Unit {
    float *x, *delta, *slope, *d_y, *y, *d_u, *d_step;  // [kSegment][L]; d_step: Σ_n e A log₂ e
};

// One block of NB state entries of one unit through one segment: forward, keeping h and the decays; then back.
template <int NB>
void retrace(int64_t rows, const Unit& unit, bool gated, const float* b, const float* c, int64_t ld, const float* rates, const float* before,
             float* history, float* decays, float* g_carry, float* d_a, float* b_lanes, float* c_lanes) {
    F h[NB], rate[NB];
#pragma GCC unroll 8
    for (int j = 0; j < NB; ++j) {
        h[j] = load(before + j * L);
        rate[j] = load(rates + j * L);
        store(history + j * L, h[j]);
    }
    for (int64_t t = 0; t < rows; ++t) {
        const F step = load(unit.delta + t * L), write = step * load(unit.x + t * L);
        F sum = gated ? load(unit.y + t * L) : zero();
#pragma GCC unroll 8
        for (int j = 0; j < NB; ++j) {
            const F decay = exp2(step * rate[j]);
            h[j] = fma(decay, h[j], write * splat(b[t * ld + j]));
            store(decays + (t * NB + j) * L, decay);
            store(history + ((t + 1) * NB + j) * L, h[j]);
            if (gated) sum = fma(h[j], splat(c[t * ld + j]), sum);
        }
        if (gated) store(unit.y + t * L, sum);
    }
    F g[NB], d_rate[NB];
#pragma GCC unroll 8
    for (int j = 0; j < NB; ++j) {
        g[j] = load(g_carry + j * L);
        d_rate[j] = zero();  // of this segment: a sum of sums rounds less than one long sum
    }
    for (int64_t t = rows - 1; t >= 0; --t) {
        const F step = load(unit.delta + t * L), write = step * load(unit.x + t * L), d_y = load(unit.d_y + t * L);
        F d_u = load(unit.d_u + t * L), d_step = load(unit.d_step + t * L);
#pragma GCC unroll 8
        for (int j = 0; j < NB; ++j) {
            const int64_t at = (t * NB + j) * L;
            g[j] = fma(d_y, splat(c[t * ld + j]), g[j]);
            store(c_lanes + at, fma(load(history + at + NB * L), d_y, load(c_lanes + at)));
            store(b_lanes + at, fma(g[j], write, load(b_lanes + at)));
            d_u = fma(g[j], splat(b[t * ld + j]), d_u);
            g[j] = g[j] * load(decays + at);
            const F e = g[j] * load(history + at);
            d_step = fma(e, rate[j], d_step);
            d_rate[j] = fma(e, step, d_rate[j]);
        }
        store(unit.d_u + t * L, d_u);
        store(unit.d_step + t * L, d_step);
    }
#pragma GCC unroll 8
    for (int j = 0; j < NB; ++j) {
        store(g_carry + j * L, g[j]);
        store(d_a + j * L, load(d_a + j * L) + d_rate[j]);
    }
}

// The sums over the lanes of `count` vectors.
void sum_lanes(const float* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i += L) {
        F x[L];
        for (int j = 0; j < L; ++j) x[j] = i + j < count ? load(from + (i + j) * L) : zero();
        transpose(x);
        F total = x[0];
        for (int j = 1; j < L; ++j) total = total + x[j];
        store(to + i, total, static_cast<int>(least<int64_t>(L, count - i)));
    }
}

struct Task {
    const phistate_selective& call;
    const Grid grid;
    const int64_t group, part, begin, end;
    phistate::Scratch scratch;
    float *b, *c, *spare, *history, *decays, *b_lanes, *c_lanes, *sums;
    float *rates, *gradients, *d_a, *d_d, *d_bias;
    Unit* units;

    Task(const phistate_selective& given, int64_t g, int64_t p)
        : call(given),
          grid(given),
          group(g),
          part(p),
          begin(grid.units * p / given.parts),
          end(grid.units * (p + 1) / given.parts) {
        const int64_t count = end - begin, size = grid.size(), steps = kSegment * L;
        b = scratch.floats(kSegment * grid.padded_states);
        c = scratch.floats(kSegment * grid.padded_states);
        spare = scratch.floats(steps);
        history = scratch.floats((kSegment + 1) * kBlock * L);
        decays = scratch.floats(kSegment * kBlock * L);
        b_lanes = scratch.floats(kSegment * kBlock * L);
        c_lanes = scratch.floats(kSegment * kBlock * L);
        sums = scratch.floats(kSegment * kBlock);
        rates = scratch.floats(count * size);
        gradients = scratch.floats(count * size);
        d_a = scratch.zeros(count * size);
        d_d = scratch.zeros(count * L);
        d_bias = scratch.zeros(count * L);
        units = static_cast<Unit*>(scratch.bytes(sizeof(Unit) * count));
        for (int64_t i = 0; i < count; ++i) {
            units[i] = {scratch.floats(steps), scratch.floats(steps), scratch.floats(steps), scratch.floats(steps),
                        scratch.floats(steps), scratch.floats(steps), scratch.floats(steps)};
            read_rates(call, grid, group, begin + i, rates + i * size);
        }
    }

    int64_t channel(int64_t i) const { return group * grid.per_group + (begin + i) * L; }

    void open(const Sequences::One& one, int64_t i, int64_t done, int64_t rows) {
        Unit& unit = units[i];
        const int lanes = grid.lanes(begin + i);
        const Steps steps = one.steps.from(done);
        read_delta(call, grid, one, group, begin + i, done, rows, unit.delta, unit.slope);
        read_tile(call.x, one.row, 0, channel(i), steps, rows, lanes, unit.x, L);
        read_tile(call.d_y, one.row, 0, channel(i), steps, rows, lanes, unit.d_y, L);
        if (call.z.data) read_tile(call.z, one.row, 0, channel(i), steps, rows, lanes, spare, L);
        const F skip = call.d ? load(call.d + channel(i), lanes) : zero();
        for (int64_t t = 0; t < rows * L; t += L) {
            store(unit.y + t, skip * load(unit.x + t));
            store(unit.d_u + t, zero());
            store(unit.d_step + t, zero());
            if (call.z.data) store(unit.d_y + t, load(unit.d_y + t) * silu(load(spare + t)));
        }
    }

    // dB and dC of state entries [n, n + width): the lanes of all this task's units, summed.
    void put_sums(const Sequences::One& one, const Steps& steps, int64_t rows, int64_t n, int64_t width, const float* lanes, float* to) {
        sum_lanes(lanes, rows * width, sums);
        for (int64_t t = 0; t < rows; ++t) {
            const int64_t step = ((part * call.layout.batch + one.row) * call.layout.time + steps.at(t)) * call.groups + group;
            for (int64_t j = 0; j < width; ++j) to[step * grid.states + n + j] = sums[t * width + j];
        }
    }

    template <int NB>
    void block(const Sequences::One& one, int64_t sequence, int64_t done, int64_t rows, int64_t n) {
        for (int64_t t = 0; t < rows * NB * L; t += L) {
            store(b_lanes + t, zero());
            store(c_lanes + t, zero());
        }
        for (int64_t i = 0; i < end - begin; ++i) {
            const int64_t at = i * grid.size() + n * L;
            const float* before = grid.checkpoint(call, sequence, one.start, done, group, begin + i) + n * L;
            retrace<NB>(rows, units[i], call.z.data != nullptr, b + n, c + n, grid.padded_states, rates + at, before, history, decays,
                        gradients + at, d_a + at, b_lanes, c_lanes);
        }
        const Steps steps = one.steps.from(done);
        put_sums(one, steps, rows, n, NB, b_lanes, call.d_b);
        put_sums(one, steps, rows, n, NB, c_lanes, call.d_c);
    }

    void close(const Sequences::One& one, int64_t i, int64_t done, int64_t rows) {
        Unit& unit = units[i];
        const int lanes = grid.lanes(begin + i);
        const Steps steps = one.steps.from(done);
        if (call.z.data) {
            read_tile(call.z, one.row, 0, channel(i), steps, rows, lanes, spare, L);
            for (int64_t t = 0; t < rows * L; t += L) {
                // d_y holds dout·silu(z); dout itself is read anew, for silu(z) may be 0.
                const F z = load(spare + t);
                store(spare + t, load(unit.y + t) * silu_slope(z, sigmoid(z)));
            }
            read_tile(call.d_y, one.row, 0, channel(i), steps, rows, lanes, unit.y, L);
            for (int64_t t = 0; t < rows * L; t += L) store(spare + t, load(spare + t) * load(unit.y + t));
            write_tile(spare, L, call.d_z, one.row, 0, channel(i), steps, rows, lanes);
        }
        const F skip = call.d ? load(call.d + channel(i), lanes) : zero();
        F skips = zero(), biases = zero();
        for (int64_t t = 0; t < rows * L; t += L) {
            const F x = load(unit.x + t), d_u = load(unit.d_u + t), d_y = load(unit.d_y + t);
            const F d_delta = load(unit.slope + t) * fma(d_u, x, load(unit.d_step + t) * splat(kLn2));
            store(unit.d_step + t, d_delta);
            store(unit.d_u + t, fma(d_u, load(unit.delta + t), skip * d_y));
            biases = biases + d_delta;
            skips = fma(d_y, x, skips);
        }
        store(d_d + i * L, load(d_d + i * L) + skips);
        store(d_bias + i * L, load(d_bias + i * L) + biases);
        write_tile(unit.d_step, L, call.d_delta, one.row, 0, channel(i), steps, rows, lanes);
        write_tile(unit.d_u, L, call.d_x, one.row, 0, channel(i), steps, rows, lanes);
    }

    void run(const Sequences::One& one, int64_t sequence) {
        const int64_t size = grid.size();
        for (int64_t i = 0; i < end - begin; ++i) read_state(call.d_h, grid, call.channels, sequence, group, begin + i, gradients + i * size);
        for (int64_t done = (one.count - 1) / kSegment * kSegment; one.count && done >= 0; done -= kSegment) {
            const int64_t rows = least(kSegment, one.count - done);
            const Steps steps = one.steps.from(done);
            read_tile(call.b, one.row, group, 0, steps, rows, grid.states, b, grid.padded_states);
            read_tile(call.c, one.row, group, 0, steps, rows, grid.states, c, grid.padded_states);
            for (int64_t i = 0; i < end - begin; ++i) open(one, i, done, rows);
            int64_t n = 0;
            for (; n + kBlock <= grid.states; n += kBlock) block<kBlock>(one, sequence, done, rows, n);
            for (; n < grid.states; ++n) block<1>(one, sequence, done, rows, n);
            for (int64_t i = 0; i < end - begin; ++i) close(one, i, done, rows);
        }
        for (int64_t i = 0; call.d_h0 && i < end - begin; ++i)
            write_columns(gradients + i * size, call.d_h0 + (sequence * call.channels + channel(i)) * grid.states, grid.states,
                          grid.lanes(begin + i));
    }

    void finish() {
        for (int64_t i = 0; i < end - begin; ++i) {
            const int lanes = grid.lanes(begin + i);
            write_columns(d_a + i * grid.size(), call.d_a + channel(i) * grid.states, grid.states, lanes);
            if (call.d_d) store(call.d_d + channel(i), load(d_d + i * L), lanes);
            if (call.d_bias) store(call.d_bias + channel(i), load(d_bias + i * L), lanes);
        }
    }
};

}  // namespace

int selective_scan_backward(const phistate_selective& call) {
    if (const char* reason = reason_against(call)) return phistate::fail(reason);
    if (!call.checkpoints || call.parts < 1) return phistate::fail("selective_scan_backward: takes checkpoints and parts");
    phistate::Scratch scratch;
    Sequences sequences;
    if (!sequences.init(call.layout, scratch)) return -1;
    expect_writes(call.d_x, call.layout.batch, call.layout.time, call.channels);
    expect_writes(call.d_delta, call.layout.batch, call.layout.time, call.channels);
    expect_writes(call.d_z, call.layout.batch, call.layout.time, call.channels);
    // Sequences follow one another within a task: what a channel sums over all of them then needs no second pass.
    parallel(call.groups * call.parts, 1, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            Task task(call, i / call.parts, i % call.parts);
            for (int64_t n = 0; n < call.layout.sequences; ++n) task.run(sequences.at(n), n);
            task.finish();
        }
    });
    sequences.clear_padding(call.d_x, 1, call.channels);
    sequences.clear_padding(call.d_delta, 1, call.channels);
    sequences.clear_padding(call.d_z, 1, call.channels);
    const int64_t width = call.groups * call.states, rows = call.layout.batch * call.layout.time;
    for (int64_t part = 0; part < call.parts; ++part) {
        phistate_series sums = {call.d_b + part * rows * width, call.layout.time * width, width, 0, 1, PHISTATE_F32};
        sequences.clear_padding(sums, 1, width);
        sums.data = call.d_c + part * rows * width;
        sequences.clear_padding(sums, 1, width);
    }
    return 0;
}

}  // namespace PHISTATE_NS
