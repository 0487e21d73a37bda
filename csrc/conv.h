// What the short convolution's two directions share: its window over tokens and what stands before the first.
#pragma once

#include "functions.h"
#include "series.h"

namespace PHISTATE_NS {

constexpr int kMaxWidth = 8;

// rows [width − 1][n] in scratch of what stands before a sequence's first token; zero without a state.
inline void read_past(const phistate_conv& call, int64_t sequence, int64_t first, int64_t n, float* past, ptrdiff_t ld) {
    if (!call.s0.data) {
        for (int64_t w = 0; w < call.width - 1; ++w)
            for (int64_t c = 0; c < n; c += L) store(past + w * ld + c, zero());
        return;
    }
    read_tile(call.s0, sequence, 0, first, Steps{nullptr, 0}, call.width - 1, n, past, ld);
}

// Tokens [first token, + rows) of a sequence, negative ones from before it, as a tile of n channels.
inline void read_window(const phistate_conv& call, const Sequences::One& one, int64_t sequence, int64_t channel, int64_t n, int64_t token,
                        int64_t rows, float* tile, ptrdiff_t ld) {
    const int64_t before = least(most<int64_t>(-token, 0), rows);
    if (before > 0) {
        float past[(kMaxWidth - 1) * L];
        for (int64_t c = 0; c < n; c += L) {
            read_past(call, sequence, channel + c, least<int64_t>(L, n - c), past, L);
            for (int64_t r = 0; r < before; ++r) store(tile + r * ld + c, load(static_cast<const float*>(past) + (call.width - 1 + token + r) * L));
        }
    }
    if (rows > before) read_tile(call.x, one.row, 0, channel, one.steps.from(token + before), rows - before, n, tile + before * ld, ld);
}

// weight as [width][n] rows, then one row of bias.
inline void read_weight(const phistate_conv& call, int64_t channel, int64_t n, float* weight, ptrdiff_t ld) {
    read_rows(call.weight + channel * call.width, 1, call.width, Steps{nullptr, 0}, call.width, n, weight, ld);
    float* bias = weight + call.width * ld;
    for (int64_t c = 0; c < n; c += L)
        store(bias + c, call.bias ? load(call.bias + channel + c, static_cast<int>(least<int64_t>(L, n - c))) : zero());
}

inline const char* reason_against(const phistate_conv& call) {
    return call.width < 2 || call.width > kMaxWidth ? "causal_conv1d: takes a width of 2 to 8" : nullptr;
}

template <int N>
struct Width {
    static constexpr int count = N;
};

// Calls f with the width as a constant.
template <class Function>
PHISTATE_INLINE void with_width(int64_t width, const Function& f) {
    switch (width) {
        case 2: return f(Width<2>{});
        case 3: return f(Width<3>{});
        case 4: return f(Width<4>{});
        case 5: return f(Width<5>{});
        case 6: return f(Width<6>{});
        case 7: return f(Width<7>{});
        default: return f(Width<8>{});
    }
}

}  // namespace PHISTATE_NS
