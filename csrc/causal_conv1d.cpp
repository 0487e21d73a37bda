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

// R neighbouring tokens, one vector of channels, out of the W − 1 + R rows they see.
template <int W, int R, class T>
PHISTATE_INLINE void rows_at(const T* const* in, T* const* out, int64_t c, const float* weight, ptrdiff_t ld, bool silus) {
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

// The same for fewer channels than a vector holds.
template <class T>
__attribute__((noinline)) void few_channels(const T* const* in, T* const* out, int width, int together, int n, const float* weight, ptrdiff_t ld,
                                            bool silus) {
    for (int r = 0; r < together; ++r) {
        F sum = load(weight + width * ld);
        for (int w = 0; w < width; ++w) sum = fma(load(in[r + w], n), load(weight + w * ld), sum);
        store(out[r], silus ? silu(sum) : sum, n);
    }
}

template <int W, int R, class T>
__attribute__((noinline)) void rows_through(const T* const* in, T* const* out, int64_t n, const float* weight, ptrdiff_t ld, bool silus) {
    if (n < L) return few_channels(in, out, W, R, static_cast<int>(n), weight, ld, silus);
    for (int64_t c = 0; c + L <= n; c += L) rows_at<W, R>(in, out, c, weight, ld, silus);
    if (n % L) rows_at<W, R>(in, out, n - L, weight, ld, silus);  // the last channels again, together with what remains
}

template <int W, class T>
void by_rows(const phistate_conv& call, const Sequences::One& one, int64_t sequence, int64_t channel, int64_t n, int64_t begin, int64_t end,
             T* x, T* y) {
    phistate::Scratch scratch;
    const ptrdiff_t ld = round_up(n, 16);
    float* weight = scratch.floats((W + 1) * ld);
    float* past = scratch.floats((W - 1) * ld);
    T* before = static_cast<T*>(scratch.bytes(sizeof(T) * (W - 1) * ld));
    read_weight(call, channel, n, weight, ld);
    if (begin < W - 1) {
        read_past(call, sequence, channel, n, past, ld);
        write_rows(past, ld, before, ld, 1, Steps{nullptr, 0}, W - 1, n);
    }
    x += one.row * call.x.batch + channel;
    y += one.row * call.y.batch + channel;
    constexpr int kTogether = W <= 4 ? 4 : 2;
    for (int64_t i = begin; i < end;) {
        const bool many = i + kTogether <= end;
        const int together = many ? kTogether : 1;
        const T* in[W - 1 + kTogether];
        T* out[kTogether];
        for (int k = 0; k < W - 1 + together; ++k) {
            const int64_t token = i + k - (W - 1);
            in[k] = token < 0 ? before + (W - 1 + token) * ld : x + one.steps.at(token) * call.x.time;
        }
        for (int k = 0; k < together; ++k) out[k] = y + one.steps.at(i + k) * call.y.time;
        if (many)
            rows_through<W, kTogether>(in, out, n, weight, ld, call.silu);
        else
            rows_through<W, 1>(in, out, n, weight, ld, call.silu);
        i += together;
    }
}

// One channel's tokens [begin, end), along time.
template <int W, class T>
void by_columns(const phistate_conv& call, const Sequences::One& one, int64_t sequence, int64_t channel, int64_t begin, int64_t end, T* x,
                T* y, float* buffer, float* result) {
    x += one.row * call.x.batch + channel * call.x.channel;
    y += one.row * call.y.batch + channel * call.y.channel;
    const int64_t count = end - begin;
    const Steps steps = one.steps.from(begin).plain(count);
    const bool dense = !steps.index && call.x.time == 1;
    const float* in = buffer;
    if (sizeof(T) == sizeof(float) && dense && !one.steps.index && begin >= W - 1) {
        in = reinterpret_cast<const float*>(x) + steps.first - (W - 1);
    } else {
        for (int64_t k = 0; k < W - 1; ++k) {
            const int64_t token = begin + k - (W - 1);
            if (token >= 0) {
                buffer[k] = get(x[one.steps.at(token) * call.x.time]);
            } else {
                buffer[k] = 0.0f;
                if (call.s0.data)
                    typed(call.s0.dtype, call.s0.data, [&](auto* p) {
                        buffer[k] = get(p[sequence * call.s0.batch + channel * call.s0.channel + (W - 1 + token) * call.s0.time]);
                    });
            }
        }
        float* to = buffer + W - 1;
        if (dense) {
            int64_t t = 0;
            for (; t + L <= count; t += L) store(to + t, load(x + steps.first + t));
            if (t < count) store(to + t, load(x + steps.first + t, static_cast<int>(count - t)), static_cast<int>(count - t));
        } else {
            for (int64_t t = 0; t < count; ++t) to[t] = get(x[steps.at(t) * call.x.time]);
        }
    }
    F weight[W];
    for (int w = 0; w < W; ++w) weight[w] = splat(call.weight[channel * W + w]);
    const F bias = splat(call.bias ? call.bias[channel] : 0.0f);
    const bool silus = call.silu;
    const bool straight = !steps.index && call.y.time == 1;
    for (int64_t t = 0; t < count; t += L) {
        const int lanes = static_cast<int>(least<int64_t>(L, count - t));
        F sum = bias;
        if (lanes == L) {
#pragma GCC unroll 8
            for (int w = 0; w < W; ++w) sum = fma(load(in + t + w), weight[w], sum);
        } else {
            for (int w = 0; w < W; ++w) sum = fma(load(in + t + w, lanes), weight[w], sum);
        }
        if (silus) sum = silu(sum);
        if (straight && lanes == L)
            store(y + steps.first + t, sum);
        else if (straight)
            store(y + steps.first + t, sum, lanes);
        else
            store(result + t, sum);
    }
    if (!straight)
        for (int64_t t = 0; t < count; ++t) put(y + steps.at(t) * call.y.time, result[t]);
}

template <int W>
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
                        by_rows<W>(call, one, sequence, channel, n, begin, end, x, y);
                    else
                        for (int64_t c = channel; c < channel + n; ++c) by_columns<W>(call, one, sequence, c, begin, end, x, y, buffer, result);
                });
            if (piece == 0) {
                const ptrdiff_t ld = round_up(n, L);
                read_window(call, one, sequence, channel, n, one.count - (W - 1), W - 1, window, ld);
                write_tile(window, ld, call.s, sequence, 0, channel, Steps{nullptr, 0}, W - 1, n);
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
    with_width(call.width, [&](auto width) { run<decltype(width)::count>(call, sequences); });
    return 0;
}

}  // namespace PHISTATE_NS
