"""``python -m scripts.prove``: every proof in turn, each with its table; with a flag or names of mutants, one of them.

Owns the command line. Exit 0: all held; else the number of the proof that did not says how: 1: something was found,
2: no verdict.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from . import exits, fuzz, mutants, sweeps
from .programs import report as programs

#: How much of each makes up the whole, which ends within half an hour on two processors.
PROGRAMS = 100_000
INPUTS = 4_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; the exit status."""
    options = _parser().parse_args(arguments)
    if options.sweep:
        return sweeps.main()
    if options.programs:
        return programs.main(options.programs, options.jobs, first=options.first)
    if options.fuzz:
        return fuzz.main(options.fuzz, options.jobs)
    if options.exits:
        return exits.main(options.driver, options.jobs, options.only, options.limit)
    if options.list:
        return mutants.listed(options.only)

    def judge() -> int:
        return mutants.main(
            options.only,
            jobs=options.jobs,
            seconds=options.seconds,
            tests=options.tests,
            also_equivalents=options.all,
            log=options.json,
        )

    if options.mutants or options.only or options.tests or options.all:
        return judge()
    return everything(
        {
            "fault sweep": sweeps.main,
            "exit and fork matrix": lambda: exits.main(jobs=options.jobs),
            "random inputs": lambda: fuzz.main(INPUTS, options.jobs),
            "random programs": lambda: programs.main(PROGRAMS, options.jobs),
            "mutants": judge,
        }
    )


def everything(proofs: dict[str, Callable[[], int]]) -> int:
    """Run proofs in turn, all of them whatever is found; the worst status."""
    lines = []
    worst = 0
    for name, proof in proofs.items():
        print(f"\n=== {name}\n", flush=True)
        began = time.monotonic()
        status = proof()
        worst = max(worst, status)
        verdict = ("held", "FOUND SOMETHING", "NO VERDICT")[status]
        lines.append(f"{name:24}{verdict:18}{time.monotonic() - began:8.0f} s")
    print("\n=== all\n")
    print("\n".join(lines), flush=True)
    return worst


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m scripts.prove", description=__doc__)
    parser.add_argument("only", nargs="*", help="beginnings of mutants' names: core, memory/budget.py, ...")
    parser.add_argument("--jobs", type=int, default=2, help="processes that work at the same time (2)")
    parser.add_argument("--sweep", action="store_true", help="only the fault sweep")
    parser.add_argument("--exits", action="store_true", help="only the exit and fork matrix")
    parser.add_argument("--driver", default="sim", help="of the exit matrix: sim or cuda")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds for the exit matrix (1200)")
    parser.add_argument("--fuzz", type=int, metavar="N", help="only N random inputs for each target")
    parser.add_argument("--programs", type=int, default=0, metavar="N", help="only N random programs")
    parser.add_argument("--first", type=int, default=0, help="seed of the first program (0)")
    parser.add_argument("--mutants", action="store_true", help="only the mutants")
    parser.add_argument("--list", action="store_true", help="print the mutants and judge none")
    parser.add_argument("--all", action="store_true", help="judge the listed equivalents too")
    parser.add_argument("--tests", nargs="+", default=(), help="what judges, instead of the layers' tests")
    parser.add_argument("--seconds", type=float, default=600.0, help="limit for a mutant judged apart (600)")
    parser.add_argument("--json", type=Path, help="write the verdicts on mutants here, one a line")
    return parser


if __name__ == "__main__":
    sys.exit(main())
