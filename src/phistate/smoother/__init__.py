"""Nadaraya–Watson regression that learns from a stream, as a scikit-learn estimator.

What attention is to a query, this is to a row: ŷ(x) = Σ_j w_j κ(x, x_j) y_j / Σ_j w_j κ(x, x_j), with the Gaussian
kernel κ(x, y) = exp(−Σ_l (x_l − y_l)²/2h_l²). With u = (x − offset)/h that is

    κ(x, y) = exp(u_x·u_y) · exp(−‖u_x‖²/2) · exp(−‖u_y‖²/2)

so a feature map of the exponential kernel makes it split, and all that was learned is the state of a linear mixer that
never forgets: S = Σ_j w_j φ(x_j) y_jᵀ and z = Σ_j w_j φ(x_j), each feature relative to its own running maximum.
"""

from phistate.smoother.estimator import KernelSmoother

__all__ = ["KernelSmoother"]
