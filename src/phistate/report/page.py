"""A report as one HTML file: no script, nothing fetched, figures inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_STYLE = """
:root { color-scheme: light; --ink: #1d2329; --soft: #5c6670; --rule: #dfe3e7; --mark: #0b6e99; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink); font: 16px/1.55 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .4rem; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .3rem; }
p { margin: .4rem 0 1rem; max-width: 46rem; }
.lead { color: var(--soft); }
figure { margin: 1rem 0; }
figure img, figure svg { width: 100%; height: auto; display: block; }
figcaption { color: var(--soft); font-size: .9rem; max-width: 46rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { padding: .28rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
tr.strong td { font-weight: 650; color: var(--mark); }
code { font-size: .9em; background: #f3f5f7; padding: .1em .3em; border-radius: 3px; }
footer { margin-top: 3rem; color: var(--soft); font-size: .85rem; }
"""


@dataclass(frozen=True)
class Heading:
    """A section's title and what to read in it."""

    title: str
    text: str = ""

    def html(self) -> str:
        """As HTML."""
        return f"<h2>{escape(self.title)}</h2>" + (f"<p>{escape(self.text)}</p>" if self.text else "")


@dataclass(frozen=True)
class Figure:
    """A plot as SVG, what it shows for who cannot see it, and its caption."""

    svg: str
    description: str
    caption: str = ""

    def html(self) -> str:
        """As HTML."""
        drawing = self.svg[self.svg.index("<svg") :].replace(
            "<svg", f'<svg role="img" aria-label="{escape(self.description)}"', 1
        )
        caption = f"<figcaption>{escape(self.caption)}</figcaption>" if self.caption else ""
        return f"<figure>{drawing}{caption}</figure>"


@dataclass(frozen=True)
class Grid:
    """A table: the first column names, the others count; ``strong`` rows stand out."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    strong: frozenset[int] = frozenset()

    def html(self) -> str:
        """As HTML."""
        head = "".join(f"<th>{escape(name)}</th>" for name in self.header)
        body = "".join(
            f"<tr{' class=strong' if n in self.strong else ''}>"
            + "".join(f"<td>{escape(cell)}</td>" for cell in row)
            + "</tr>"
            for n, row in enumerate(self.rows)
        )
        return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def page(title: str, lead: str, blocks: Sequence[Heading | Figure | Grid], footer: str) -> str:
    """The whole file.

    Example:
        >>> "<h1>a &lt; b</h1>" in page("a < b", "lead", [Heading("h")], "footer")
        True
    """
    body = "\n".join(block.html() for block in blocks)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>\n{body}\n'
        f"<footer>{escape(footer)}</footer>\n</main>\n</body>\n</html>\n"
    )
