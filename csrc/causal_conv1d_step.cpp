// One token of the short causal convolution, the state updated where it stands: per channel `kept` inputs, oldest first.
#include "conv.h"
#include "parallel.h"

namespace PHISTATE_NS {
namespace {

template <class T>
void advance(T* s, int64_t kept, float x, const float* weight, int64_t width, float* sum) {
    const T* recent = s + kept - (width - 1);
    for (int64_t w = 0; w < width - 1; ++w) *sum += weight[w] * get(recent[w]);
    *sum += weight[width - 1] * x;
    for (int64_t k = 0; k + 1 < kept; ++k) s[k] = s[k + 1];
    put(s + kept - 1, x);
}

}  // namespace

int causal_conv1d_step(const phistate_conv_step& call) {
    if (call.width < 2 || call.width > kMaxWidth || call.kept < call.width - 1)
        return phistate::fail("causal_conv1d_step: takes a width of 2 to 8 and at least width - 1 inputs kept");
    const int64_t units = vectors(call.channels);
    parallel(call.batch * units, 32768 / (kMaxWidth * L), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t row = i / units, first = i % units * L;
            const int lanes = static_cast<int>(least<int64_t>(L, call.channels - first));
            float x[L], y[L] = {};
            read_tile(call.x, row, 0, first, Steps{nullptr, 0}, 1, lanes, x, L);
            for (int c = 0; call.bias && c < lanes; ++c) y[c] = call.bias[first + c];
            typed(call.s.dtype, call.s.data, [&](auto* p) {
                auto* s = p + row * call.s.batch + first * call.s.channel;
                const float* weight = call.weight + first * call.width;
                // The usual shapes as constants, for the loops to unroll.
                if (call.width == 4 && call.kept == 3)
                    for (int c = 0; c < lanes; ++c) advance(s + c * call.s.channel, 3, x[c], weight + c * 4, 4, y + c);
                else if (call.width == 4 && call.kept == 4)
                    for (int c = 0; c < lanes; ++c) advance(s + c * call.s.channel, 4, x[c], weight + c * 4, 4, y + c);
                else
                    for (int c = 0; c < lanes; ++c)
                        advance(s + c * call.s.channel, call.kept, x[c], weight + c * call.width, call.width, y + c);
            });
            if (call.silu) store(y, silu(load(static_cast<const float*>(y))));
            write_tile(y, L, call.y, row, 0, first, Steps{nullptr, 0}, 1, lanes);
        }
    });
    return 0;
}

}  // namespace PHISTATE_NS
