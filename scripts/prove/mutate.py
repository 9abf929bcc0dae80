"""What is done to a site: the code without it.

Owns the choice of the neutral code that stands in for a site, and the text with the change. Must not know which
sites there are or who judges them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from .sites import Site, name_of

#: Stands in for the value of a call that is taken away; {0} is the object it was called on, {1} its second argument.
_VALUES = {
    "submit": "{0}.seq",  # the work is not counted
    "cover": "(0, {0}.state.take_event())",  # an event that nobody recorded: waiting for it orders nothing
    "step": "{1}",  # the state stays
    "record": "None",
    "issue": "None",
}
_NO_VALUE = "0"  # no wait was queued, nothing was run
_NOTHING = "pass"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one site."""

    site: Site
    replacement: str
    target: ast.AST  # what is replaced: the site, or the whole statement it is

    @property
    def key(self) -> str:
        """Names the change; stable while the code of the site is."""
        return f"{self.site.key} -> {self.replacement}"

    def apply(self, source: str) -> str:
        """The module with the change. Lines after it keep their numbers."""
        lines = source.encode().splitlines(keepends=True)
        first, last = self.target.lineno - 1, (self.target.end_lineno or 0) - 1  # type: ignore[attr-defined]
        start, end = self.target.col_offset, self.target.end_col_offset or 0  # type: ignore[attr-defined]
        before, after = lines[first][:start], lines[last][end:]
        gap = b"\n" * (last - first) if self.replacement == _NOTHING else b""
        middle = (
            self.replacement.encode() if self.replacement == _NOTHING else f"({self.replacement})".encode()
        )
        return b"".join(
            [*lines[:first], before, middle, after.rstrip(b"\n"), gap, b"\n", *lines[last + 1 :]]
        ).decode()


def mutants_of(site: Site) -> Iterator[Mutant]:
    """Every change worth judging: without the statement, or with the neutral value, or decided either way."""
    node, parent = site.node, site.parents[0]
    if site.kind == "check":
        yield Mutant(site, "True", node)
        yield Mutant(site, "False", node)
    elif isinstance(node, ast.stmt):
        yield Mutant(site, _NOTHING, node)
    elif isinstance(node, ast.Attribute):
        yield Mutant(site, "lambda *_, **__: None", node)
    elif isinstance(parent, ast.Expr):
        yield Mutant(site, _NOTHING, parent)
    elif isinstance(parent, ast.withitem):
        yield Mutant(site, "__import__('contextlib').nullcontext()", node)
    else:
        assert isinstance(node, ast.Call)
        yield Mutant(site, _neutral(node), node)


def _neutral(call: ast.Call) -> str:
    form = _VALUES.get(name_of(call.func) or "", _NO_VALUE)
    owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    second = ast.unparse(call.args[1]) if len(call.args) > 1 else ""
    if ("{0}" in form and not owner) or ("{1}" in form and not second):
        return _NO_VALUE
    return form.format(owner, second)
