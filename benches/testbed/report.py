"""Tables of medians with spread, and ratios to the first target."""
import statistics


def markdown(facts, results, targets):
    """The report as Markdown: a table a workload, a row a figure, a column a target."""
    lines = ["# Results", "", ", ".join("%s %s" % item for item in facts.items()), ""]
    for workload in dict.fromkeys(r["workload"] for r in results):
        mine = [r for r in results if r["workload"] == workload]
        names = list(dict.fromkeys(name for r in mine for name in r.get("figures", {})))
        lines += ["## " + workload, "", "| figure | " + " | ".join(targets) + " |", "|---" * (len(targets) + 1) + "|"]
        for name in names:
            cells, base = [], None
            for target in targets:
                found = [r["figures"][name] for r in mine if r["target"] == target and name in r.get("figures", {})]
                if not found:
                    cells.append("")
                    continue
                values = [f["value"] for f in found]
                median = statistics.median(values)
                cell = "%s %s" % (short(median), found[0]["unit"])
                if len(values) > 1:
                    cell += " (%s–%s)" % (short(min(values)), short(max(values)))
                if base is None:
                    base = median
                elif median:
                    cell += ", ×%s" % short(base / median)
                cells.append(cell)
            lines.append("| %s | %s |" % (name, " | ".join(cells)))
        for r in mine:
            if "error" in r:
                lines.append("\n%s, round %d failed: `%s`" % (r["target"], r["round"] + 1, r["error"].splitlines()[0][:200]))
        lines.append("")
    lines.append("×N: the first target's figure divided by this one's.")
    return "\n".join(lines) + "\n"


def short(value):
    return "%.0f" % value if value >= 100 else "%.3g" % value
