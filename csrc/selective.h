// What the selective scan's two directions share.
//
//     h_t = exp(Δ_t A) h_{t-1} + Δ_t x_t B_t,   y_t = h_t C_t
//
// A vector holds L channels, so every state entry n is one vector, B_tn and C_tn are broadcast, and no sum crosses
// lanes. A "unit" is such a vector of channels; a task takes a few units of one group through the whole sequence,
// kSegment steps at a time, so that what it reads twice stays in the first-level cache.
#pragma once

#include "functions.h"
#include "series.h"

namespace PHISTATE_NS {

constexpr int64_t kSegment = PHISTATE_SELECTIVE_SEGMENT;

struct Grid {
    int64_t per_group, units, kept_units, states, padded_states;

    explicit Grid(const phistate_selective& call)
        : per_group(call.channels / call.groups),
          units(vectors(per_group)),
          kept_units(round_up(per_group, 16) / L),
          states(call.states),
          padded_states(round_up(call.states, L)) {}

    int64_t size() const { return states * L; }  // floats of one unit's state
    int lanes(int64_t unit) const { return static_cast<int>(least<int64_t>(L, per_group - unit * L)); }
    // The first of a sequence's slots, each for the states before one segment; it owns those up to the next one's.
    static int64_t slot(int64_t sequence, int64_t start) { return start / kSegment + sequence; }
    // Where the state before the segment that starts with the `done`-th token of a sequence is kept.
    float* checkpoint(const phistate_selective& call, int64_t sequence, int64_t start, int64_t done, int64_t group, int64_t unit) const {
        const int64_t place = slot(sequence, start) + done / kSegment;
        return call.checkpoints + ((place * call.groups + group) * kept_units + unit) * size();
    }
};

// Reads Δ (bias and softplus applied) for one unit and `rows` tokens; slope, if wanted, is dΔ/d(delta).
inline void read_delta(const phistate_selective& call, const Grid& grid, const Sequences::One& one, int64_t group, int64_t unit,
                       int64_t done, int64_t rows, float* delta, float* slope) {
    const int64_t first = group * grid.per_group + unit * L;
    read_tile(call.delta, one.row, 0, first, one.steps.from(done), rows, grid.lanes(unit), delta, L);
    const F bias = call.bias ? load(call.bias + first, grid.lanes(unit)) : zero();
    for (int64_t t = 0; t < rows; ++t) {
        const F raw = load(delta + t * L) + bias;
        if (slope) store(slope + t * L, call.softplus ? sigmoid(raw) : splat(1.0f));
        store(delta + t * L, call.softplus ? softplus(raw) : raw);
    }
}

// A's rows for one unit, times log₂ e, as [states][L].
inline void read_rates(const phistate_selective& call, const Grid& grid, int64_t group, int64_t unit, float* rates) {
    const int64_t first = group * grid.per_group + unit * L;
    read_columns(call.a + first * grid.states, grid.states, grid.lanes(unit), rates);
    for (int64_t n = 0; n < grid.states; ++n) store(rates + n * L, load(rates + n * L) * splat(kLog2E));
}

inline void read_state(const float* from, const Grid& grid, int64_t channels, int64_t sequence, int64_t group, int64_t unit, float* state) {
    if (!from) {
        for (int64_t n = 0; n < grid.size(); n += L) store(state + n, zero());
        return;
    }
    const int64_t first = group * grid.per_group + unit * L;
    read_columns(from + (sequence * channels + first) * grid.states, grid.states, grid.lanes(unit), state);
}

inline void copy_vectors(const float* from, float* to, int64_t count) {
    for (int64_t i = 0; i < count; i += L) store(to + i, load(from + i));
}

inline const char* reason_against(const phistate_selective& call) {
    if (call.groups < 1 || call.channels % call.groups) return "selective_scan: channels is no multiple of groups";
    if (call.states < 1) return "selective_scan: takes at least one state";
    return nullptr;
}

}  // namespace PHISTATE_NS
