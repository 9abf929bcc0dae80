"""Judges mutants: the tests that reach a site run over it changed, until the first one fails.

Owns the choice and the order of the tests, and the verdicts. Must not know how a mutant is made or a test is run.

First the tests of the layer run once with the sites marked, which tells who reaches what and how long that takes. Then
each mutant meets those tests alone: the ones that caught its neighbours first, then the quickest. What lives through
them meets the tests of the other layers in the same way.
"""

from __future__ import annotations

import queue
import tempfile
import threading
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .mutate import Mutant, mutants_of
from .probes import with_probes
from .sites import find_sites
from .slow import first_failure
from .trees import BrokenTree, Ran, Tree

#: The layers whose sites are judged, and what judges them.
LAYERS = ("core", "exchange", "memory", "graphics", "command")
TESTS = tuple(f"tests/{name}" for name in (*LAYERS, "prove"))
#: These run the tools of this folder, processes of their own, or as long as they are told to.
NOT_JUDGES = tuple(
    f"tests/prove/test_{name}.py" for name in ("mutation_runner", "exits", "fuzz", "soak", "programs_machine")
)
EQUIVALENTS = Path(__file__).with_name("equivalents.toml")
#: Tests that caught mutants of the same module and are asked first.
_NEIGHBOURS = 8


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the tests said of one mutant.

    Attributes:
        status: "caught", "equivalent" (nobody can tell, see ``by``) or "survived".
        by: the test that failed, or the argument; of survivors how many tests ran.
    """

    mutant: Mutant
    status: str
    by: str
    seconds: float


def mutants_in(package: Path, only: Sequence[str] = ()) -> list[Mutant]:
    """Every mutant of the layers, or those whose key begins with one of ``only``."""
    found = []
    for layer in LAYERS:
        for path in sorted((package / layer).rglob("*.py")):
            for site in find_sites(path.read_text(), path.relative_to(package).as_posix()):
                found += [m for m in mutants_of(site) if not only or m.key.startswith(tuple(only))]
    return found


def read_equivalents(path: Path = EQUIVALENTS) -> dict[str, str]:
    """Mutants that no test can tell from the original, each with the argument why."""
    if not path.exists():
        return {}
    with path.open("rb") as file:
        table = tomllib.load(file)
    return {entry["mutant"]: " ".join(entry["because"].split()) for entry in table.get("equivalent", [])}


class Judge:
    """Copies of one tree and the tests in it.

    Args:
        root: the tree; nothing is written there.
        package: the package in it, relative to ``root``.
        seconds: limit for one mutant.
        test_seconds: least limit of one test; slower ones have ten times what they need. One that hangs catches.
        jobs: copies that work at the same time.
        tests: folders or files that judge, instead of :data:`TESTS`.
    """

    def __init__(
        self,
        root: Path,
        package: str = "src/cuglue",
        *,
        seconds: float = 600.0,
        test_seconds: float = 5.0,
        jobs: int = 1,
        tests: Sequence[str] = (),
    ) -> None:
        self._root = root
        self._package = package
        self._seconds = seconds
        self._test_seconds = test_seconds
        self._jobs = jobs
        self._judges = [t for t in tests or TESTS if _has_tests(root / t)]
        self._cost: dict[str, float] = {}
        self._reaching: dict[str, list[str]] = defaultdict(list)
        self._caught: dict[str, Counter[str]] = defaultdict(Counter)

    def run(
        self,
        mutants: Iterable[Mutant],
        equivalents: dict[str, str],
        *,
        report: Callable[[Verdict], None] = lambda _: None,
    ) -> list[Verdict]:
        """Judge every mutant that is not listed as equivalent.

        Raises:
            BrokenTree: the tests do not pass on the unchanged tree.
        """
        mutants = list(mutants)
        verdicts = [
            Verdict(m, "equivalent", equivalents[m.key], 0.0) for m in mutants if m.key in equivalents
        ]
        chosen = [m for m in mutants if m.key not in equivalents]
        if not chosen:
            return verdicts
        with tempfile.TemporaryDirectory(prefix="cuglue-prove-") as folder:
            trees = self._trees(Path(folder), {m.site.module for m in chosen})
            try:
                near, far = self._files(trees, chosen)
                self._reach(trees, chosen, near)
                judged = self._judge_all(trees, chosen, report if not far else _unless_survived(report))
                living = [v.mutant for v in judged if v.status == "survived"]
                verdicts += [v for v in judged if v.status != "survived" or not far]
                if living and far:
                    self._reaching.clear()  # those have been asked
                    self._reach(trees, living, far)
                    verdicts += self._judge_all(trees, living, report)
            finally:
                for tree in trees:
                    tree.close()
        return verdicts

    def _trees(self, folder: Path, modules: set[str]) -> list[Tree]:
        if not self._judges:
            raise BrokenTree("there were no tests on the unchanged tree")
        source = self._root / self._package
        names = sorted(_dotted(source.name, m) for m in modules) if (source / "__init__.py").is_file() else []
        return [Tree(self._root, folder / str(i), self._judges, NOT_JUDGES, names) for i in range(self._jobs)]

    # --- who reaches what -----------------------------------------------------------------------------------------
    def _files(self, trees: list[Tree], mutants: list[Mutant]) -> tuple[list[list[str]], list[list[str]]]:
        """The tests of each file, the longest first: those of the mutants' layers, and the others."""
        by_file = defaultdict(list)
        for test in next(iter([tree.collected() for tree in trees])):
            by_file[test.split("::")[0]].append(test)
        files = sorted(by_file.values(), key=len, reverse=True)
        layers = tuple(f"tests/{layer}/" for layer in {_layer(m) for m in mutants})
        near = [tests for tests in files if tests[0].startswith(layers)] or files
        return near, [tests for tests in files if tests not in near]

    def _reach(self, trees: list[Tree], mutants: list[Mutant], files: list[list[str]]) -> None:
        """Run every test once with the sites marked."""
        sites = list({m.site.key: m.site for m in mutants}.values())
        files = list(files)
        lock = threading.Lock()
        failed: list[str] = []

        def reach(tree: Tree) -> None:
            patches = []
            for module in sorted({site.module for site in sites}):
                source = (path := tree.path / self._package / module).read_text()
                marked = with_probes(source, [(n, s) for n, s in enumerate(sites) if s.module == module])
                patches.append((path, source, marked))
            while True:
                with lock:
                    if not files or failed:
                        return
                    some = files.pop(0)
                ends: list[str] = []
                for ran in tree.run([(test, 120.0) for test in some], patches, stop=False):
                    if isinstance(ran, str):
                        ends.append(ran)
                        continue
                    if ran.failed:
                        ends.append(f"{ran.test} failed")
                    self._note(ran, [sites[n].key for n in ran.sites], lock)
                failed.extend(end for end in ends if end != "done")

        _in_threads(reach, trees)
        if failed:
            raise BrokenTree(f"on the unchanged tree: {', '.join(failed)}")

    def _note(self, ran: Ran, keys: list[str], lock: threading.Lock) -> None:
        with lock:
            self._cost[ran.test] = ran.seconds
            for key in keys:
                self._reaching[key].append(ran.test)

    # --- the verdicts ---------------------------------------------------------------------------------------------
    def _judge_all(
        self, trees: list[Tree], mutants: list[Mutant], report: Callable[[Verdict], None]
    ) -> list[Verdict]:
        work: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
        for mutant in mutants:
            work.put(mutant)
        verdicts: list[Verdict] = []
        lock = threading.Lock()

        def judge(tree: Tree) -> None:
            while True:
                try:
                    mutant = work.get_nowait()
                except queue.Empty:
                    return
                verdict = self._judge(tree, mutant)
                with lock:
                    verdicts.append(verdict)
                    report(verdict)

        _in_threads(judge, trees)
        return verdicts

    def _judge(self, tree: Tree, mutant: Mutant) -> Verdict:
        path = tree.path / self._package / mutant.site.module
        original = path.read_text()
        changed, tests = mutant.apply(original), self._tests(mutant)
        if not tests:
            return Verdict(mutant, "survived", "no test reaches it", 0.0)
        began = time.monotonic()
        by = self._first_to_notice(tree, path, changed, tests)
        seconds = time.monotonic() - began
        if not by:
            return Verdict(mutant, "survived", f"{len(tests)} tests", seconds)
        self._caught[mutant.site.module][by] += 1
        return Verdict(mutant, "caught", by, seconds)

    def _first_to_notice(self, tree: Tree, path: Path, changed: str, tests: list[str]) -> str:
        """The test that fails over the changed module and not in the same order without; empty if none does."""
        while tests:
            original = path.read_text()
            limits = [(test, max(self._test_seconds, 10 * self._cost[test])) for test in tests]
            failed = last = ""
            ran: list[str] = []
            with tree.changed(path, changed):
                for told in tree.run(limits, [(path, original, changed)]):
                    if isinstance(told, str):
                        last = told
                        continue
                    ran.append(told.test)
                    if told.failed:
                        failed = told.test
                if last in ("hung", "crashed"):
                    return f"the process {last}"
                if last not in ("done", "failed"):  # the code could not be put in place
                    return first_failure(tree.path, tests, self._seconds)
            if not failed or list(tree.run(limits[: len(ran)]))[-1] == "done":
                return failed
            tests = [test for test in tests if test not in ran]  # it fails in this order anyway
        return ""

    def _tests(self, mutant: Mutant) -> list[str]:
        """Those that reach the site, the likeliest to notice first."""
        reaching = self._reaching[mutant.site.key]
        neighbours = self._caught[mutant.site.module]
        first = sorted(set(reaching) & set(neighbours), key=lambda t: (-neighbours[t], self._cost[t]))
        first = first[:_NEIGHBOURS]
        rest = sorted(
            set(reaching) - set(first),
            key=lambda t: (self._cost[t] + 1.0 * (not self._is_near(t, mutant)), t),
        )
        return [*first, *rest]

    def _is_near(self, test: str, mutant: Mutant) -> bool:
        return test.startswith(f"tests/{_layer(mutant)}/")


def _layer(mutant: Mutant) -> str:
    return mutant.site.module.split("/")[0]


def _unless_survived(report: Callable[[Verdict], None]) -> Callable[[Verdict], None]:
    """Of those that live through the tests of their layer nothing can be said yet."""
    return lambda verdict: None if verdict.status == "survived" else report(verdict)


def _dotted(package: str, module: str) -> str:
    return f"{package}.{module.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__")


def _has_tests(path: Path) -> bool:
    return path.is_file() or any(path.rglob("test_*.py"))


def _in_threads(function: Callable[[Tree], None], trees: list[Tree]) -> None:
    """Call ``function`` for each tree at the same time; raises what one of them raised."""
    errors: list[BaseException] = []

    def call(tree: Tree) -> None:
        try:
            function(tree)
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread that asked
            errors.append(error)

    threads = [threading.Thread(target=call, args=(tree,)) for tree in trees]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
