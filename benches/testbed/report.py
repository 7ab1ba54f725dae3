"""Results as Markdown: medians of the rounds, their spread, and paired ratios."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from .measure import Phase
from .stats import Spread, paired_ratio, spread

Result = dict[str, Any]
# No filesystems over an object store: shown beside them.
APART = ("bare", "local", "null")


class Table:
    """The phases of one workload on one platform: by phase name, target and round."""

    def __init__(self, workload: str, platform: str, results: list[Result]) -> None:
        self.workload, self.platform = workload, platform
        # Also one that failed: ratios to another than elsewhere would mislead.
        self.base: str = results[0]["target"]
        self.phases: dict[str, dict[str, dict[int, Phase]]] = defaultdict(lambda: defaultdict(dict))
        self.errors: list[tuple[str, int, str]] = []
        known = {field.name for field in fields(Phase)}
        for result in results:
            for phase in result.get("phases", []):
                found = Phase(**{name: value for name, value in phase.items() if name in known})
                self.phases[found.name][result["target"]][result["round"]] = found
            if "error" in result:
                self.errors.append((result["target"], result["round"], result["error"]))

    def targets(self) -> list[str]:
        """In the order of their first result."""
        return list(dict.fromkeys(target for phase in self.phases.values() for target in phase))

    def median(self, phase: str, target: str, figure: Callable[[Phase], float | None]) -> float | None:
        """The median of a figure over the rounds."""
        found = self.spread(phase, target, figure)
        return found.median if found else None

    def spread(self, phase: str, target: str, figure: Callable[[Phase], float | None]) -> Spread | None:
        """The spread of a figure over the rounds."""
        return spread([value for p in self.phases[phase][target].values() if (value := figure(p)) is not None])

    def ratio(self, phase: str, base: str, target: str) -> Spread | None:
        """How many times faster `base` is than `target`."""
        if base not in self.phases[phase]:
            return None
        rates = {name: {number: p.rate() for number, p in self.phases[phase][name].items()} for name in (base, target)}
        return paired_ratio(rates[base], rates[target])


def tables(results: list[Result]) -> list[Table]:
    """One for each workload and platform, in the order in which they ran."""
    groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        groups[result["workload"], result["platform"]].append(result)
    return [Table(workload, platform, found) for (workload, platform), found in groups.items()]


def markdown(facts: list[dict[str, Any]], results: list[Result], describe: dict[str, str]) -> str:
    """The whole report. `describe` tells what each workload does."""
    lines = []
    for fact in facts:
        lines += ["- " + ", ".join(f"{name}: {value}" for name, value in fact.items())]
    lines += ["", "Rates are medians of the rounds, with the lowest and the highest. *N ×* is how many times faster the first",
              "target is: the median of the ratios inside each round, with the lowest and the highest. CPU is that of the",
              "filesystem's processes (+ its metadata server's), memory the peak of what is resident. Requests are those that",
              "the store was sent: PUTs and all else that uploads, GETs, others; MB went up to it and came down.", ""]
    lines += [*_summary(tables(results)), ""]
    for table in tables(results):
        lines += [f"## {table.workload}, {table.platform}", "", f"At scale 1: {describe.get(table.workload, '')}", ""]
        plain = [name for name, by_target in table.phases.items()
                 if all(p.cpu is None and not p.bytes for rounds in by_target.values() for p in rounds.values())]
        base = table.base
        for name in table.phases:
            if name not in plain:
                lines += [f"**{name}**", "", *_phase_table(table, name, base), ""]
        if plain:
            lines += [*_rate_matrix(table, plain, base), ""]
        for target, number, error in table.errors:
            lines += [f"{target}, round {number + 1}: {error.strip().splitlines()[0][:240]}", ""]
    return "\n".join(lines)


def _summary(found: list[Table]) -> list[str]:
    """A line a phase: the first target, and how many times faster it is than the second, the best of the others, the disk."""
    lines: list[str] = []
    # What needs no store compares engines, in a table of its own.
    for table in (table for table in found if table.platform != "here"):
        second = next((name for name in table.targets() if name not in (table.base, *APART)), None)
        for name, by_target in table.phases.items():
            if table.base not in by_target:
                continue
            some = next(iter(by_target[table.base].values()))
            unit = "MiB/s" if some.bytes and not some.item else f"{some.item}s/s"
            variants = {other for other in by_target if other.startswith(f"{table.base}-")}
            ratios = {other: ratio for other in by_target if other not in (table.base, second, *APART, *variants)
                      if (ratio := table.ratio(name, table.base, other))}
            best = min(ratios, key=lambda other: ratios[other].median, default=None)
            cells = [f"{table.workload} {name}, {table.platform}",
                     f"{_spread(table.spread(name, table.base, Phase.rate))} {unit}",
                     _ratio(table.ratio(name, table.base, second)) if second in by_target else "",
                     f"{_ratio(ratios[best])} {best}" if best else ""]
            cells += [_ratio(table.ratio(name, table.base, apart)) if apart in by_target else "" for apart in APART]
            lines.append("| " + " | ".join(cells) + " |")
    if not lines:
        return []
    base, second = found[0].base, next((name for name in found[0].targets() if name not in (found[0].base, *APART)), "")
    heads = ["", base, f"× {second}", "× the best of the others", *(f"× {apart}" for apart in APART)]
    return ["## Summary", "", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|", *lines]


def _phase_table(table: Table, name: str, base: str) -> list[str]:
    phases = [p for rounds in table.phases[name].values() for p in rounds.values()]
    item = phases[0].item
    heads = ["target"] + ([f"{item}s/s"] if item else []) + (["MiB/s"] if phases[0].bytes else [])
    heads += [f"{base} is", f"CPU µs a {item}" if item else "CPU s/GiB", "peak MiB", "PUT", "GET", "other", "MB up", "MB down"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for target in table.phases[name]:
        cells = [target]
        if item:
            cells.append(_spread(table.spread(name, target, lambda p: p.count / p.seconds)))
        if phases[0].bytes:
            cells.append(_spread(table.spread(name, target, lambda p: (p.bytes or 0) / p.seconds / (1 << 20))))
        cells.append("" if target == base else _ratio(table.ratio(name, base, target)))
        cells.append(_cpu(table, name, target))
        cells.append(short(table.median(name, target, lambda p: p.peak_mib)))
        for kind in ("put", "get", "other"):
            cells.append(short(table.median(name, target, lambda p, k=kind: (p.requests() or {}).get(k))))
        for direction in ("up", "down"):
            value = table.median(name, target, lambda p, d=direction: getattr(p, d))
            cells.append(short(None if value is None else value / 1e6))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _cpu(table: Table, name: str, target: str) -> str:
    def per(p: Phase, seconds: float | None) -> float | None:
        if seconds is None:
            return None
        return seconds / p.count * 1e6 if p.item else seconds / ((p.bytes or 1) / (1 << 30))
    own = table.median(name, target, lambda p: per(p, p.cpu))
    meta = table.median(name, target, lambda p: per(p, p.meta_cpu))
    return short(own) + (f" + {short(meta)}" if meta else "")


def _rate_matrix(table: Table, names: list[str], base: str) -> list[str]:
    targets = list(dict.fromkeys(target for name in names for target in table.phases[name]))
    lines = ["| a second | " + " | ".join(targets) + " |", "|---" * (len(targets) + 1) + "|"]
    for name in names:
        cells = [name]
        for target in targets:
            cell = _spread(table.spread(name, target, Phase.rate))
            ratio = _ratio(table.ratio(name, base, target)) if target != base else ""
            cells.append(f"{cell}, {ratio}" if ratio else cell)
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _spread(found: Spread | None) -> str:
    if not found:
        return ""
    return short(found.median) + (f" ({short(found.low)}–{short(found.high)})" if found.rounds > 1 else "")


def _ratio(found: Spread | None) -> str:
    if not found:
        return ""
    return short(found.median) + " ×" + (f" ({short(found.low)}–{short(found.high)})" if found.rounds > 1 else "")


def short(value: float | None) -> str:
    """Three digits."""
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
