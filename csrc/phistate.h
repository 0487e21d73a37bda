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

#define PHISTATE_ABI 1 /* raised whenever a structure or a function below changes */

#ifdef __cplusplus
extern "C" {
#endif

enum phistate_dtype { PHISTATE_F32 = 1, PHISTATE_BF16 = 2, PHISTATE_F16 = 3 };
enum phistate_decay { PHISTATE_DECAY_NONE = 0, PHISTATE_DECAY_HEAD = 1, PHISTATE_DECAY_SCALAR = 2, PHISTATE_DECAY_VECTOR = 3 };

/* One operand of shape [batch, time, head, features], its last dimension dense. data NULL: absent. */
typedef struct phistate_view {
    void* data;
    int64_t batch, time, head; /* strides */
    int64_t dtype;             /* enum phistate_dtype */
} phistate_view;

/* A call of the additive family, forward and backward. States are dense [N, heads_s, key_dim, value_dim] and
 * [N, heads_s, key_dim] in float32; N = sequences. heads_o = max(heads_q, heads_s). */
typedef struct phistate_additive {
    int64_t bytes;                          /* sizeof(phistate_additive), checked */
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
    float* checkpoints;                     /* states kept for backward, or NULL; phistate_additive_checkpoints */
    /* backward only */
    phistate_view d_o;
    const float *d_s, *d_z;                 /* gradients of the final state; NULL: zero */
    phistate_view d_q, d_k, d_v;            /* each written in full */
    phistate_view d_decay;                  /* as decay; per head: float32 [sequences, heads_s] */
    phistate_view d_beta;
    float *d_s0, *d_z0;                     /* NULL: not wanted */
    int64_t qk_l2norm;                      /* the delta kernels': q and k divided by sqrt(sum x^2 + 1e-6) first */
} phistate_additive;

/* Library */
PHISTATE_API int64_t phistate_abi(void);
PHISTATE_API const char* phistate_last_error(void);                 /* of this thread */
/* torch's exported torch_parallel_for and torch_get_num_threads; NULLs: run in the calling thread. */
PHISTATE_API void phistate_set_parallel_for(void* parallel_for, void* get_num_threads);
PHISTATE_API const char* phistate_isa(void);                        /* the set in use; NULL after a bad PHISTATE_ISA */
PHISTATE_API const char* phistate_isas(int64_t available_only);     /* names, best first, separated by spaces */
PHISTATE_API int phistate_force_isa(const char* name);              /* NULL or "": choose again */

/* Probes: what tests and the benchmark ask of the building blocks. */
PHISTATE_API int phistate_probe_exp(int64_t n, const float* x, float* y);
/* c[m,n] = a[m,k]·b[k,n], dense, through the tile product; pairs != 0: operands rounded to bfloat16. */
PHISTATE_API int phistate_probe_product(int64_t m, int64_t n, int64_t k, const float* a, const float* b, float* c, int64_t pairs);
/* Multiply-adds a second of one thread, counted as two operations, from registers alone; 0 where there are no pairs. */
PHISTATE_API double phistate_probe_peak(int64_t pairs);

#ifdef __cplusplus
}
#endif
#endif
