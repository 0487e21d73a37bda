/* The C ABI of phistate's native kernels. Knows no torch and no Python.
 *
 * Every structure is made of 8-byte fields only (pointers, int64_t, double), so that a caller without a C
 * compiler can lay it out by hand. Strides count elements. Every kernel returns 0, or a negative number after
 * which phistate_last_error() says what was wrong. */
#ifndef PHISTATE_H
#define PHISTATE_H

#include <stdint.h>

#if defined(_WIN32)
#define PHISTATE_API __declspec(dllexport)
#else
#define PHISTATE_API __attribute__((visibility("default")))
#endif

#define PHISTATE_ABI 6 /* raised whenever a structure or a function below changes */

#ifdef __cplusplus
extern "C" {
#endif

enum phistate_dtype { PHISTATE_F32 = 1, PHISTATE_BF16 = 2, PHISTATE_F16 = 3 };
/* Maps that act on each channel x by itself: elu(x) + 1, relu(x). */
enum phistate_map { PHISTATE_MAP_NONE = 0, PHISTATE_MAP_ELU = 1, PHISTATE_MAP_RELU = 2 };
enum phistate_decay { PHISTATE_DECAY_NONE = 0, PHISTATE_DECAY_HEAD = 1, PHISTATE_DECAY_SCALAR = 2, PHISTATE_DECAY_VECTOR = 3 };

/* One operand of shape [batch, time, head, features], its last dimension dense. data NULL: absent. */
typedef struct phistate_view {
    void* data;
    int64_t batch, time, head; /* strides */
    int64_t dtype;             /* enum phistate_dtype */
} phistate_view;

#define PHISTATE_SEGMENT 512 /* tokens between two checkpoints */

/* A call of linear attention, additive or by the delta rule, forward and backward. States are dense [N, heads_s, key_dim, value_dim] and
 * [N, heads_s, key_dim] in float32; N = sequences. heads_o = max(heads_q, heads_s). */
typedef struct phistate_linear_attention {
    int64_t bytes;                          /* sizeof(phistate_linear_attention), checked */
    int64_t batch, time;
    int64_t heads_q, heads_k, heads_v, heads_s;
    int64_t key_dim, value_dim;
    int64_t sequences;                      /* batch, or the number of packed sequences */
    const int64_t* cu_seqlens;              /* [sequences + 1], batch == 1; NULL: not packed */
    const uint8_t* mask;                    /* [batch, time], 0 = padding; NULL: no padding */
    int64_t mask_batch, mask_time;          /* its strides */
    int64_t decay_kind;                     /* enum phistate_decay */
    int64_t normalize, causal;
    double scale;
    phistate_view q, k, v, decay, beta;     /* decay: float32 or q's dtype, [heads_s] when per head */
    const float *s0, *z0;                   /* initial state; NULL: zero */
    phistate_view o;                        /* [batch, time, heads_o, value_dim] */
    float *s, *z;                           /* final state; z NULL unless normalize */
    /* Kept by forward for backward, or NULL: states every PHISTATE_SEGMENT tokens,
     * [batch, heads_s, time / PHISTATE_SEGMENT, key_dim * value_dim + (normalize ? key_dim : 0)], and the
     * denominators [batch, time, heads_o], dense. */
    float *checkpoints, *denominators;
    /* backward only */
    phistate_view d_o;
    const float *d_s, *d_z;                 /* gradients of the final state; NULL: zero */
    phistate_view d_q, d_k, d_v;            /* each written in full */
    phistate_view d_decay;                  /* as decay; per head: float32 [sequences, heads_s] */
    phistate_view d_beta;
    float *d_s0, *d_z0;                     /* NULL: not wanted */
    int64_t qk_l2norm;                      /* the delta kernels': q and k divided by sqrt(sum x^2 + 1e-6) first */
    /* additive_forward only, causal, without decay: q and k are logarithms of features, and the states sums divided
     * by exp(log_scale), the running maximum [sequences, heads_s, key_dim] of log k. */
    int64_t log_features;
    const float* log_scale0;                /* of the initial state; NULL: -inf */
    float* log_scale;                       /* of the final state */
    /* The additive kernels', without log_features: q and k are mapped on the way, features map(map_scale · x); d_q
     * and d_k are gradients of x. */
    int64_t map;                            /* enum phistate_map */
    double map_scale;
    phistate_view erase, d_erase;           /* the delta kernels': erase keys, laid out as k, never normalised; absent: k */
} phistate_linear_attention;

/* One operand of shape [batch, time, groups, channels], any strides; without groups, group is 0. */
typedef struct phistate_series {
    void* data;
    int64_t batch, time, group, channel; /* strides */
    int64_t dtype;                       /* enum phistate_dtype */
} phistate_series;

/* Which steps are tokens, and of which sequence. */
typedef struct phistate_layout {
    int64_t batch, time;
    int64_t sequences;             /* batch, or the number of packed sequences */
    const int64_t* cu_seqlens;     /* [sequences + 1], batch == 1; NULL: not packed */
    const uint8_t* mask;           /* [batch, time], 0 = padding; NULL: no padding */
    int64_t mask_batch, mask_time; /* its strides */
} phistate_layout;

/* Steps between two states kept for the backward pass. */
#define PHISTATE_SELECTIVE_SEGMENT 32

/* Mamba-1's scan, forward and backward. States are dense [sequences, channels, states] in float32. */
typedef struct phistate_selective {
    int64_t bytes; /* sizeof(phistate_selective), checked */
    phistate_layout layout;
    int64_t channels, groups, states; /* channels a multiple of groups */
    int64_t softplus;                 /* delta goes through softplus */
    phistate_series x, delta, z;      /* [batch, time, channels]; z may be absent */
    phistate_series b, c;             /* [batch, time, groups, states] */
    const float *a, *d, *bias;        /* [channels, states], [channels], [channels]; the last two may be NULL */
    const float* h0;                  /* initial state; NULL: zero */
    phistate_series y;
    float* h;                         /* final state */
    /* States before each segment, kept for backward, or NULL: (batch·time / SEGMENT + sequences) times
     * groups · (channels / groups rounded up to 16) · states. Their order is the instruction set's own. */
    float* checkpoints;
    /* backward only */
    phistate_series d_y;
    const float* d_h;                 /* gradient of the final state; NULL: zero */
    phistate_series d_x, d_delta, d_z;
    int64_t parts;                    /* the channels of a group are worked on in this many parts */
    float *d_b, *d_c;                 /* [parts, batch, time, groups, states]: one summand a part */
    float *d_a, *d_d, *d_bias, *d_h0; /* d_d, d_bias, d_h0 may be NULL */
} phistate_selective;

/* One token of a selective scan, its state updated in place: Mamba-1, or with one rate a head Mamba-2. */
typedef struct phistate_selective_step {
    int64_t bytes; /* sizeof(phistate_selective_step), checked */
    int64_t batch, channels, groups, states;
    int64_t repeat;              /* channels that share an entry of delta, a and bias */
    int64_t softplus;
    double low, high;            /* delta is clamped to these after softplus */
    phistate_series x, delta, z; /* [batch, ·, channels]; delta [batch, ·, channels / repeat] */
    phistate_series b, c;        /* [batch, ·, groups, states] */
    const float* a;              /* [channels / repeat, states] */
    int64_t a_channel, a_state;  /* its strides; a_state 0: one rate for all states */
    const float *d, *bias;       /* [channels], [channels / repeat], or NULL */
    phistate_series h;           /* [batch, ·, channels as groups, states], states dense */
    phistate_series y;
} phistate_selective_step;

/* The short causal convolution, forward and backward. States are [sequences, channels, width − 1]. */
typedef struct phistate_conv {
    int64_t bytes; /* sizeof(phistate_conv), checked */
    phistate_layout layout;
    int64_t channels, width; /* width 2 to 8 */
    int64_t silu;
    phistate_series x, y;        /* [batch, time, channels], one dtype */
    const float *weight, *bias;  /* [channels, width], [channels]; bias may be NULL */
    phistate_series s0, s;       /* batch: sequences, channel: channels, time: width − 1, x's dtype; s0 may be absent */
    /* backward only */
    phistate_series d_y, d_s;    /* d_s may be absent */
    phistate_series d_x, d_s0;   /* d_s0 may be absent */
    float *d_weight, *d_bias;    /* d_bias may be NULL */
} phistate_conv;

/* One token of it, the state updated in place. */
typedef struct phistate_conv_step {
    int64_t bytes; /* sizeof(phistate_conv_step), checked */
    int64_t batch, channels, width, kept; /* kept ≥ width − 1 inputs stand in the state */
    int64_t silu;
    phistate_series x, y; /* [batch, ·, channels] */
    const float *weight, *bias;
    phistate_series s;    /* [batch, kept, channels], time dense */
} phistate_conv_step;

/* Library */
PHISTATE_API int64_t phistate_abi(void);
PHISTATE_API const char* phistate_last_error(void);                 /* of this thread */
/* torch's exported torch_parallel_for and torch_get_num_threads; NULLs: run in the calling thread. */
PHISTATE_API void phistate_set_parallel_for(void* parallel_for, void* get_num_threads);
PHISTATE_API const char* phistate_isa(void);                        /* the set in use; NULL after a bad PHISTATE_ISA */
PHISTATE_API const char* phistate_isas(int64_t available_only);     /* names, best first, separated by spaces */
PHISTATE_API int phistate_force_isa(const char* name);              /* NULL or "": choose again */

/* Not zero: scratch memory is NaN whenever a kernel gets it, so that what reads more than was written shows. Off at load. */
PHISTATE_API void phistate_poison_scratch(int64_t on);

/* Probes: what tests and the benchmark ask of the building blocks. */
/* n floats of scratch as a kernel would find them; leaves zeros there. */
PHISTATE_API void phistate_probe_scratch(int64_t n, float* y);
PHISTATE_API int phistate_probe_exp(int64_t n, const float* x, float* y);
/* c[m,n] = a[m,k]·b[k,n], dense, through the tile product; pairs != 0: operands rounded to bfloat16. */
PHISTATE_API int phistate_probe_product(int64_t m, int64_t n, int64_t k, const float* a, const float* b, float* c, int64_t pairs);
/* Multiply-adds a second of one thread, counted as two operations, from registers alone; 0 where there are no pairs. */
PHISTATE_API double phistate_probe_peak(int64_t pairs);

#ifdef __cplusplus
}
#endif
#endif
