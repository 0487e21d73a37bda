// The short causal convolution, forward.
//
// Where channels are dense a vector holds channels and four tokens share the rows they see; where time is dense a
// vector holds consecutive tokens of one channel. Neither order is ever turned into the other.
#include "conv.h"
#include "parallel.h"

namespace PHISTATE_NS {
namespace {

constexpr int64_t kRowTokens = 128, kRowChannels = 64 * 16;  // one task: 4 KiB of a row, so four rows fill a third of the L1 cache
constexpr int64_t kColumnTokens = 1024, kColumnChannels = 32;

// R neighbouring tokens out of the W − 1 + R rows they see, n ≥ L channels.
template <int W, int R, class T>
__attribute__((noinline)) void rows_through(const T* const* in, T* const* out, int64_t n, const float* weight, ptrdiff_t ld, bool silus) {
    for (int64_t begin = 0; begin < n; begin += L) {
        const int64_t c = least(begin, n - L);  // the last channels, some of them again, fill a vector too
        F x[W - 1 + R];
#pragma GCC unroll 16
        for (int i = 0; i < W - 1 + R; ++i) x[i] = load(in[i] + c);
        const F bias = load(weight + W * ld + c);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            F sum = bias;
#pragma GCC unroll 8
            for (int w = 0; w < W; ++w) sum = fma(x[r + w], load(weight + w * ld + c), sum);
            store(out[r] + c, silus ? silu(sum) : sum);
        }
    }
}

// One token of fewer channels than a vector holds.
template <class T>
__attribute__((noinline)) void few_channels(const T* const* in, T* out, int64_t width, int n, const float* weight, ptrdiff_t ld, bool silus) {
    F sum = load(weight + width * ld);
    for (int64_t w = 0; w < width; ++w) sum = fma(load(in[w], n), load(weight + w * ld), sum);
    store(out, silus ? silu(sum) : sum, n);
}

constexpr int kMostTogether = 4;
// Wider filters see more rows than registers hold.
constexpr int together(int64_t width) { return width <= 4 ? kMostTogether : 2; }

template <class T>
void by_rows(const phistate_conv& call, const Sequences::One& one, int64_t sequence, int64_t channel, int64_t n, int64_t begin, int64_t end,
             T* x, T* y) {
    phistate::Scratch scratch;
    const int64_t width = call.width, past_rows = width - 1;
    const ptrdiff_t ld = round_up(n, 16);
    float* weight = scratch.floats((width + 1) * ld);
    float* past = scratch.floats(past_rows * ld);
    T* before = static_cast<T*>(scratch.bytes(sizeof(T) * past_rows * ld));
    read_weight(call, channel, n, weight, ld);
    if (begin < past_rows) {
        read_past(call, sequence, channel, n, past, ld);
        write_rows(past, ld, before, ld, 1, Steps{nullptr, 0}, past_rows, n);
    }
    x += one.row * call.x.batch + channel;
    y += one.row * call.y.batch + channel;
    void (*several)(const T* const*, T* const*, int64_t, const float*, ptrdiff_t, bool) = nullptr;
    auto single = several;
    with_width(width, [&](auto w) {
        constexpr int W = decltype(w)::count;
        several = rows_through<W, together(W), T>;
        single = rows_through<W, 1, T>;
    });
    const int64_t many = together(width);
    for (int64_t i = begin; i < end;) {
        const int64_t count = n >= L && i + many <= end ? many : 1;
        const T* in[kMaxWidth - 1 + kMostTogether];
        T* out[kMostTogether];
        for (int64_t k = 0; k < past_rows + count; ++k) {
            const int64_t token = i + k - past_rows;
            in[k] = token < 0 ? before + (past_rows + token) * ld : x + one.steps.at(token) * call.x.time;
        }
        for (int64_t k = 0; k < count; ++k) out[k] = y + one.steps.at(i + k) * call.y.time;
        if (n < L)
            few_channels(in, out[0], width, static_cast<int>(n), weight, ld, call.silu);
        else
            (count > 1 ? several : single)(in, out, n, weight, ld, call.silu);
        i += count;
    }
}

// to[t] = what the filter makes of in[t .. t + W − 1].
template <int W, class T>
__attribute__((noinline)) void along(const float* in, int64_t count, const float* taps, float bias, bool silus, T* to) {
    F weight[W];
#pragma GCC unroll 8
    for (int w = 0; w < W; ++w) weight[w] = splat(taps[w]);
    for (int64_t t = 0; t < count; t += L) {
        const int lanes = static_cast<int>(least<int64_t>(L, count - t));
        F sum = splat(bias);
        if (lanes == L) {
#pragma GCC unroll 8
            for (int w = 0; w < W; ++w) sum = fma(load(in + t + w), weight[w], sum);
        } else {
#pragma GCC unroll 8
            for (int w = 0; w < W; ++w) sum = fma(load(in + t + w, lanes), weight[w], sum);
        }
        if (silus) sum = silu(sum);
        if (lanes == L)
            store(to + t, sum);
        else
            store(to + t, sum, lanes);
    }
}

// One channel's tokens [begin, end), along time.
template <class T>
void by_columns(const phistate_conv& call, const Sequences::One& one, int64_t sequence, int64_t channel, int64_t begin, int64_t end, T* x,
                T* y, float* buffer, float* result) {
    const int64_t past_rows = call.width - 1, count = end - begin;
    x += one.row * call.x.batch + channel * call.x.channel;
    y += one.row * call.y.batch + channel * call.y.channel;
    const Steps steps = one.steps.from(begin).plain(count);
    const bool dense = !steps.index && call.x.time == 1;
    const float* in = buffer;
    if (sizeof(T) == sizeof(float) && dense && !one.steps.index && begin >= past_rows) {
        in = reinterpret_cast<const float*>(x) + steps.first - past_rows;
    } else {
        for (int64_t k = 0; k < past_rows; ++k) {
            const int64_t token = begin + k - past_rows;
            if (token >= 0) {
                buffer[k] = get(x[one.steps.at(token) * call.x.time]);
            } else {
                buffer[k] = 0.0f;
                if (call.s0.data)
                    typed(call.s0.dtype, call.s0.data, [&](auto* p) {
                        buffer[k] = get(p[sequence * call.s0.batch + channel * call.s0.channel + (past_rows + token) * call.s0.time]);
                    });
            }
        }
        float* to = buffer + past_rows;
        if (dense) {
            int64_t t = 0;
            for (; t + L <= count; t += L) store(to + t, load(x + steps.first + t));
            if (t < count) store(to + t, load(x + steps.first + t, static_cast<int>(count - t)), static_cast<int>(count - t));
        } else {
            for (int64_t t = 0; t < count; ++t) to[t] = get(x[steps.at(t) * call.x.time]);
        }
    }
    const float* taps = call.weight + channel * call.width;
    const float bias = call.bias ? call.bias[channel] : 0.0f;
    const bool straight = !steps.index && call.y.time == 1;
    with_width(call.width, [&](auto w) {
        if (straight)
            along<decltype(w)::count>(in, count, taps, bias, call.silu, y + steps.first);
        else
            along<decltype(w)::count>(in, count, taps, bias, call.silu, result);
    });
    if (!straight)
        for (int64_t t = 0; t < count; ++t) put(y + steps.at(t) * call.y.time, result[t]);
}

void run(const phistate_conv& call, const Sequences& sequences) {
    const bool rows = call.x.channel == 1 && call.y.channel == 1;
    const int64_t channels = rows ? kRowChannels : kColumnChannels, tokens = rows ? kRowTokens : kColumnTokens;
    const int64_t across = (call.channels + channels - 1) / channels;
    const int64_t along = most<int64_t>(1, (call.layout.time + tokens - 1) / tokens);
    const int64_t all = call.layout.sequences * along * across;
    const int64_t work = call.channels * (call.layout.batch * call.layout.time + call.layout.sequences);
    const bool small = work < 32768;
    parallel(all, small ? all : 1, [&](int64_t first, int64_t last) {
        phistate::Scratch scratch;
        float* buffer = scratch.floats(kColumnTokens + kMaxWidth);
        float* result = scratch.floats(kColumnTokens + L);
        float* window = scratch.floats((kMaxWidth - 1) * round_up(channels, 16));
        for (int64_t i = first; i < last; ++i) {
            const int64_t channel = i % across * channels, piece = i / across % along, sequence = i / across / along;
            const int64_t n = least(channels, call.channels - channel);
            const Sequences::One one = sequences.at(sequence);
            const int64_t begin = piece * tokens, end = least(begin + tokens, one.count);
            if (begin < end)
                typed(call.x.dtype, call.x.data, [&](auto* x) {
                    auto* y = static_cast<decltype(x)>(call.y.data);
                    if (rows)
                        by_rows(call, one, sequence, channel, n, begin, end, x, y);
                    else
                        for (int64_t c = channel; c < channel + n; ++c) by_columns(call, one, sequence, c, begin, end, x, y, buffer, result);
                });
            if (piece == 0) {
                const ptrdiff_t ld = round_up(n, L);
                read_window(call, one, sequence, channel, n, one.count - (call.width - 1), call.width - 1, window, ld);
                write_tile(window, ld, call.s, sequence, 0, channel, Steps{nullptr, 0}, call.width - 1, n);
            }
        }
    });
    sequences.clear_padding(call.y, 1, call.channels);
}

}  // namespace

int causal_conv1d(const phistate_conv& call) {
    if (const char* reason = reason_against(call)) return phistate::fail(reason);
    phistate::Scratch scratch;
    Sequences sequences;
    if (!sequences.init(call.layout, scratch)) return -1;
    expect_writes(call.y, call.layout.batch, call.layout.time, call.channels);
    run(call, sequences);
    return 0;
}

}  // namespace PHISTATE_NS
