// The instruction set this translation unit is compiled for; CMake defines PHISTATE_ISA_<set>.
//
// Kernel sources are compiled once per set into namespaces of their own. Nothing in them may have external
// linkage outside that namespace: an inline function or a template instance of the standard library would be
// merged by the linker across sets, and a machine without AVX-512 could run the AVX-512 copy.
#pragma once

#if defined(PHISTATE_ISA_X86_V4_BF16)
#define PHISTATE_NS phistate_x86_v4_bf16
#define PHISTATE_ISA_NAME "x86-64-v4-bf16"
#define PHISTATE_AVX512 1
#define PHISTATE_PAIRS 1
#elif defined(PHISTATE_ISA_X86_V4)
#define PHISTATE_NS phistate_x86_v4
#define PHISTATE_ISA_NAME "x86-64-v4"
#define PHISTATE_AVX512 1
#elif defined(PHISTATE_ISA_X86_V3)
#define PHISTATE_NS phistate_x86_v3
#define PHISTATE_ISA_NAME "x86-64-v3"
#define PHISTATE_AVX2 1
#elif defined(PHISTATE_ISA_ARMV8)
#define PHISTATE_NS phistate_armv8
#define PHISTATE_ISA_NAME "armv8"
#define PHISTATE_NEON 1
#else
#define PHISTATE_NS phistate_portable
#define PHISTATE_ISA_NAME "portable"
#endif
