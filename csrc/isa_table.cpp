// Compiled once per instruction set, as every kernel is: gathers the set's kernels.
#include "isa.h"
#include "kernels.h"

// Products of bfloat16 pairs are of no use to kernels without matrix products: that set takes them from x86-64-v4.
#if defined(PHISTATE_ISA_X86_V4_BF16)
#define PHISTATE_VECTOR_NS phistate_x86_v4
#else
#define PHISTATE_VECTOR_NS PHISTATE_NS
#endif

namespace PHISTATE_VECTOR_NS {
#define X(name, call) int name(const call&);
PHISTATE_VECTOR_KERNELS(X)
#undef X
}  // namespace PHISTATE_VECTOR_NS

namespace PHISTATE_NS {

void probe_exp(int64_t n, const float* x, float* y);
int probe_product(int64_t m, int64_t n, int64_t k, const float* a, const float* b, float* c, bool pairs);
double probe_peak(bool pairs);
#define X(name, call) int name(const call&);
PHISTATE_MATRIX_KERNELS(X)
#undef X

extern const phistate::Kernels kernels;
const phistate::Kernels kernels = {
    PHISTATE_ISA_NAME,
    probe_exp,
    probe_product,
    probe_peak,
#define X(name, call) name,
    PHISTATE_MATRIX_KERNELS(X)
#undef X
#define X(name, call) PHISTATE_VECTOR_NS::name,
    PHISTATE_VECTOR_KERNELS(X)
#undef X
};

}  // namespace PHISTATE_NS
