"""What a kernel κ̂ does to softmax attention, exactly: the error algebra of one against the other.

With κ_j = exp(scale · q·k_j), p = κ / Σκ the exact row of attention, o = Σ_j p_j v_j its output,
ε_j = κ̂_j/κ_j − 1 the kernel's relative error on key j and δ = Σ_j p_j ε_j the denominator's:

    p̂_j − p_j = p_j (ε_j − δ) / (1 + δ)          ô − o = Σ_j p_j (ε_j − δ)(v_j − o) / (1 + δ)

So δ says how wrong the normaliser is and sd_p(ε) how wrong the output is: an error common to all keys
cancels. Everything is computed in float64 from log κ̂ − log κ, a block of queries at a time, so that neither
large logits nor long sequences are a limit.
"""

from phistate.diagnostics.comparison import Comparison, compare
from phistate.diagnostics.inputs import evenly_spaced
from phistate.diagnostics.kernels import LogKernel, uniform_kernel, window_kernel
from phistate.diagnostics.rank import effective_rank
from phistate.diagnostics.variance import predicted_variance

__all__ = [
    "Comparison",
    "LogKernel",
    "compare",
    "effective_rank",
    "evenly_spaced",
    "predicted_variance",
    "uniform_kernel",
    "window_kernel",
]
