// Mamba-1's selective scan, forward.
#include "parallel.h"
#include "selective.h"

namespace PHISTATE_NS {
namespace {

// NB entries of the state of one unit through `rows` tokens, held in registers; y gains what they read.
template <int NB>
void advance(int64_t rows, const float* delta, const float* u, const float* b, const float* c, int64_t ld, const float* rates, float* state,
             float* y) {
    F h[NB], rate[NB];
#pragma GCC unroll 8
    for (int j = 0; j < NB; ++j) {
        h[j] = load(state + j * L);
        rate[j] = load(rates + j * L);
    }
    for (int64_t t = 0; t < rows; ++t) {
        const F step = load(delta + t * L), write = load(u + t * L);
        F even = load(y + t * L), odd = zero();
#pragma GCC unroll 8
        for (int j = 0; j < NB; ++j) {
            h[j] = Exp2(step * rate[j]).keep(h[j], write, splat(b[t * ld + j]));
            F& sum = j % 2 ? odd : even;
            sum = fma(h[j], splat(c[t * ld + j]), sum);
        }
        store(y + t * L, even + odd);
    }
#pragma GCC unroll 8
    for (int j = 0; j < NB; ++j) store(state + j * L, h[j]);
}

struct Task {
    const phistate_selective& call;
    const Grid grid;
    phistate::Scratch scratch;
    float *b, *c, *delta, *u, *y, *rates, *states;

    Task(const phistate_selective& given, int64_t units) : call(given), grid(given) {
        b = scratch.floats(kSegment * grid.padded_states);
        c = scratch.floats(kSegment * grid.padded_states);
        delta = scratch.floats(kSegment * L);
        u = scratch.floats(kSegment * L);
        y = scratch.floats(kSegment * L);
        rates = scratch.floats(units * grid.size());
        states = scratch.floats(units * grid.size());
    }

    void segment(const Sequences::One& one, int64_t group, int64_t unit, int64_t done, int64_t rows, const float* rate, float* state) {
        const int64_t first = group * grid.per_group + unit * L;
        const int lanes = grid.lanes(unit);
        const Steps steps = one.steps.from(done);
        read_delta(call, grid, one, group, unit, done, rows, delta, nullptr);
        read_tile(call.x, one.row, 0, first, steps, rows, lanes, u, L);
        const F skip = call.d ? load(call.d + first, lanes) : zero();
        for (int64_t t = 0; t < rows; ++t) {
            const F x = load(u + t * L);
            store(y + t * L, skip * x);
            store(u + t * L, load(delta + t * L) * x);
        }
        int64_t n = 0;
        for (; n + 4 <= grid.states; n += 4) advance<4>(rows, delta, u, b + n, c + n, grid.padded_states, rate + n * L, state + n * L, y);
        for (; n + 2 <= grid.states; n += 2) advance<2>(rows, delta, u, b + n, c + n, grid.padded_states, rate + n * L, state + n * L, y);
        for (; n < grid.states; ++n) advance<1>(rows, delta, u, b + n, c + n, grid.padded_states, rate + n * L, state + n * L, y);
        if (call.z.data) {
            read_tile(call.z, one.row, 0, first, steps, rows, lanes, delta, L);
            for (int64_t t = 0; t < rows; ++t) store(y + t * L, load(y + t * L) * silu(load(delta + t * L)));
        }
        write_tile(y, L, call.y, one.row, 0, first, steps, rows, lanes);
    }

    void run(const Sequences::One& one, int64_t sequence, int64_t group, int64_t begin, int64_t end) {
        const int64_t size = grid.size();
        for (int64_t unit = begin; unit < end; ++unit) {
            read_rates(call, grid, group, unit, rates + (unit - begin) * size);
            read_state(call.h0, grid, call.channels, sequence, group, unit, states + (unit - begin) * size);
        }
        for (int64_t done = 0; done < one.count; done += kSegment) {
            const int64_t rows = least(kSegment, one.count - done);
            const Steps steps = one.steps.from(done);
            read_tile(call.b, one.row, group, 0, steps, rows, grid.states, b, grid.padded_states);
            read_tile(call.c, one.row, group, 0, steps, rows, grid.states, c, grid.padded_states);
            for (int64_t unit = begin; unit < end; ++unit) {
                float* state = states + (unit - begin) * size;
                if (call.checkpoints) copy_vectors(state, grid.checkpoint(call, sequence, one.start, done, group, unit), size);
                segment(one, group, unit, done, rows, rates + (unit - begin) * size, state);
            }
        }
        for (int64_t unit = begin; unit < end; ++unit) {
            float* to = call.h + (sequence * call.channels + group * grid.per_group + unit * L) * grid.states;
            write_columns(states + (unit - begin) * size, to, grid.states, grid.lanes(unit));
        }
    }
};

// Zero where no state is kept, so that what a caller is given never depends on what the memory held.
void clear_spare(const phistate_selective& call, const Grid& grid, const Sequences& sequences) {
    const int64_t count = call.layout.sequences, width = call.groups * grid.kept_units * grid.size();
    for (int64_t n = 0; n < count; ++n) {
        const Sequences::One one = sequences.at(n);
        const int64_t end = n + 1 < count ? sequences.at(n + 1).start : call.layout.batch * call.layout.time;
        const int64_t first = Grid::slot(n, one.start), used = first + (one.count + kSegment - 1) / kSegment;
        const int64_t spare = (grid.kept_units - grid.units) * grid.size();
        for (int64_t i = first; i < used && spare > 0; ++i)
            for (int64_t group = 0; group < call.groups; ++group)
                memset(call.checkpoints + (i * call.groups + group + 1) * grid.kept_units * grid.size() - spare, 0, spare * sizeof(float));
        memset(call.checkpoints + used * width, 0, (Grid::slot(n + 1, end) - used) * width * sizeof(float));
    }
}

}  // namespace

int selective_scan(const phistate_selective& call) {
    if (const char* reason = reason_against(call)) return phistate::fail(reason);
    phistate::Scratch scratch;
    Sequences sequences;
    if (!sequences.init(call.layout, scratch)) return -1;
    expect_writes(call.y, call.layout.batch, call.layout.time, call.channels);
    const Grid grid(call);
    // Eight units share one reading of B and C; fewer where threads would stay idle.
    const int64_t pairs = call.layout.sequences * call.groups, wanted = 4 * phistate::num_threads();
    const int64_t parts = least(grid.units, most((grid.units + 7) / 8, (wanted + pairs - 1) / most<int64_t>(pairs, 1)));
    const int64_t work = call.channels * call.states * (call.layout.batch * call.layout.time + call.layout.sequences);
    const int64_t tasks = parts * pairs;
    const bool small = work < 32768;
    parallel(tasks, small ? tasks : 1, [&](int64_t begin, int64_t end) {
        Task task(call, (grid.units + parts - 1) / parts);
        for (int64_t i = begin; i < end; ++i) {
            const int64_t part = i % parts, group = i / parts % call.groups, sequence = i / parts / call.groups;
            task.run(sequences.at(sequence), sequence, group, grid.units * part / parts, grid.units * (part + 1) / parts);
        }
    });
    sequences.clear_padding(call.y, 1, call.channels);
    if (call.checkpoints) clear_spare(call, grid, sequences);
    return 0;
}

}  // namespace PHISTATE_NS
