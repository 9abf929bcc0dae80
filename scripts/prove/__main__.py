"""``python -m scripts.prove``: removes each site in turn and prints who noticed; ``--sweep``: prints the fault sweep.

Owns the command line and the table. Exit 0: every mutant was caught or is listed with its argument; 1: some survived;
2: no verdict (the tests fail on the unchanged tree, or nothing was chosen).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from . import exits, fuzz, sweeps
from .programs import report as programs
from .run import LAYERS, Judge, Verdict, mutants_in, read_equivalents
from .trees import BrokenTree

ROOT = Path(__file__).resolve().parent.parent.parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m scripts.prove", description=__doc__)
    parser.add_argument("only", nargs="*", help="beginnings of mutants' names: core, memory/budget.py, ...")
    parser.add_argument("--jobs", type=int, default=2, help="mutants judged at the same time (2)")
    parser.add_argument("--seconds", type=float, default=600.0, help="limit for one mutant (600)")
    parser.add_argument(
        "--tests", nargs="+", default=(), help="folders that judge, instead of the layer's own"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and judge none")
    parser.add_argument(
        "--all", action="store_true", help="judge the listed equivalents too: none may be caught"
    )
    parser.add_argument(
        "--sweep", action="store_true", help="run the fault sweep instead, and print its table"
    )
    parser.add_argument(
        "--exits", action="store_true", help="run the exit and fork matrix instead, and print its table"
    )
    parser.add_argument("--fuzz", type=int, metavar="N", help="try N random inputs for each target instead")
    parser.add_argument("--driver", default="sim", help="of the exit matrix: sim or cuda")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds for the exit matrix (1200)")
    parser.add_argument(
        "--programs", type=int, default=0, help="run so many random programs instead, and print their table"
    )
    parser.add_argument("--first", type=int, default=0, help="seed of the first program (0)")
    parser.add_argument("--json", type=Path, help="write the verdicts here, one a line")
    options = parser.parse_args(arguments)
    if options.sweep:
        return sweeps.main()
    if options.programs:
        return programs.main(options.programs, options.jobs, first=options.first)
    if options.fuzz:
        return fuzz.main(options.fuzz, options.jobs)
    if options.exits:
        return exits.main(options.driver, options.jobs, options.only, options.limit)
    mutants = mutants_in(ROOT / "src" / "cuglue", options.only)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.site.kind:8} {mutant.site.line:4} {mutant.key}")
    if options.list or not mutants:
        print(f"{len(mutants)} mutants")
        return 0 if mutants else 2
    equivalents = read_equivalents()
    log = options.json.open("w", encoding="utf-8") if options.json else None

    def report(verdict: Verdict) -> None:
        line = {
            "mutant": verdict.mutant.key, "line": verdict.mutant.site.line, "kind": verdict.mutant.site.kind,
            "status": verdict.status, "by": verdict.by, "seconds": round(verdict.seconds, 1),
        }  # fmt: skip
        if log is not None:
            log.write(json.dumps(line) + "\n")
            log.flush()
        print(f"{verdict.status:8} {verdict.seconds:6.1f} s  {verdict.mutant.key}  {verdict.by}", flush=True)

    try:
        judge = Judge(ROOT, seconds=options.seconds, jobs=options.jobs, tests=options.tests)
        verdicts = judge.run(mutants, {} if options.all else equivalents, report=report)
    except BrokenTree as error:
        print(f"no verdict: {error}", file=sys.stderr)
        return 2
    finally:
        if log is not None:
            log.close()
    wrong = [v for v in verdicts if v.status == "caught" and v.mutant.key in equivalents]
    surviving = [v for v in verdicts if v.status == "survived" and v.mutant.key not in equivalents]
    print(table(verdicts))
    for verdict in wrong:
        print(f"listed as equivalent, but caught by {verdict.by}: {verdict.mutant.key}")
    for verdict in surviving:
        print(
            f"survived: src/cuglue/{verdict.mutant.site.module}:{verdict.mutant.site.line} {verdict.mutant.key}"
        )
    return 1 if surviving or wrong else 0


def table(verdicts: Sequence[Verdict]) -> str:
    """Counts by layer."""
    rows = ["", f"{'layer':10}{'sites':>8}{'mutants':>9}{'caught':>8}{'equivalent':>12}{'surviving':>11}"]
    for layer in LAYERS:
        mine = [v for v in verdicts if v.mutant.site.module.split("/")[0] == layer]
        if mine:
            count = Counter(v.status for v in mine)
            sites = len({v.mutant.site.key for v in mine})
            rows.append(
                f"{layer:10}{sites:>8}{len(mine):>9}{count['caught']:>8}{count['equivalent']:>12}"
                f"{count['survived']:>11}"
            )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
