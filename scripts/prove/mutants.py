"""Prints what became of each mutant, and a table by layer.

Owns the text and the exit status: 0: every mutant was caught or is listed with its argument; 1: some survived, or a
listed one was caught; 2: no verdict (the tests fail on the unchanged tree, or nothing was chosen). Must not judge.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .run import LAYERS, Judge, Verdict, mutants_in, read_equivalents
from .trees import BrokenTree

ROOT = Path(__file__).resolve().parent.parent.parent


def listed(only: Sequence[str] = ()) -> int:
    """Print the mutants there are."""
    mutants = mutants_in(ROOT / "src" / "cuglue", only)
    for mutant in mutants:
        print(f"{mutant.site.kind:8} {mutant.site.line:4} {mutant.key}")
    print(f"{len(mutants)} mutants")
    return 0 if mutants else 2


def main(
    only: Sequence[str] = (),
    *,
    jobs: int = 2,
    seconds: float = 600.0,
    tests: Sequence[str] = (),
    also_equivalents: bool = False,
    log: Path | None = None,
) -> int:
    """Judge mutants and print the verdicts; the exit status.

    Args:
        only: beginnings of their names; none: all.
        jobs: mutants judged at the same time.
        seconds: limit for one that has to be judged apart.
        tests: folders that judge; none: those of the layers.
        also_equivalents: judge those too: none may be caught.
        log: write the verdicts there, one a line.
    """
    mutants = mutants_in(ROOT / "src" / "cuglue", only)
    if not mutants:
        print("0 mutants")
        return 2
    equivalents = read_equivalents()
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(log.open("w", encoding="utf-8")) if log else None

        def report(verdict: Verdict) -> None:
            print(line_of(verdict), flush=True)
            if lines is not None:
                print(as_json(verdict), file=lines, flush=True)

        try:
            judge = Judge(ROOT, seconds=seconds, jobs=jobs, tests=tests)
            verdicts = judge.run(mutants, {} if also_equivalents else equivalents, report=report)
        except BrokenTree as error:
            print(f"no verdict: {error}", file=sys.stderr)
            return 2
    wrong = [v for v in verdicts if v.status == "caught" and v.mutant.key in equivalents]
    surviving = [v for v in verdicts if v.status == "survived" and v.mutant.key not in equivalents]
    print(table(verdicts))
    for verdict in wrong:
        print(f"listed as equivalent, but caught by {verdict.by}: {verdict.mutant.key}")
    for verdict in surviving:
        site = verdict.mutant.site
        print(f"survived: src/cuglue/{site.module}:{site.line} {verdict.mutant.key}")
    return 1 if surviving or wrong else 0


def line_of(verdict: Verdict) -> str:
    """One verdict in a line."""
    return f"{verdict.status:8} {verdict.seconds:6.1f} s  {verdict.mutant.key}  {verdict.by}"


def as_json(verdict: Verdict) -> str:
    """One verdict as a JSON object."""
    site = verdict.mutant.site
    return json.dumps(
        {
            "mutant": verdict.mutant.key, "line": site.line, "kind": site.kind, "status": verdict.status,
            "by": verdict.by, "seconds": round(verdict.seconds, 1),
        }
    )  # fmt: skip


def table(verdicts: Sequence[Verdict]) -> str:
    """Counts by layer."""
    rows = ["", f"{'layer':10}{'sites':>8}{'mutants':>9}{'caught':>8}{'equivalent':>12}{'surviving':>11}"]
    for layer in (*LAYERS, "all"):
        mine = [v for v in verdicts if layer in ("all", v.mutant.site.module.split("/")[0])]
        if mine:
            count = Counter(v.status for v in mine)
            sites = len({v.mutant.site.key for v in mine})
            numbers = f"{count['caught']:>8}{count['equivalent']:>12}{count['survived']:>11}"
            rows.append(f"{layer:10}{sites:>8}{len(mine):>9}{numbers}")
    return "\n".join(rows)
