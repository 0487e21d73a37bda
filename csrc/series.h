// Operands [batch, time, channels] in any memory order, to and from tiles [steps][channels] in scratch; and which
// time steps of a call are tokens.
#pragma once

#include <stddef.h>

#include "runtime.h"
#include "vec.h"

namespace PHISTATE_NS {

// Consecutive tokens: the r-th stands at time index[r], or first + r.
struct Steps {
    const int64_t* index;
    int64_t first;

    int64_t at(int64_t r) const { return index ? index[r] : first + r; }
    Steps from(int64_t r) const { return index ? Steps{index + r, 0} : Steps{nullptr, first + r}; }
    // Without the list where the tokens happen to be neighbours.
    Steps plain(int64_t rows) const {
        return index && rows > 0 && index[rows - 1] - index[0] == rows - 1 ? Steps{nullptr, index[0]} : *this;
    }
};

// Compiled once per storage type, never into their callers: the transposes are long.
template <class T>
__attribute__((noinline)) void read_rows(const T* p, ptrdiff_t time, ptrdiff_t channel, Steps steps, int64_t rows, int64_t n, float* tile, ptrdiff_t ld) {
    steps = steps.plain(rows);
    if (channel == 1) {
        const int64_t whole = n / L * L;
        const int tail = static_cast<int>(n - whole);
        for (int64_t r = 0; r < rows; ++r) {
            const T* from = p + steps.at(r) * time;
            float* to = tile + r * ld;
            for (int64_t c = 0; c < whole; c += L) store(to + c, load(from + c));
            if (tail) store(to + whole, load(from + whole, tail));
        }
        return;
    }
    if (time == 1 && !steps.index) {
        for (int64_t c = 0; c < n; c += L)
            for (int64_t r = 0; r < rows; r += L) {
                const T* from = p + steps.first + r + c * channel;
                const int across = static_cast<int>(least<int64_t>(L, n - c)), down = static_cast<int>(least<int64_t>(L, rows - r));
                F x[L];
                for (int i = 0; i < L; ++i) x[i] = i < across ? (down == L ? load(from + i * channel) : load(from + i * channel, down)) : zero();
                transpose(x);
                for (int i = 0; i < down; ++i) store(tile + (r + i) * ld + c, x[i]);
            }
        return;
    }
    for (int64_t r = 0; r < rows; ++r) {
        const T* from = p + steps.at(r) * time;
        for (int64_t c = 0; c < round_up(n, L); ++c) tile[r * ld + c] = c < n ? get(from[c * channel]) : 0.0f;
    }
}

template <class T>
__attribute__((noinline)) void write_rows(const float* tile, ptrdiff_t ld, T* p, ptrdiff_t time, ptrdiff_t channel, Steps steps, int64_t rows, int64_t n) {
    steps = steps.plain(rows);
    if (channel == 1) {
        const int64_t whole = n / L * L;
        const int tail = static_cast<int>(n - whole);
        for (int64_t r = 0; r < rows; ++r) {
            const float* from = tile + r * ld;
            T* to = p + steps.at(r) * time;
            for (int64_t c = 0; c < whole; c += L) store(to + c, load(from + c));
            if (tail) store(to + whole, load(from + whole), tail);
        }
        return;
    }
    if (time == 1 && !steps.index) {
        for (int64_t c = 0; c < n; c += L)
            for (int64_t r = 0; r < rows; r += L) {
                T* to = p + steps.first + r + c * channel;
                const int across = static_cast<int>(least<int64_t>(L, n - c)), down = static_cast<int>(least<int64_t>(L, rows - r));
                F x[L];
                for (int i = 0; i < L; ++i) x[i] = i < down ? load(tile + (r + i) * ld + c) : zero();
                transpose(x);
                for (int i = 0; i < across; ++i) {
                    if (down == L)
                        store(to + i * channel, x[i]);
                    else
                        store(to + i * channel, x[i], down);
                }
            }
        return;
    }
    for (int64_t r = 0; r < rows; ++r) {
        T* to = p + steps.at(r) * time;
        for (int64_t c = 0; c < n; ++c) put(to + c * channel, tile[r * ld + c]);
    }
}

// Calls f with a pointer of the operand's own type.
template <class Function>
PHISTATE_INLINE void typed(int64_t dtype, void* data, const Function& f) {
    if (dtype == PHISTATE_F32)
        f(static_cast<float*>(data));
    else if (dtype == PHISTATE_BF16)
        f(static_cast<bf16*>(data));
    else
        f(static_cast<f16*>(data));
}

// tile[r][c] = the operand at (batch b, r-th token, group g, channel first + c); columns up to a whole vector are 0.
__attribute__((noinline)) inline void read_tile(const phistate_series& s, int64_t b, int64_t g, int64_t first, Steps steps, int64_t rows, int64_t n,
                      float* tile, ptrdiff_t ld) {
    typed(s.dtype, s.data, [&](auto* p) {
        read_rows(p + b * s.batch + g * s.group + first * s.channel, s.time, s.channel, steps, rows, n, tile, ld);
    });
}
__attribute__((noinline)) inline void write_tile(const float* tile, ptrdiff_t ld, const phistate_series& s, int64_t b, int64_t g, int64_t first, Steps steps,
                       int64_t rows, int64_t n) {
    typed(s.dtype, s.data, [&](auto* p) {
        write_rows(tile, ld, p + b * s.batch + g * s.group + first * s.channel, s.time, s.channel, steps, rows, n);
    });
}

// Says that a dense output [batch, time, channels] is about to be written.
inline void expect_writes(const phistate_series& s, int64_t batch, int64_t time, int64_t channels) {
    const int64_t bytes = s.dtype == PHISTATE_F32 ? 4 : 2;
    if (s.data) phistate::expect_writes(s.data, batch * time * channels * bytes);
}

// A dense [channels, n] matrix as a tile [n][channels], and back.
inline void read_columns(const float* p, int64_t n, int64_t channels, float* tile) {
    read_rows(p, 1, n, Steps{nullptr, 0}, n, channels, tile, L);
}
inline void write_columns(const float* tile, float* p, int64_t n, int64_t channels) {
    write_rows(tile, L, p, 1, n, Steps{nullptr, 0}, n, channels);
}

// The independent sequences of a call: rows of the batch, or stretches of one row; padded steps left out.
class Sequences {
public:
    struct One {
        int64_t row;    // of the batch
        int64_t start;  // of its first step among all steps of all rows, for laying out what is kept per step
        Steps steps;
        int64_t count;
    };

    // False: cu_seqlens does not fit, and the error is set.
    __attribute__((noinline)) bool init(const phistate_layout& layout, phistate::Scratch& scratch) {
        layout_ = layout;
        if (layout.cu_seqlens) {
            bool fits = layout.batch == 1 && layout.cu_seqlens[0] == 0 && layout.cu_seqlens[layout.sequences] == layout.time;
            for (int64_t n = 0; n < layout.sequences && fits; ++n) fits = layout.cu_seqlens[n] <= layout.cu_seqlens[n + 1];
            if (!fits) {
                phistate::fail(phistate::kOffsets);
                return false;
            }
        }
        if (!layout.mask) return true;
        index_ = static_cast<int64_t*>(scratch.bytes(sizeof(int64_t) * (layout.batch * layout.time + 1)));
        place_ = static_cast<int64_t*>(scratch.bytes(sizeof(int64_t) * (layout.sequences + 1)));
        int64_t used = 0;
        for (int64_t n = 0; n < layout.sequences; ++n) {
            const int64_t row = layout.cu_seqlens ? 0 : n;
            place_[n] = used;
            for (int64_t t = begin(n); t < end(n); ++t)
                if (layout.mask[row * layout.mask_batch + t * layout.mask_time]) index_[used++] = t;
        }
        place_[layout.sequences] = used;
        return true;
    }

    One at(int64_t n) const {
        const int64_t row = layout_.cu_seqlens ? 0 : n, start = row * layout_.time + begin(n);
        if (index_) return {row, start, {index_ + place_[n], 0}, place_[n + 1] - place_[n]};
        return {row, start, {nullptr, begin(n)}, end(n) - begin(n)};
    }

    // Zero in every padded step of an output; channels [first, first + n) of all groups as one.
    __attribute__((noinline)) void clear_padding(const phistate_series& s, int64_t groups, int64_t n) const {
        if (!index_ || !s.data) return;
        for (int64_t b = 0; b < layout_.batch; ++b)
            for (int64_t t = 0; t < layout_.time; ++t) {
                if (layout_.mask[b * layout_.mask_batch + t * layout_.mask_time]) continue;
                typed(s.dtype, s.data, [&](auto* p) {
                    for (int64_t g = 0; g < groups; ++g)
                        for (int64_t c = 0; c < n; ++c) put(p + b * s.batch + t * s.time + g * s.group + c * s.channel, 0.0f);
                });
            }
    }

private:
    int64_t begin(int64_t n) const { return layout_.cu_seqlens ? layout_.cu_seqlens[n] : 0; }
    int64_t end(int64_t n) const { return layout_.cu_seqlens ? layout_.cu_seqlens[n + 1] : layout_.time; }

    phistate_layout layout_ = {};
    int64_t* index_ = nullptr;
    int64_t* place_ = nullptr;
};

}  // namespace PHISTATE_NS
