"""``python -m cuglue demo | doctor``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the programs; the exit code."""
    from .tools import demo, doctor

    parser = argparse.ArgumentParser(prog="python -m cuglue", description="Glue GPU memory to arrays.")
    programs = parser.add_subparsers(dest="program", required=True)
    for program in (demo, doctor):
        name = program.__name__.rsplit(".", 1)[-1]
        sub = programs.add_parser(name, help=program.SUMMARY, description=program.SUMMARY)
        program.add_arguments(sub)
        sub.set_defaults(run=program.run)
    options = parser.parse_args(argv)
    code: int = options.run(options)
    return code


if __name__ == "__main__":
    sys.exit(main())
