"""No place that keeps memory in order hides from the mutation runner.

The runner walks the syntax tree; these tests count the same names in the token stream, and make every method that
core and the drivers offer be either a site or listed here with the reason why it orders nothing.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

import pytest
from prove.mutate import mutants_of
from prove.run import LAYERS, mutants_in, read_equivalents
from prove.sites import KIND_OF_CALL, STAMPS, Site, find_sites, name_of
from source_tree import SRC

PACKAGE = SRC / "cuglue"
MODULES = sorted(path for layer in LAYERS for path in (PACKAGE / layer).rglob("*.py"))

# Methods that are no sites: taking one away loses no order and no memory, or it fails at once and everywhere.
NO_SITE = {
    "core/stream.py": {
        "nameable": "a question", "done": "a question; what it records and compares are sites",
        "unknown": "an error's text", "query": "a question", "capture_status": "a question", "capturing": "a question",
    },
    "core/block.py": {
        "begin": "makes a block: nothing works without", "uses": "a question", "use_count": "a question",
        "id": "a value", "nbytes": "a value", "device_ordinal": "a value", "alloc_stream": "a value",
    },
    "core/retire.py": {"ready": "a question", "bytes_waiting": "a number"},
    "core/device.py": {
        "capturing": "a question",
        "take_event": "its caller fails without the handle",
        "own_handle": "a number: tests/devices and the drivers' suite fail without what it says",
        "close_events": "the end of a driver: its caller compares inventories",
    },
}  # fmt: skip
# Driver calls that order: each must be a site wherever the layers above call it.
ORDERING_CALLS = {
    "device_synchronize", "stream_synchronize", "stream_wait_event", "event_record", "event_synchronize",
    "context_record", "context_wait", "semaphore_signal", "semaphore_wait",
}  # fmt: skip


def tokens_called(source: str) -> Counter[str]:
    """How often each site name is followed by an opening bracket, definitions and methods of a literal left out."""
    found: Counter[str] = Counter()
    kept = [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type
        not in (tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT)
    ]
    for index, token in enumerate(kept[:-1]):
        name = token.string.lstrip("_")
        if token.type != tokenize.NAME or name not in KIND_OF_CALL or kept[index + 1].string != "(":
            continue
        of_literal = index > 1 and kept[index - 1].string == "." and kept[index - 2].string[-1] in "\"'"
        if kept[index - 1].string != "def" and not of_literal:
            found[name] += 1
    return found


def sites_called(sites: list[Site]) -> Counter[str]:
    calls = [site.node for site in sites if isinstance(site.node, ast.Call)]
    return Counter(name for call in calls if (name := name_of(call.func) or "") in KIND_OF_CALL)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_call_by_a_site_name_is_a_site(path: Path) -> None:
    source = path.read_text()
    assert sites_called(find_sites(source, path.name)) == tokens_called(source)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_stamp_is_a_site(path: Path) -> None:
    """Counted by lines: one that assigns to ``.synced`` and its like, in whatever form, is covered by a site."""
    source = path.read_text()
    lines = source.splitlines()
    covered = {
        line
        for site in find_sites(source, path.name)
        for line in range(site.line, (getattr(site.node, "end_lineno", site.line) or site.line) + 1)
    }
    missed = [
        f"{number}: {line.strip()}"
        for number, line in enumerate(lines, 1)
        if number not in covered and any(_assigns(line, name) for name in STAMPS)
    ]
    assert not missed


def _assigns(line: str, name: str) -> bool:
    code = line.split("#")[0]
    left, sign, _ = (
        code.replace("==", "").replace("<=", "").replace(">=", "").replace("!=", "").partition("=")
    )
    return bool(sign) and any(part in left for part in (f".{name}[", f".{name} ", f"._{name}[", f"._{name} "))


@pytest.mark.parametrize("module", NO_SITE)
def test_every_method_of_core_is_a_site_or_has_a_reason(module: str) -> None:
    tree = ast.parse((PACKAGE / module).read_text())
    methods = {
        node.name
        for part in tree.body
        if isinstance(part, ast.ClassDef)
        for node in part.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }
    unlisted = {name for name in methods if name not in KIND_OF_CALL} - set(NO_SITE[module])
    assert not unlisted, "add them to CALLS in scripts/prove/sites.py, or here with a reason"
    assert not set(NO_SITE[module]) - methods, "listed here, but gone"


def test_driver_calls_that_order_are_sites() -> None:
    """By the words of the protocol: whatever waits, records, signals or synchronises."""
    tree = ast.parse((PACKAGE / "driver" / "protocol.py").read_text())
    driver = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Driver")
    words = ("synchronize", "wait", "record", "signal")
    named = {
        n.name for n in driver.body if isinstance(n, ast.FunctionDef) and any(w in n.name for w in words)
    }
    assert named == ORDERING_CALLS
    assert set(KIND_OF_CALL) >= ORDERING_CALLS


def test_keys_are_unique_and_every_mutant_compiles() -> None:
    mutants = mutants_in(PACKAGE)
    assert len({mutant.key for mutant in mutants}) == len(mutants) > 0
    sources = {path: path.read_text() for path in MODULES}
    for mutant in mutants:
        source = sources[PACKAGE / mutant.site.module]
        changed = mutant.apply(source)
        ast.parse(changed)
        assert changed != source, mutant.key


def test_equivalents_exist_and_are_argued() -> None:
    known = {mutant.key for mutant in mutants_in(PACKAGE)}
    listed = read_equivalents()
    assert not set(listed) - known, "listed as equivalent, but there is no such mutant any more"
    thin = [key for key, because in listed.items() if len(because.split()) < 8]
    assert not thin, "an argument says why no program can tell the difference"


SAMPLE = '''
class Stream:
    def go(self, other, stack):
        self.wait_for(other, 3)
        waits = 0
        waits += self.join(other)
        with other.pin():
            seq = other.submit()
        self.synced[other.id] = seq
        self.reads.pop(other)
        stack.callback(other.unpin, 1)
        if self.synced.get(other.id, 0) >= seq or self.pins:
            return ", ".join(["no site"])
        self.state = step(TABLE, self.state, "go", self)
        self.maps -= 1
        self._inbox.append(other)
        covered, event = other._cover(seq)
        return event
'''  # fmt: skip


def test_each_form_of_a_site_is_found_and_neutralised() -> None:
    found = [
        (site.kind, site.text, [mutant.replacement for mutant in mutants_of(site)])
        for site in find_sites(SAMPLE, "core/sample.py")
    ]
    assert found == [
        ("wait", "self.wait_for(other, 3)", ["pass"]),
        ("wait", "self.join(other)", ["0"]),
        ("pin", "other.pin()", ["__import__('contextlib').nullcontext()"]),
        ("use", "other.submit()", ["other.seq"]),
        ("stamp", "self.synced[other.id] = seq", ["pass"]),
        ("stamp", "self.reads.pop(other)", ["pass"]),
        ("pin", "other.unpin", ["lambda *_, **__: None"]),
        ("check", "self.synced.get(other.id, 0) >= seq", ["True", "False"]),
        ("check", "self.pins", ["True", "False"]),
        ("state", "step(TABLE, self.state, 'go', self)", ["self.state"]),
        ("count", "self.maps -= 1", ["pass"]),
        ("retire", "self._inbox.append(other)", ["pass"]),
        ("record", "other._cover(seq)", ["(0, other.state.take_event())"]),
    ]


def test_a_mutant_changes_its_site_alone() -> None:
    first, *_ = find_sites(SAMPLE, "core/sample.py")
    (mutant,) = mutants_of(first)
    assert mutant.apply(SAMPLE) == SAMPLE.replace("self.wait_for(other, 3)", "pass")
    assert mutant.key == "core/sample.py::Stream.go::self.wait_for(other, 3) -> pass"


def test_a_statement_over_several_lines_keeps_the_numbers_of_later_lines() -> None:
    source = "def f(a):\n    a.push(\n        1,\n        2,\n    )  # gone too\n    return a\n"
    (site,) = find_sites(source, "core/sample.py")
    (mutant,) = mutants_of(site)
    changed = mutant.apply(source)
    assert changed.splitlines()[5] == "    return a"
    assert "push" not in changed
    assert len(ast.parse(changed).body) == 1
