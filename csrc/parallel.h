// parallel(count, grain, f): f(begin, end) over torch's threads, subnormals flushed.
#pragma once

#include "runtime.h"
#include "vec.h"

namespace PHISTATE_NS {

template <class Function>
void parallel(int64_t count, int64_t grain, const Function& function) {
    phistate::parallel_for(
        count, grain,
        [](int64_t begin, int64_t end, void* context) {
            const FlushSubnormals flush;
            (*static_cast<const Function*>(context))(begin, end);
        },
        const_cast<void*>(static_cast<const void*>(&function)));
}

}  // namespace PHISTATE_NS
