// A program without Python or torch, to run the kernels where neither is: under qemu for another architecture.
// Each set's forward pass and step are compared with the recurrence written out. Prints what failed; exits 1.
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <initializer_list>

#include "../../csrc/phistate.h"

extern "C" int phistate_additive_forward(const phistate_additive*);

constexpr int T = 75, H = 2, K = 19, V = 21;
static float q[T * H * K], k[T * H * K], v[T * H * V], decay[T * H * K], o[T * H * V], s[H * K * V];

static double error(int kind) {
    static double state[K][V];
    double worst = 0;
    for (int h = 0; h < H; ++h) {
        memset(state, 0, sizeof state);
        for (int t = 0; t < T; ++t)
            for (int j = 0; j < V; ++j) {
                double read = 0;
                for (int i = 0; i < K; ++i) {
                    const int at = (t * H + h) * K + i;
                    const double a = kind == 0 ? 1.0 : exp(decay[kind == 2 ? t * H + h : at]);
                    state[i][j] = a * state[i][j] + double(k[at]) * v[(t * H + h) * V + j];
                    read += state[i][j] * q[at];
                }
                worst = fmax(worst, fabs(read - o[(t * H + h) * V + j]));
            }
    }
    return worst;
}

int main() {
    unsigned seed = 1;
    const auto uniform = [&] { return (seed = seed * 1664525u + 1013904223u) / 4294967296.0f - 0.5f; };
    for (float& x : q) x = uniform();
    for (float& x : k) x = uniform();
    for (float& x : v) x = uniform();
    for (float& x : decay) x = -4.0f * fabsf(uniform());
    int failures = 0;
    char sets[128];
    snprintf(sets, sizeof sets, "%s", phistate_isas(1));
    for (char* set = strtok(sets, " "); set; set = strtok(nullptr, " ")) {
        if (phistate_force_isa(set)) return printf("%s\n", phistate_last_error()), 1;
        for (int kind : {0, 2, 3}) {
            phistate_additive call = {};
            call.bytes = sizeof call;
            call.batch = call.sequences = 1;
            call.time = T;
            call.heads_q = call.heads_k = call.heads_v = call.heads_s = H;
            call.key_dim = K, call.value_dim = V;
            call.decay_kind = kind, call.causal = 1, call.scale = 1.0;
            call.q = {q, T * H * K, H * K, K, PHISTATE_F32};
            call.k = {k, T * H * K, H * K, K, PHISTATE_F32};
            call.v = {v, T * H * V, H * V, V, PHISTATE_F32};
            if (kind == 2) call.decay = {decay, T * H, H, 1, PHISTATE_F32};
            if (kind == 3) call.decay = {decay, T * H * K, H * K, K, PHISTATE_F32};
            call.o = {o, T * H * V, H * V, V, PHISTATE_F32};
            call.s = s;
            if (phistate_additive_forward(&call)) return printf("%s\n", phistate_last_error()), 1;
            const double worst = error(kind);
            const bool bad = !(worst < 1e-5);
            failures += bad;
            printf("%s decay %d: error %.2e%s\n", set, kind, worst, bad ? "  WRONG" : "");
        }
    }
    return failures != 0;
}
