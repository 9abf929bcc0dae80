"""A module holds one idea, in at most 350 lines."""

from __future__ import annotations

from source_tree import ROOT, package_modules

LIMIT = 350

# Longer, each with the reason why it is still one idea.
LONGER = {
    "src/cuglue/driver/protocol.py": "the whole driver surface: one file, so that one grep lists every device call",
}


def test_long_modules_have_a_reason() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in package_modules()}
    too_long = {name: length for name, length in lengths.items() if length > LIMIT and name not in LONGER}
    assert not too_long, f"over {LIMIT} lines: split them, or give a reason in LONGER: {too_long}"


def test_no_reason_outlives_its_module() -> None:
    short = [
        name
        for name in LONGER
        if not (ROOT / name).is_file() or len((ROOT / name).read_text().splitlines()) <= LIMIT
    ]
    assert not short, f"no longer over {LIMIT} lines: take them out of LONGER: {short}"


def test_every_module_says_what_it_owns() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in package_modules()
        if not path.read_text().lstrip().startswith('"""')
    ]
    assert not silent, f"a module opens with a docstring: {silent}"
