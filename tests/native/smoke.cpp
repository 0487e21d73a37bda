// A program without Python or torch, to run the kernels where neither is: under qemu for another architecture, or
// where leaks are looked for. Each set's forward passes are compared with the recurrence written out; o is linear in
// q and in v, so of a backward pass ⟨d_o, o⟩ = ⟨d_q, q⟩ = ⟨d_v, v⟩ must hold. Prints the errors; exits 1 on a wrong one.
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <initializer_list>

#include "../../csrc/phistate.h"

using Kernel = int(const phistate_linear_attention*);
extern "C" Kernel phistate_additive_forward, phistate_additive_backward, phistate_delta_forward, phistate_delta_backward;

constexpr int T = 75, H = 2, K = 19, V = 21;
static float q[T * H * K], k[T * H * K], v[T * H * V], decay[T * H * K], beta[T * H], o[T * H * V], s[H * K * V];
static float erase[T * H * K];
static float d_o[T * H * V], d_q[T * H * K], d_k[T * H * K], d_v[T * H * V], d_decay[T * H * K], d_beta[T * H], d_erase[T * H * K];

enum Write { ADD, DELTA, ERASE };

// The largest difference of o from S ← a S + β k (v − aSᵀe)ᵀ, o = Sᵀq; e: the key, the erase key, or none.
static double error(int64_t kind, Write by) {
    const float* e = by == ERASE ? erase : k;
    static double state[K][V];
    double worst = 0;
    for (int h = 0; h < H; ++h) {
        memset(state, 0, sizeof state);
        for (int t = 0; t < T; ++t)
            for (int j = 0; j < V; ++j) {
                const int row = t * H + h;
                double held = 0, read = 0;
                for (int i = 0; i < K; ++i) {
                    if (kind != PHISTATE_DECAY_NONE) state[i][j] *= exp(decay[kind == PHISTATE_DECAY_SCALAR ? row : row * K + i]);
                    held += state[i][j] * e[row * K + i];
                }
                const double write = beta[row] * (v[row * V + j] - (by == ADD ? 0.0 : held));
                for (int i = 0; i < K; ++i) {
                    state[i][j] += k[row * K + i] * write;
                    read += state[i][j] * q[row * K + i];
                }
                worst = fmax(worst, fabs(read - o[row * V + j]));
            }
    }
    return worst;
}

template <int N>
static double dot(const float (&a)[N], const float (&b)[N]) {
    double sum = 0;
    for (int i = 0; i < N; ++i) sum += double(a[i]) * b[i];
    return sum;
}

static phistate_view view(float* data, int64_t features) { return {data, T * H * features, H * features, features, PHISTATE_F32}; }

// Forward and backward with one set; what is wrong with them, 0 if nothing.
static int check(const char* set, int64_t kind, Write by) {
    const bool delta = by != ADD;
    const int64_t rates = kind == PHISTATE_DECAY_VECTOR ? K : 1;
    phistate_linear_attention call = {};
    call.bytes = sizeof call;
    call.batch = call.sequences = 1;
    call.time = T;
    call.heads_q = call.heads_k = call.heads_v = call.heads_s = H;
    call.key_dim = K, call.value_dim = V;
    call.decay_kind = kind, call.causal = 1, call.scale = 1.0;
    call.q = view(q, K), call.k = view(k, K), call.v = view(v, V), call.beta = view(beta, 1);
    if (kind != PHISTATE_DECAY_NONE) call.decay = view(decay, rates);
    call.o = view(o, V), call.s = s;
    call.d_o = view(d_o, V), call.d_q = view(d_q, K), call.d_k = view(d_k, K), call.d_v = view(d_v, V), call.d_beta = view(d_beta, 1);
    if (kind != PHISTATE_DECAY_NONE) call.d_decay = view(d_decay, rates);
    if (by == ERASE) call.erase = view(erase, K), call.d_erase = view(d_erase, K);
    if ((delta ? phistate_delta_forward : phistate_additive_forward)(&call) || (delta ? phistate_delta_backward : phistate_additive_backward)(&call)) {
        printf("%s\n", phistate_last_error());
        return 1;
    }
    const double forward = error(kind, by), of_q = fabs(dot(d_o, o) - dot(d_q, q)), of_v = fabs(dot(d_o, o) - dot(d_v, v));
    // Keys λ times as long write λ times as much, if what erases by them is as much shorter.
    const double of_k = by == DELTA ? 0.0 : fabs(dot(d_o, o) - dot(d_k, k) + (by == ERASE ? dot(d_erase, erase) : 0.0));
    const bool bad = !(forward < 1e-5 && of_q < 1e-4 && of_v < 1e-4 && of_k < 1e-4);
    printf("%-14s %s decay %d: forward %.1e, backward %.1e %.1e %.1e%s\n", set, by == ERASE ? "erase" : delta ? "delta" : "add  ", int(kind), forward, of_q,
           of_v, of_k, bad ? "  WRONG" : "");
    return bad;
}

int main() {
    unsigned seed = 1;
    const auto uniform = [&] { return (seed = seed * 1664525u + 1013904223u) / 4294967296.0f - 0.5f; };
    for (float& x : q) x = uniform();
    for (float& x : k) x = uniform();
    for (float& x : erase) x = uniform();
    for (float& x : v) x = uniform();
    for (float& x : d_o) x = uniform();
    for (float& x : decay) x = -4.0f * fabsf(uniform());
    for (float& x : beta) x = 0.5f + uniform();
    phistate_poison_scratch(1);
    int failures = 0;
    char sets[128];
    snprintf(sets, sizeof sets, "%s", phistate_isas(1));
    for (char* set = strtok(sets, " "); set; set = strtok(nullptr, " ")) {
        if (phistate_force_isa(set)) return printf("%s\n", phistate_last_error()), 1;
        for (int64_t kind : {PHISTATE_DECAY_NONE, PHISTATE_DECAY_SCALAR, PHISTATE_DECAY_VECTOR})
            for (Write by : {ADD, DELTA, ERASE}) failures += check(set, kind, by);
    }
    return failures != 0;
}
