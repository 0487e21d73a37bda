"""How plots look, and how they become bytes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

INK, SOFT, RULE = "#1d2329", "#5c6670", "#e4e7ea"

_STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": SOFT,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "lines.linewidth": 1.7,
    "lines.markersize": 5,
    "figure.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "phistate",
}


@contextmanager
def style() -> Iterator[None]:
    """While this lasts, matplotlib draws as reports do, and on no screen."""
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        yield


def figure(width: float, height: float) -> Any:
    """An empty figure of so many inches, apart from pyplot and its windows."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def svg(drawn: Any) -> str:
    """A figure as SVG, the same bytes every time."""
    out = io.StringIO()
    drawn.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def png(drawn: Any, dpi: int = 150) -> bytes:
    """A figure as PNG."""
    out = io.BytesIO()
    drawn.savefig(out, format="png", dpi=dpi)
    return out.getvalue()
