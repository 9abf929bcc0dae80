"""Where the order and the life of memory are kept: every such place of a module, found from its syntax tree.

Owns the names that make a place a *site*. Must not know what is done to a site (:mod:`.mutate`) or who judges it.

A site is a call that orders, records, retires, pins, publishes or refuses; an update of what was waited for or used;
an update of a count of users; a comparison that decides by one of these. ``tests/meta/test_mutation_sites.py`` counts
the same names in the token stream, so that none can hide from the tree walk.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

#: Calls by what they do. A leading underscore of the called name does not matter.
CALLS: dict[str, tuple[str, ...]] = {
    "wait": (
        "wait_for", "join", "join_uses", "join_context", "hold_context", "join_all", "hold_all",
        "stream_wait_event", "wait_event", "follow",
        "context_wait",
        "wait", "semaphore_wait", "order_consumer", "order_host", "order_everybody", "synchronize",
        "stream_synchronize", "device_synchronize", "event_synchronize", "hold_partners", "await_turn",
        "wait_for_copies",
    ),
    "record": (
        "cover", "event_record", "context_record", "semaphore_signal", "record", "note_consumer", "note_cai_reader",
        "note_use", "note_uses", "note_reader", "note_fast", "mark",
    ),
    "use": ("prepare", "finish", "submit", "record_block_use", "prepare_block_use", "finish_block_use"),
    "retire": (
        "push", "forget", "keep", "drain", "run_one", "run_forgotten", "give_event", "forget_left", "forget_fast",
        "release_due", "free_done", "leave_later",
    ),
    "pin": ("pin", "unpin", "hold", "retain"),
    "publish": ("publish",),
    "lease": (
        "issue", "check_leave", "check_exportable", "check_live", "own", "claim", "try_claim", "refuse_conflict",
    ),
    "capture": (
        "refuse_capture", "refuse_captures", "refuse_other_capture", "refuse_recording", "refuse_transient",
    ),
    "state": ("step", "advance", "check_open"),
}  # fmt: skip

#: What was waited for and what was used: an assignment to one of these is a stamp.
STAMPS = ("synced", "completed", "reads", "write_seq", "write_stream", "until")
#: How many still use something.
COUNTS = ("pins", "maps", "writers", "readers", "refs", "refcount")
#: Lists of what has to happen later, or of who has to be waited for: an append to one of these is a registration.
LISTS = (
    "forgotten",
    "inbox",
    "waiting",
    "kept",
    "dropped",
    "spare",
    "consumers",
    "events",
    "uses",
    "partners",
    "owners",
)
_APPENDS = ("append", "appendleft", "extend", "add")
#: Comparisons that read one of these decide whether to wait, to free or to refuse.
DECIDE = (*STAMPS, *COUNTS, "covered", "seq", "generation")
_DICT_UPDATES = ("update", "setdefault", "pop", "popitem", "clear")

KIND_OF_CALL = {name: kind for kind, names in CALLS.items() for name in names}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Site:
    """One place. ``key`` stays the same when lines move.

    Attributes:
        module: path below ``src/cuglue``.
        function: dotted name of the class and function it is in.
        kind: a key of :data:`CALLS`, or "stamp", "count", "check".
        text: the code.
        occurrence: 1 for the first such text in the function.
        line: in the file.
        node: the code as a tree.
        parents: what it stands in, innermost first.
    """

    module: str
    function: str
    kind: str
    text: str
    occurrence: int
    line: int
    node: ast.AST = field(compare=False, repr=False)
    parents: tuple[ast.AST, ...] = field(compare=False, repr=False)

    @property
    def key(self) -> str:
        """Names the site in reports and in the list of equivalents."""
        again = f" #{self.occurrence}" if self.occurrence > 1 else ""
        return f"{self.module}::{self.function}::{self.text}{again}"


def find_sites(source: str, module: str) -> list[Site]:
    """Every site of a module in the order of the text."""
    seen: Counter[tuple[str, str]] = Counter()
    sites = []
    for node, parents in sorted(_walk(ast.parse(source), ()), key=lambda found: _position(found[0])):
        kind = _kind(node, parents)
        if kind is None:
            continue
        function = ".".join(
            p.name for p in reversed(parents) if isinstance(p, Function | ast.ClassDef)
        ) or "<module>"  # fmt: skip
        text = ast.unparse(node)
        seen[function, text] += 1
        line = getattr(node, "lineno", 0)
        sites.append(Site(module, function, kind, text, seen[function, text], line, node, parents))
    return sites


def name_of(node: ast.AST) -> str | None:
    """The last name of ``a.b._name``, ``name`` or ``a.name[...]``, without leading underscores."""
    if isinstance(node, ast.Subscript):
        return name_of(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr.lstrip("_")
    return node.id.lstrip("_") if isinstance(node, ast.Name) else None


def _walk(node: ast.AST, parents: tuple[ast.AST, ...]) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    yield node, parents
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, (node, *parents))


def _position(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _kind(node: ast.AST, parents: tuple[ast.AST, ...]) -> str | None:
    parent = parents[0] if parents else None
    if isinstance(node, ast.Call):
        return _kind_of_call(node)
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        return _kind_of_assignment(node)
    if isinstance(node, ast.Delete) and any(name_of(t) in STAMPS for t in node.targets):
        return "stamp"
    if isinstance(node, ast.Compare):
        return "check" if _decides(node) else None
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        if _tests(node, parent) and name_of(node) in (*COUNTS, *STAMPS):
            return "check"
        # Passed on instead of called: stack.callback(stream.state.give_event, event).
        if (
            name_of(node) in KIND_OF_CALL
            and isinstance(parent, ast.Call | ast.keyword)
            and not _called(node, parent)
        ):
            return KIND_OF_CALL[name_of(node) or ""]
    return None


def _kind_of_call(node: ast.Call) -> str | None:
    function = node.func
    if isinstance(function, ast.Attribute):
        if isinstance(function.value, ast.Constant):
            return None  # ", ".join(...)
        if function.attr in _DICT_UPDATES and name_of(function.value) in STAMPS:
            return "stamp"
        if function.attr in _APPENDS and name_of(function.value) in LISTS:
            return "retire"
    elif not isinstance(function, ast.Name):
        return None
    return KIND_OF_CALL.get(name_of(function) or "")


def _kind_of_assignment(node: ast.Assign | ast.AugAssign | ast.AnnAssign) -> str | None:
    if isinstance(node, ast.AnnAssign) and node.value is None:
        return None
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    flat = [t for target in targets for t in (target.elts if isinstance(target, ast.Tuple) else [target])]
    names = {name_of(t) for t in flat if isinstance(t, ast.Attribute | ast.Subscript)}
    if names & set(STAMPS):
        return "stamp"
    if any(isinstance(t, ast.Subscript) and name_of(t) in LISTS for t in flat):
        return "retire"
    return "count" if names & set(COUNTS) else None


def _decides(node: ast.Compare) -> bool:
    sides = [node.left, *node.comparators]
    if any(isinstance(side, ast.Constant) and side.value is None for side in sides):
        return False  # whether it was given at all
    inner = [part for side in sides for part in ast.walk(side)]
    return any(
        name_of(part) in DECIDE
        or (isinstance(part, ast.Attribute) and (name_of(part.value) or "").endswith("State"))
        for part in inner
        if isinstance(part, ast.Attribute | ast.Name)
    )


def _tests(node: ast.AST, parent: ast.AST | None) -> bool:
    """Whether the truth of ``node`` itself decides something."""
    if isinstance(parent, ast.If | ast.While | ast.IfExp | ast.Assert):
        return parent.test is node
    return isinstance(parent, ast.BoolOp) or (
        isinstance(parent, ast.UnaryOp) and isinstance(parent.op, ast.Not)
    )


def _called(node: ast.AST, parent: ast.AST) -> bool:
    return isinstance(parent, ast.Call) and parent.func is node
