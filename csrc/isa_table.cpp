// Compiled once per instruction set, as every kernel is: gathers the set's kernels.
#include "isa.h"
#include "kernels.h"

namespace PHISTATE_NS {

void probe_exp(int64_t n, const float* x, float* y);
int probe_product(int64_t m, int64_t n, int64_t k, const float* a, const float* b, float* c, bool pairs);
double probe_peak(bool pairs);
#define X(name, call) int name(const call&);
PHISTATE_KERNELS(X)
#undef X

extern const phistate::Kernels kernels;
const phistate::Kernels kernels = {
    PHISTATE_ISA_NAME,
    probe_exp,
    probe_product,
    probe_peak,
#define X(name, call) name,
    PHISTATE_KERNELS(X)
#undef X
};

}  // namespace PHISTATE_NS
