// One token of a selective scan, the state updated where it stands.
//
// The state's rows [channels][states] are dense along n, and one token reads each once: here a vector holds L entries
// of one channel, and the sums over n of L channels are taken together at the end.
#include "functions.h"
#include "parallel.h"
#include "series.h"

namespace PHISTATE_NS {
namespace {

template <class S>
F advance(S* h, const float* a, bool one_rate, float delta, float u, const float* b, const float* c, int64_t states) {
    F sum = zero();
    const F step = splat(delta * kLog2E), write = splat(u);
    const F decay = one_rate ? exp2(step * splat(a[0])) : zero();
    int64_t n = 0;
    for (; n + L <= states; n += L) {
        const F keep = one_rate ? decay : exp2(step * load(a + n));
        const F state = fma(keep, load(h + n), write * load(b + n));
        store(h + n, state);
        sum = fma(state, load(c + n), sum);
    }
    if (n < states) {
        const int tail = static_cast<int>(states - n);
        const F keep = one_rate ? decay : exp2(step * load(a + n, tail));
        const F state = fma(keep, load(h + n, tail), write * load(b + n));
        store(h + n, state, tail);
        sum = fma(state, load(c + n), sum);
    }
    return sum;
}

struct Task {
    const phistate_selective_step& call;
    phistate::Scratch scratch;
    const Steps now = {nullptr, 0};
    float *b, *c, *a;
    float x[L], delta[L], u[L], y[L];

    explicit Task(const phistate_selective_step& given) : call(given) {
        const int64_t padded = round_up(call.states, L);
        b = scratch.floats(padded);
        c = scratch.floats(padded);
        a = scratch.floats(padded);
    }

    // Channels [first, first + lanes), all of one group, of one row of the batch.
    void run(int64_t row, int64_t first, int lanes) {
        read_tile(call.x, row, 0, first, now, 1, lanes, x, L);
        float bias[L] = {};
        for (int i = 0; i < lanes; ++i) {
            const int64_t shared = (first + i) / call.repeat;
            typed(call.delta.dtype, call.delta.data, [&](auto* p) { delta[i] = get(p[row * call.delta.batch + shared * call.delta.channel]); });
            if (call.bias) bias[i] = call.bias[shared];
        }
        for (int i = lanes; i < L; ++i) delta[i] = 0.0f;
        F step = load(static_cast<const float*>(delta)) + load(static_cast<const float*>(bias));
        if (call.softplus) step = softplus(step);
        step = clamp(step, static_cast<float>(call.low), static_cast<float>(call.high));
        store(delta, step);
        store(u, step * load(static_cast<const float*>(x)));

        F sums[L];
        for (int i = 0; i < L; ++i) sums[i] = zero();
        for (int i = 0; i < lanes; ++i) {
            const float* rates = call.a + (first + i) / call.repeat * call.a_channel;
            if (call.a_state > 1) {
                for (int64_t n = 0; n < call.states; ++n) a[n] = rates[n * call.a_state];
                rates = a;
            }
            typed(call.h.dtype, call.h.data, [&](auto* p) {
                sums[i] = advance(p + row * call.h.batch + (first + i) * call.h.group, rates, call.a_state == 0, delta[i], u[i], b, c, call.states);
            });
        }
        transpose(sums);
        F out = sums[0];
        for (int j = 1; j < L; ++j) out = out + sums[j];
        if (call.d) out = fma(load(call.d + first, lanes), load(static_cast<const float*>(x)), out);
        if (call.z.data) {
            read_tile(call.z, row, 0, first, now, 1, lanes, y, L);
            out = out * silu(load(static_cast<const float*>(y)));
        }
        store(y, out);
        write_tile(y, L, call.y, row, 0, first, now, 1, lanes);
    }
};

}  // namespace

int selective_scan_step(const phistate_selective_step& call) {
    if (call.groups < 1 || call.channels % call.groups || call.repeat < 1 || call.channels % call.repeat || call.states < 1)
        return phistate::fail("selective_scan_step: channels is no multiple of groups or of repeat, or there is no state");
    const int64_t per_group = call.channels / call.groups, units = vectors(per_group);
    const int64_t grain = most<int64_t>(1, 32768 / (call.states * L));
    parallel(call.batch * call.groups * units, grain, [&](int64_t begin, int64_t end) {
        Task task(call);
        int64_t held = -1;
        for (int64_t i = begin; i < end; ++i) {
            const int64_t unit = i % units, group = i / units % call.groups, row = i / units / call.groups;
            if (i / units != held) {
                read_tile(call.b, row, group, 0, task.now, 1, call.states, task.b, L);
                read_tile(call.c, row, group, 0, task.now, 1, call.states, task.c, L);
                held = i / units;
            }
            task.run(row, group * per_group + unit * L, static_cast<int>(least<int64_t>(L, per_group - unit * L)));
        }
    });
    return 0;
}

}  // namespace PHISTATE_NS
