"""The table of a long run. Knows no framework."""

from __future__ import annotations

from tests.differential.jobs import Tally


def table(tally: Tally, framework: str, first_seed: int) -> str:
    """Markdown: the seeds, the outcomes, and what the programs had in them."""
    last = first_seed + tally.programs
    runs = sum(tally.outcomes.values())
    lines = [
        f"# Differential programs, {framework}",
        "",
        f"Seeds {first_seed} to {last - 1}: {tally.programs} programs, {runs} runs in their modes, "
        f"{tally.seconds:.0f} s ({runs / max(tally.seconds, 1e-9):.1f} runs a second).",
        "",
        "| outcome | runs |",
        "|---|---|",
        *(f"| {kind} | {count} |" for kind, count in tally.outcomes.most_common()),
        "",
        "| refused with | runs |",
        "|---|---|",
        *(f"| {error} | {count} |" for error, count in tally.refusals.most_common()),
        "",
        "| feature | equal | refused | other | finding |",
        "|---|---|---|---|---|",
    ]
    for feature, counts in sorted(tally.by_feature.items()):
        row = " | ".join(str(counts[column]) for column in ("equal", "refused", "other", "finding"))
        lines.append(f"| {feature} | {row} |")
    return "\n".join(lines) + "\n"
