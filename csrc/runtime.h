// What every instruction set shares: threads, scratch memory, errors. Compiled once, with baseline flags.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "phistate.h"

namespace phistate {

using Body = void (*)(int64_t begin, int64_t end, void* context);

// Splits [0, count) over torch's threads, at least `grain` a thread.
void parallel_for(int64_t count, int64_t grain, Body body, void* context);
int64_t num_threads();

// Asks for huge pages under a large buffer about to be written for the first time: a fresh page of 4 KiB costs a
// fault and, rows of one head lying pages apart, a miss of the TLB a row. A hint; does nothing where there is none.
void expect_writes(void* data, int64_t bytes);

inline constexpr char kOffsets[] = "cu_seqlens: takes offsets from 0 to T that never decrease, batch 1";

// Remembers the text for phistate_last_error; returns -1.
int fail(const char* text);

// Scratch of the calling thread: grows, is kept between calls, 64-byte aligned. A Scratch gives its
// memory back when it goes out of scope, so they nest.
class Scratch {
public:
    Scratch();
    ~Scratch();
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;

    // Uninitialised. Never moves once given out.
    void* bytes(size_t count);
    float* floats(size_t count) { return static_cast<float*>(bytes(count * sizeof(float))); }
    float* zeros(size_t count);

private:
    size_t block_, used_;
};

}  // namespace phistate
