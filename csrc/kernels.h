// The table of kernels one instruction set offers. To add a kernel: a structure in phistate.h, a line here, a
// source file that defines PHISTATE_NS::name, and that file in CMakeLists.txt; the ABI function phistate_name
// and the table entries follow from the line.
#pragma once

#include "phistate.h"

// name, structure: int phistate_<name>(const structure*)
#define PHISTATE_MATRIX_KERNELS(X)                  \
    X(additive_forward, phistate_linear_attention)  \
    X(additive_backward, phistate_linear_attention) \
    X(delta_forward, phistate_linear_attention)     \
    X(delta_backward, phistate_linear_attention)
#define PHISTATE_VECTOR_KERNELS(X)                     \
    X(selective_scan, phistate_selective)              \
    X(selective_scan_backward, phistate_selective)     \
    X(selective_scan_step, phistate_selective_step)    \
    X(causal_conv1d, phistate_conv)                    \
    X(causal_conv1d_backward, phistate_conv)           \
    X(causal_conv1d_step, phistate_conv_step)
#define PHISTATE_KERNELS(X) PHISTATE_MATRIX_KERNELS(X) PHISTATE_VECTOR_KERNELS(X)

namespace phistate {

struct Kernels {
    const char* name;
    void (*probe_exp)(int64_t n, const float* x, float* y);
    int (*probe_product)(int64_t m, int64_t n, int64_t k, const float* a, const float* b, float* c, bool pairs);
    double (*probe_peak)(bool pairs);
#define X(name, call) int (*name)(const call&);
    PHISTATE_KERNELS(X)
#undef X
};

}  // namespace phistate
