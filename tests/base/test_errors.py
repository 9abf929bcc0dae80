"""The error tree: who is a kind of what, how each message reads, and that errors survive pickling."""

import inspect
import pickle

import pytest

from cuglue import errors as e

ALL = [c for _, c in inspect.getmembers(e, inspect.isclass) if issubclass(c, e.CuglueError)]

#: child -> the classes it must also be, design.md's tree.
TREE = {
    e.ClosedError: (e.UsageError,),
    e.BusyError: (e.UsageError,),
    e.MapConflictError: (e.UsageError,),
    e.WrongThreadError: (e.UsageError,),
    e.NoContextError: (e.UsageError,),
    e.LayoutError: (e.UsageError, ValueError),
    e.SizeTypeError: (e.LayoutError, TypeError),
    e.NotAllocatedError: (e.UsageError,),
    e.StaleHandleError: (e.UsageError,),
    e.AlreadyTransferredError: (e.UsageError,),
    e.StreamMisuse: (e.UsageError,),
    e.DevicePoisoned: (e.DriverError,),
    e.OutOfMemory: (e.ResourceError, MemoryError),
    e.OutOfBudget: (e.OutOfMemory, MemoryError),
    e.BufferTooBig: (e.OutOfMemory, MemoryError),
    e.PoolCapacityExceeded: (e.OutOfMemory, MemoryError),
    e.UseAfterFree: (e.ResourceError,),
    e.OutOfBounds: (e.ResourceError,),
    e.StorageHandleNotFound: (e.ResourceError, LookupError),
    e.PoolsInUse: (e.ResourceError,),
}

MESSAGES = [
    (
        e.UsageError("stream", got="'x'", expected="an int", hint="Pass 0"),
        "stream: got 'x', expected an int. Pass 0",
    ),
    (e.LayoutError("strides", expected="positive ones"), "strides: expected positive ones"),
    (
        e.SizeTypeError("size", got="1.5", expected="an int of bytes"),
        "size: got 1.5, expected an int of bytes",
    ),
    (e.ClosedError("map of GLBuffer 7 was released"), "map of GLBuffer 7 was released"),
    (
        e.DriverError(
            "mapping GLBuffer 7", code=208, name="cudaErrorAlreadyMapped", call="cudaGraphicsMapResources"
        ),
        "mapping GLBuffer 7: cudaGraphicsMapResources returned cudaErrorAlreadyMapped (208)",
    ),
    (
        e.DriverError(
            code=304, name="OS", call="register", findings={"renderer": "llvmpipe", "thread": "MainThread"}
        ),
        "register returned OS (304)\n  - renderer: llvmpipe\n  - thread: MainThread",
    ),
    (
        e.DriverError("x", code=1, name="n", call="c", findings=["a", "b"]),
        "x: c returned n (1)\n  - a\n  - b",
    ),
    (
        e.OutOfBudget(current=8192, requested=9216, limit=16384),
        "device memory budget exceeded: current=8192, requested=9216, required=17408, limit=16384, remaining=8192 "
        "bytes. Free arrays or raise the limit",
    ),
    (
        e.SeveralErrors(errors=[ValueError("a"), KeyError("b")]),
        "several failures\n  1. ValueError: a\n  2. KeyError: 'b'",
    ),
]


@pytest.mark.parametrize(("child", "parents"), TREE.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_tree(child, parents):
    assert issubclass(child, parents)
    for parent in parents:
        assert issubclass(child, parent)
    assert child.__doc__


@pytest.mark.parametrize(("error", "text"), MESSAGES, ids=lambda x: type(x).__name__)
def test_message(error, text):
    assert str(error) == text


def test_budget_error_saturates_what_remains_and_lists_its_fields_in_order():
    error = e.OutOfBudget(current=20, requested=1, limit=16)
    assert error.remaining == 0
    assert e.OutOfBudget.FIELDS[:5] == ("current", "requested", "required", "limit", "remaining")


@pytest.mark.parametrize("cls", ALL, ids=lambda c: c.__name__)
def test_every_error_takes_the_same_words_and_survives_pickling(cls):
    error = cls("the object", got="that", expected="this", hint="Do so")
    for name in cls.FIELDS:
        assert hasattr(error, name)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert str(again) == str(error)
    assert again.__dict__ == error.__dict__


def test_an_unknown_field_is_a_mistake_at_the_raise_site():
    with pytest.raises(TypeError, match="has no field"):
        e.UsageError("x", code=3)


def test_the_names_of_the_seed_documents_mean_the_same_classes():
    assert e.HandleClosed is e.ClosedError
    assert e.NoGLContext is e.NoContextError
    assert e.UnsupportedStrides is e.LayoutError
