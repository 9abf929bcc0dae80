"""Numbers as callers give them."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuglue
from cuglue.arguments import seconds, shown, whole, whole_of
from cuglue.errors import LayoutError, UsageError

HERE = Path(cuglue.__file__).parent
NO_NUMBERS = [
    None,
    True,
    False,
    np.True_,
    1.0,
    np.float32(1),
    float("nan"),
    "1",
    b"1",
    [1],
    np.array([1, 2]),
    1j,
]


@pytest.mark.parametrize("value", [7, -7, 2**70, np.int64(7), np.uint8(7), np.array(7)])
def test_whole_numbers_are_taken_as_ints(value: Any) -> None:
    assert whole(value) == int(value)
    assert type(whole(value)) is int


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_all_else_is_no_whole_number(value: Any) -> None:
    assert whole(value) is None
    with pytest.raises(UsageError, match=r"thing: got .*, expected an int of 3 or more"):
        whole_of("thing", value, 3)


def test_a_refusal_says_what_its_caller_says() -> None:
    assert whole_of("size", np.int32(0)) == 0
    with pytest.raises(LayoutError, match="size: got -1, expected bytes"):
        whole_of("size", -1, expected="bytes", error=LayoutError)


@pytest.mark.parametrize("value", [0, 0.5, np.float32(0.5), 3, float("inf")])
def test_times(value: Any) -> None:
    assert seconds("timeout", value) == float(value)


@pytest.mark.parametrize("value", [-1, float("nan"), None, True, "1", [1], np.array([1, 2]), 1j])
def test_what_is_no_time(value: Any) -> None:
    with pytest.raises(UsageError, match=r"timeout: got .*, expected 0 or more seconds"):
        seconds("timeout", value)


class Array:
    """An array of a library whose text nobody may ask for."""

    shape, dtype = (2,), "float32"

    def __dlpack__(self) -> None: ...

    def __repr__(self) -> str:
        raise AssertionError("printed")


Array.__module__ = "library.core"


class Tensor(Array):
    """One that says where it is, as PyTorch's do."""

    def data_ptr(self) -> int:
        return 0x7000


class Away(Array):
    """One whose memory cannot be asked for, as that of a PyTorch tensor without data."""

    def data_ptr(self) -> int:
        raise RuntimeError("no data")


Tensor.__module__ = Away.__module__ = Array.__module__


def test_what_an_error_shows_is_short_and_prints_no_array_of_a_library() -> None:
    named = "a library.Array of shape (2,), float32"
    assert shown(Array()) == named
    assert shown([Array(), 1]) == f"[{named}, 1]"
    assert shown((Array(),)) == f"({named},)"
    assert shown({"a": Array()}) == f"{{'a': {named}}}"
    assert shown(Tensor()) == "a library.Tensor of shape (2,), float32 at 0x7000"
    assert shown(Away()) == "a library.Away of shape (2,), float32"
    assert shown(list(range(20))) == "[0, 1, 2, 3, 4, 5, 6, 7, ...]"
    assert shown(()) == "()"
    assert shown(np.float32(1)) == repr(np.float32(1))


def test_arrays_of_numpy_and_cupy_are_named_with_their_address() -> None:
    host = np.zeros((300, 400), "f4")
    assert shown(host) == f"a numpy.ndarray of shape (300, 400), float32 at {host.ctypes.data:#x}"
    import cupy

    memory = cupy.cuda.UnownedMemory(0x7000, 64, None, 0)
    array = cupy.ndarray((3, 2), "f4", memptr=cupy.cuda.MemoryPointer(memory, 4))
    assert shown(array) == "a cupy.ndarray of shape (3, 2), float32 at 0x7004"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (10**5000, "an int of 16610 bits"),  # Python itself refuses to print it
        (2**64, str(2**64)),
        (b"abc", "b'abc'"),
        (bytearray(1 << 20), "a bytearray of 1048576 bytes"),
        (memoryview(bytes(1000)), "a memoryview of 1000 bytes"),
        (None, "None"),
    ],
    ids=["long int", "int", "bytes", "bytearray", "memoryview", "None"],
)
def test_numbers_and_buffers_have_short_words(value: Any, words: str) -> None:
    assert shown(value) == words


def test_what_cannot_be_printed_hides_no_error() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise ValueError("no text")

    class list:
        pass

    assert "list object at" in shown(list())
    assert shown(Broken()).startswith("<Broken instance at")
    with pytest.raises(UsageError, match="size: got <Broken instance"):
        whole_of("size", Broken())
    assert len(shown("x" * 10**6)) < 500
    assert len(shown([[1.5] * 99] * 99)) < 1000


def test_no_error_prints_what_it_was_given() -> None:
    """What callers pass goes through ``shown``: their objects have texts of any length, price and fault."""
    found = []
    for path in sorted(HERE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "got" and _prints(node.value):
                found.append(f"{path.relative_to(HERE)}:{node.value.lineno}")
    assert found == []


def _prints(got: ast.expr) -> bool:
    """Whether the text of something else than an object of ours (self, or a dtype) is made in ``got``."""
    return (
        isinstance(got, ast.Call)
        and isinstance(got.func, ast.Name)
        and got.func.id == "repr"
        and ast.unparse(got.args[0]) not in ("self", "item")
    )
