"""Bars of medians with whiskers to the lowest and highest round, as SVG written by hand."""

from html import escape
from pathlib import Path

from .measure import Phase
from .report import Table, short

WIDTH, LABEL, BAR, GAP, HEAD = 640, 150, 18, 6, 44
COLOURS = ["#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#64748b"]


def write_plots(tables: list[Table], directory: Path) -> list[Path]:
    """One file for each workload and platform that has figures."""
    written = []
    for table in tables:
        if table.phases:
            path = directory / f"{table.workload}-{table.platform}.svg"
            path.write_text(_svg(table))
            written.append(path)
    return written


def _svg(table: Table) -> str:
    colours = {target: COLOURS[i % len(COLOURS)] for i, target in enumerate(table.targets())}
    parts: list[str] = []
    y = 30
    for name, by_target in table.phases.items():
        y = _panel(parts, table, name, list(by_target), colours, y)
    title = f'<text x="8" y="20" font-size="15" font-weight="bold">{escape(table.workload)}, {escape(table.platform)}</text>'
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" font-family="sans-serif" font-size="12">\n'
            f'<rect width="100%" height="100%" fill="white"/>\n{title}\n' + "\n".join(parts) + "\n</svg>\n")


def _panel(parts: list[str], table: Table, name: str, targets: list[str], colours: dict[str, str], y: int) -> int:
    """Draws the bars of one phase below `y`; where it ends."""
    spreads = {target: found for target in targets if (found := table.spread(name, target, Phase.rate))}
    first = next(iter(table.phases[name][targets[0]].values()))
    unit = "MiB/s" if first.bytes and not first.item else f"{first.item}s/s"
    scale = (WIDTH - LABEL - 90) / max(found.high for found in spreads.values())
    parts.append(f'<text x="8" y="{y + 18}" font-weight="bold">{escape(name)} ({escape(unit)})</text>')
    y += HEAD - 18
    for target, found in spreads.items():
        middle, end = y + BAR / 2, LABEL + found.median * scale
        parts.append(f'<text x="{LABEL - 8}" y="{middle + 4}" text-anchor="end">{escape(target)}</text>')
        parts.append(f'<rect x="{LABEL}" y="{y}" width="{found.median * scale:.1f}" height="{BAR}" fill="{colours[target]}"/>')
        low, high = LABEL + found.low * scale, LABEL + found.high * scale
        if found.rounds > 1:
            parts.append(f'<path d="M{low:.1f} {middle}H{high:.1f}M{low:.1f} {y + 4}v{BAR - 8}M{high:.1f} {y + 4}v{BAR - 8}" '
                         'stroke="black" fill="none"/>')
        parts.append(f'<text x="{max(high, end) + 6:.1f}" y="{middle + 4}">{short(found.median)}</text>')
        y += BAR + GAP
    return y + 10
