#include "runtime.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace phistate {
namespace {

using ParallelFor = int32_t (*)(int64_t, int64_t, int64_t, Body, void*);
using NumThreads = int32_t (*)(uint32_t*);

ParallelFor torch_parallel_for = nullptr;
NumThreads torch_get_num_threads = nullptr;

thread_local char error_text[512] = "";

// Blocks of doubling size: a later demand never moves what an earlier one got.
constexpr size_t kBlocks = 40, kFirst = size_t{1} << 18, kAlign = 64;
// Under AddressSanitizer a poisoned gap after each piece turns an overrun into a report.
#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kGap = 64;
#else
constexpr size_t kGap = 0;
#endif

struct Arena {
    char* block[kBlocks] = {};
    size_t size[kBlocks] = {};
    size_t current = 0, used = 0;

    ~Arena() {
        for (size_t i = 0; i < kBlocks; ++i) release(i);
    }
    void release(size_t i) {
#if defined(__SANITIZE_ADDRESS__)
        if (block[i]) ASAN_UNPOISON_MEMORY_REGION(block[i], size[i]);
#endif
        free(block[i]);
        block[i] = nullptr;
        size[i] = 0;
    }
};
thread_local Arena arena;

bool poisoned = false;

}  // namespace

void parallel_for(int64_t count, int64_t grain, Body body, void* context) {
    if (count <= 0) return;
    if (torch_parallel_for && count > grain)
        torch_parallel_for(0, count, grain, body, context);
    else
        body(0, count, context);
}

int64_t num_threads() {
    uint32_t threads = 1;
    if (torch_get_num_threads) torch_get_num_threads(&threads);
    return threads < 1 ? 1 : threads;
}

void expect_writes(void* data, int64_t bytes) {
#if defined(__linux__)
    constexpr uintptr_t kHuge = uintptr_t{2} << 20;
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHuge - 1) / kHuge * kHuge;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kHuge * kHuge;
    if (data && end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)data, (void)bytes;
#endif
}

int fail(const char* text) {
    snprintf(error_text, sizeof error_text, "%s", text);
    return -1;
}

Scratch::Scratch() : block_(arena.current), used_(arena.used) {}

Scratch::~Scratch() {
    arena.current = block_;
    arena.used = used_;
}

void* Scratch::bytes(size_t count) {
    count = (count + kAlign - 1) / kAlign * kAlign;
    while (true) {
        size_t i = arena.current;
        if (arena.size[i] < arena.used + count + kGap && arena.used == 0) {
            arena.release(i);
            size_t size = kFirst << (i < 24 ? i : 24);
            while (size < count + kGap) size *= 2;
            void* memory = nullptr;
            if (posix_memalign(&memory, kAlign, size) != 0) abort();
            arena.block[i] = static_cast<char*>(memory);
            arena.size[i] = size;
        }
        if (arena.size[i] >= arena.used + count + kGap) {
            char* piece = arena.block[i] + arena.used;
            arena.used += count + kGap;
#if defined(__SANITIZE_ADDRESS__)
            ASAN_UNPOISON_MEMORY_REGION(piece, count);
            ASAN_POISON_MEMORY_REGION(piece + count, kGap);
#endif
            if (poisoned) memset(piece, 0xff, count);  // a NaN in every type
            return piece;
        }
        arena.current = i + 1;
        arena.used = 0;
    }
}

float* Scratch::zeros(size_t count) {
    float* memory = floats(count);
    memset(memory, 0, count * sizeof(float));
    return memory;
}

}  // namespace phistate

const char* phistate_last_error(void) { return phistate::error_text; }

void phistate_poison_scratch(int64_t on) { phistate::poisoned = on != 0; }

void phistate_probe_scratch(int64_t n, float* y) {
    phistate::Scratch scratch;
    float* found = scratch.floats(n);
    memcpy(y, found, n * sizeof(float));
    memset(found, 0, n * sizeof(float));
}

void phistate_set_parallel_for(void* parallel_for, void* get_num_threads) {
    phistate::torch_parallel_for = reinterpret_cast<phistate::ParallelFor>(parallel_for);
    phistate::torch_get_num_threads = reinterpret_cast<phistate::NumThreads>(get_num_threads);
}
