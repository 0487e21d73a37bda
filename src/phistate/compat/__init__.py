"""The names other people import (fla, mamba_ssm, causal_conv1d), on phistate's kernels: explicit and undoable."""

from phistate.compat.install import install as install
from phistate.compat.report import Entry as Entry
from phistate.compat.report import Report as Report

__all__ = ["Entry", "Report", "install"]
