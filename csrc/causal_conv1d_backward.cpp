// The short causal convolution, backward, in tiles [tokens][channels] whatever the order in memory.
//
//     e_t  = dy_t silu'(pre_t)            pre_t = Σ_w weight_w x_{t-W+1+w} + bias, computed anew
//     dx_t = Σ_w weight_w e_{t+W-1-w}     dweight_w = Σ_t e_t x_{t-W+1+w}     dbias = Σ_t e_t
#include "conv.h"
#include "parallel.h"

namespace PHISTATE_NS {
namespace {

constexpr int64_t kTokens = 64;    // of one tile
constexpr int64_t kChannels = 64;  // of one task: whole cache lines of a row

template <int W>
struct Task {
    const phistate_conv& call;
    const int64_t channel, n, ld;
    phistate::Scratch scratch;
    float *weight, *x, *e, *d_x, *d_weight;

    Task(const phistate_conv& given, int64_t first)
        : call(given), channel(first), n(least(kChannels, given.channels - first)), ld(round_up(n, L)) {
        weight = scratch.floats((W + 1) * ld);
        x = scratch.floats((kTokens + W - 1) * ld);
        e = scratch.floats((kTokens + 2 * (W - 1)) * ld);
        d_x = scratch.floats((kTokens + 2 * (W - 1)) * ld);
        d_weight = scratch.zeros((W + 1) * ld);
        read_weight(call, channel, n, weight, ld);
    }

    // e of `rows` tokens into to[rows][ld]; their window of x lies in x, their dy in `to`.
    void errors(int64_t rows, float* to) {
        for (int64_t c = 0; c < ld; c += L) {
            F taps[W], sums[W], total = zero();  // of this tile: a sum of sums rounds less than one long sum
            const F bias = load(weight + W * ld + c);
#pragma GCC unroll 8
            for (int w = 0; w < W; ++w) {
                taps[w] = load(weight + w * ld + c);
                sums[w] = zero();
            }
            for (int64_t t = 0; t < rows; ++t) {
                F d_y = load(to + t * ld + c);
                if (call.silu) {
                    F pre = bias;
#pragma GCC unroll 8
                    for (int w = 0; w < W; ++w) pre = fma(load(x + (t + w) * ld + c), taps[w], pre);
                    d_y = d_y * silu_slope(pre, sigmoid(pre));
                    store(to + t * ld + c, d_y);
                }
                total = total + d_y;
#pragma GCC unroll 8
                for (int w = 0; w < W; ++w) sums[w] = fma(d_y, load(x + (t + w) * ld + c), sums[w]);
            }
            store(d_weight + W * ld + c, load(d_weight + W * ld + c) + total);
#pragma GCC unroll 8
            for (int w = 0; w < W; ++w) store(d_weight + w * ld + c, load(d_weight + w * ld + c) + sums[w]);
        }
    }

    // dx of `rows` tokens whose errors, and those of the W − 1 tokens after them, stand from e on.
    void spread(int64_t rows) {
        for (int64_t c = 0; c < ld; c += L) {
            F taps[W];
#pragma GCC unroll 8
            for (int w = 0; w < W; ++w) taps[w] = load(weight + w * ld + c);
            for (int64_t t = 0; t < rows; ++t) {
                F sum = zero();
#pragma GCC unroll 8
                for (int w = 0; w < W; ++w) sum = fma(load(e + (t + W - 1 - w) * ld + c), taps[w], sum);
                store(d_x + t * ld + c, sum);
            }
        }
    }

    // Adds the gradient of the final state, which is tokens [count − (W − 1), count), to d_x, which starts at `token`.
    void add_final(const Sequences::One& one, int64_t token, int64_t rows, const float* final_state) {
        for (int64_t k = 0; k < W - 1; ++k) {
            const int64_t at = one.count - (W - 1) + k - token;
            if (at < 0 || at >= rows) continue;
            for (int64_t c = 0; c < ld; c += L) store(d_x + at * ld + c, load(d_x + at * ld + c) + load(final_state + k * ld + c));
        }
    }

    void run(const Sequences::One& one, int64_t sequence) {
        float final_state[(W - 1) * kChannels];
        const Steps state_rows = {nullptr, 0};
        if (call.d_s.data) read_tile(call.d_s, sequence, 0, channel, state_rows, W - 1, n, final_state, ld);
        for (int64_t i = 0; i < (W - 1) * ld; i += L) store(e + i, zero());
        // e holds tokens [done − (W − 1), done + rows): of the last round, then of this one. Before the first token it is 0.
        for (int64_t done = 0;; done += kTokens) {
            const int64_t rows = least(kTokens, one.count - done);
            const bool last = done + kTokens >= one.count;
            read_window(call, one, sequence, channel, n, done - (W - 1), rows + W - 1, x, ld);
            read_tile(call.d_y, one.row, 0, channel, one.steps.from(done), rows, n, e + (W - 1) * ld, ld);
            errors(rows, e + (W - 1) * ld);
            const int64_t token = done - (W - 1), ready = last ? rows + W - 1 : rows;
            if (last)
                for (int64_t i = 0; i < (W - 1) * ld; i += L) store(e + (rows + W - 1) * ld + i, zero());
            spread(ready);
            if (call.d_s.data) add_final(one, token, ready, final_state);
            const int64_t past = least(most<int64_t>(-token, 0), ready);
            if (past > 0 && call.d_s0.data)  // past is W − 1: the first round holds all of it
                write_tile(d_x, ld, call.d_s0, sequence, 0, channel, state_rows, past, n);
            if (ready > past)
                write_tile(d_x + past * ld, ld, call.d_x, one.row, 0, channel, one.steps.from(token + past), ready - past, n);
            if (last) break;
            for (int64_t i = 0; i < (W - 1) * ld; i += L) store(e + i, load(e + rows * ld + i));
        }
    }

    void finish() {
        write_rows(d_weight, ld, call.d_weight + channel * W, 1, W, Steps{nullptr, 0}, W, n);
        for (int64_t c = 0; call.d_bias && c < n; ++c) call.d_bias[channel + c] = d_weight[W * ld + c];
    }
};

}  // namespace

int causal_conv1d_backward(const phistate_conv& call) {
    if (const char* reason = reason_against(call)) return phistate::fail(reason);
    phistate::Scratch scratch;
    Sequences sequences;
    if (!sequences.init(call.layout, scratch)) return -1;
    expect_writes(call.d_x, call.layout.batch, call.layout.time, call.channels);
    // Sequences follow one another within a task: what a channel sums over all of them then needs no second pass.
    parallel((call.channels + kChannels - 1) / kChannels, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i)
            with_width(call.width, [&](auto width) {
                Task<decltype(width)::count> task(call, i * kChannels);
                for (int64_t n = 0; n < call.layout.sequences; ++n) task.run(sequences.at(n), n);
                task.finish();
            });
    });
    sequences.clear_padding(call.d_x, 1, call.channels);
    return 0;
}

}  // namespace PHISTATE_NS
