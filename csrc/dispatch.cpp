// Chooses one instruction set for the process and forwards the ABI to its table.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "runtime.h"

#define PHISTATE_DECLARE(ns) \
    namespace ns {           \
    extern const phistate::Kernels kernels; \
    }
PHISTATE_DECLARE(phistate_portable)
#if defined(PHISTATE_HAS_X86)
PHISTATE_DECLARE(phistate_x86_v3)
PHISTATE_DECLARE(phistate_x86_v4)
PHISTATE_DECLARE(phistate_x86_v4_bf16)
#endif
#if defined(PHISTATE_HAS_ARMV8)
PHISTATE_DECLARE(phistate_armv8)
#endif

namespace phistate {
namespace {

bool always() { return true; }
#if defined(PHISTATE_HAS_X86)
// __builtin_cpu_supports also asks XGETBV whether the system saves the registers.
bool has_v3() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
           __builtin_cpu_supports("f16c");
}
bool has_v4() {
    return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd");
}
bool has_v4_bf16() { return has_v4() && __builtin_cpu_supports("avx512bf16"); }
#endif

struct Set {
    const Kernels* kernels;
    bool (*available)();
};

// Best first.
const Set sets[] = {
#if defined(PHISTATE_HAS_X86)
    {&phistate_x86_v4_bf16::kernels, has_v4_bf16},
    {&phistate_x86_v4::kernels, has_v4},
    {&phistate_x86_v3::kernels, has_v3},
#endif
#if defined(PHISTATE_HAS_ARMV8)
    {&phistate_armv8::kernels, always},
#endif
    {&phistate_portable::kernels, always},
};

const Kernels* chosen = nullptr;

int choose(const char* name) {
    for (const Set& set : sets) {
        if (name && *name && strcmp(name, set.kernels->name) != 0) continue;
        if (set.available()) {
            chosen = set.kernels;
            return 0;
        }
        if (name && *name) {
            char text[256];
            snprintf(text, sizeof text, "PHISTATE_ISA: got %.40s, which this machine lacks; takes one of: %.120s", name,
                     phistate_isas(1));
            return fail(text);
        }
    }
    char text[256];
    snprintf(text, sizeof text, "PHISTATE_ISA: got %.40s; takes one of: %.120s", name, phistate_isas(1));
    return fail(text);
}

const Kernels* kernels() {
    if (!chosen) choose(getenv("PHISTATE_ISA"));
    return chosen;
}

}  // namespace
}  // namespace phistate

using phistate::kernels;

int64_t phistate_abi(void) { return PHISTATE_ABI; }

const char* phistate_isa(void) { return kernels() ? kernels()->name : nullptr; }

const char* phistate_isas(int64_t available_only) {
    static thread_local char text[128];
    text[0] = 0;
    for (const auto& set : phistate::sets) {
        if (available_only && !set.available()) continue;
        if (text[0]) strcat(text, " ");
        strcat(text, set.kernels->name);
    }
    return text;
}

int phistate_force_isa(const char* name) { return phistate::choose(name); }

int phistate_probe_exp(int64_t n, const float* x, float* y) {
    if (!kernels()) return -1;
    kernels()->probe_exp(n, x, y);
    return 0;
}

int phistate_probe_product(int64_t m, int64_t n, int64_t k, const float* a, const float* b, float* c, int64_t pairs) {
    return kernels() ? kernels()->probe_product(m, n, k, a, b, c, pairs != 0) : -1;
}

double phistate_probe_peak(int64_t pairs) { return kernels() ? kernels()->probe_peak(pairs != 0) : 0.0; }

#define X(name, call)                                                                      \
    extern "C" PHISTATE_API int phistate_##name(const call* request) {                     \
        if (!kernels()) return -1;                                                         \
        if (request->bytes != static_cast<int64_t>(sizeof(call)))                          \
            return phistate::fail(#name ": the caller's structure is of another version"); \
        return kernels()->name(*request);                                                  \
    }
PHISTATE_KERNELS(X)
#undef X
