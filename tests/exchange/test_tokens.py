"""Live exports are counted exactly, wherever and however their holders go away."""

from __future__ import annotations

import gc
import sys
import threading
import warnings

import pytest

from cuglue.errors import BusyError, DanglingExportWarning
from cuglue.exchange import ExportLedger
from cuglue.exchange.tokens import cai_holders, strict_mode


class Owner:
    pass


def test_an_export_is_live_until_its_last_holder_is_gone():
    ledger, owner = ExportLedger(), Owner()
    first, second = ledger.issue(owner, "DLPack"), ledger.issue(owner, "cupy()")
    assert [e.how for e in ledger.live()] == ["DLPack", "cupy()"]
    also = first
    del first
    assert len(ledger.live()) == 2
    del also
    assert [e.how for e in ledger.live()] == ["cupy()"]
    del second
    assert ledger.live() == ()


def test_a_token_keeps_the_owner_alive():
    ledger, owner = ExportLedger(), Owner()
    token = ledger.issue(owner, "DLPack")
    count = sys.getrefcount(owner)
    assert token.owner is owner
    del token
    assert sys.getrefcount(owner) == count - 1


def test_the_line_outside_the_library_is_named():
    ledger, owner = ExportLedger(), Owner()
    namespace = {"__name__": "torch.utils.dlpack", "issue": ledger.issue, "owner": owner}
    exec("def from_dlpack():\n    return issue(owner, 'DLPack')", namespace)
    line = sys._getframe().f_lineno + 1
    token = namespace["from_dlpack"]()
    (export,) = ledger.live()
    assert (export.filename, export.line) == (__file__, line), "PyTorch's own file is not the user's line"
    assert str(export) == f"DLPack at {__file__}:{line}"
    del token


def test_holders_in_cycles_and_on_other_threads():
    ledger, owner = ExportLedger(), Owner()
    cycle = [ledger.issue(owner, "cycle")]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert ledger.live() == ()

    tokens = [ledger.issue(owner, "thread") for _ in range(400)]
    parts = [tokens[n::4] for n in range(4)]
    threads = [threading.Thread(target=part.clear) for part in parts]
    del tokens
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.live() == ()


def test_a_ledger_that_nobody_asks_does_not_grow():
    ledger, owner = ExportLedger(), Owner()
    kept = ledger.issue(owner, "kept")
    for _ in range(5000):
        ledger.issue(owner, "loop")
    assert len(ledger._live) + len(ledger._dropped) < 300
    assert [e.how for e in ledger.live()] == ["kept"]
    del kept


def test_leaving_with_nothing_alive_is_silent():
    ledger = ExportLedger()
    del_me = ledger.issue(Owner(), "DLPack")
    del del_me
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ledger.check_leave("map", strict=False)
        ledger.check_leave("map", strict=True)


def test_leaving_with_live_exports_warns_and_names_the_line():
    ledger, owner = ExportLedger(), Owner()
    token = ledger.issue(owner, "DLPack")
    line = ledger.live()[0].line
    with pytest.warns(DanglingExportWarning) as caught:
        ledger.check_leave("GLBuffer 7", strict=False)
    assert f"{__file__}:{line}" in str(caught[0].message)
    assert "GLBuffer 7" in str(caught[0].message)
    assert caught[0].filename == __file__, "the warning points at the line that left"
    assert token.owner is owner


def test_strict_mode_raises(monkeypatch):
    ledger = ExportLedger()
    token = ledger.issue(Owner(), "DLPack")
    monkeypatch.setenv("CUGLUE_STRICT", "1")
    assert strict_mode()
    with pytest.raises(BusyError, match="DLPack at"):
        ledger.check_leave("map")
    for off in ("0", ""):
        monkeypatch.setenv("CUGLUE_STRICT", off)
        assert not strict_mode()
    monkeypatch.delenv("CUGLUE_STRICT")
    with pytest.warns(DanglingExportWarning):
        ledger.check_leave("map")
    del token


def test_strict_mode_finds_readers_of_the_cuda_array_interface():
    from cupy.cuda import UnownedMemory

    ledger, owner = ExportLedger(), Owner()
    ledger.check_leave("map", strict=True, reader=owner)
    memory = UnownedMemory(0x1000, 64, owner, 0)  # what cupy.asarray keeps
    assert any("UnownedMemory" in holder for holder in cai_holders(owner))
    with pytest.raises(BusyError, match="__cuda_array_interface__ read by cupy"):
        ledger.check_leave("map", strict=True, reader=owner)
    ledger.check_leave("map", strict=False, reader=owner)  # not counted: no warning that might be wrong
    del memory
    ledger.check_leave("map", strict=True, reader=owner)
