"""The CUDA error codes that the simulated device answers with, and the errors made of them.

Owns code -> name and the shape of a refusal. Must not know why a call is refused: the call says so.
"""

from __future__ import annotations

from ...errors import DevicePoisoned, DriverError, LaunchError

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
INITIALIZATION_ERROR = 3
INVALID_CONFIGURATION = 9
INVALID_PITCH = 12
INVALID_DEVICE = 101
ALREADY_MAPPED = 208
NOT_MAPPED = 211
NOT_MAPPED_AS_POINTER = 213
INVALID_GRAPHICS_CONTEXT = 219
OPERATING_SYSTEM = 304
INVALID_RESOURCE_HANDLE = 400
ILLEGAL_STATE = 401
NOT_READY = 600
ILLEGAL_ADDRESS = 700
LAUNCH_FAILURE = 719
NOT_PERMITTED = 800
NOT_SUPPORTED = 801
CAPTURE_UNSUPPORTED = 900
CAPTURE_INVALIDATED = 901
CAPTURE_MERGE = 902
CAPTURE_UNMATCHED = 903
CAPTURE_UNJOINED = 904
CAPTURE_ISOLATION = 905
CAPTURE_IMPLICIT = 906
CAPTURED_EVENT = 907
CAPTURE_WRONG_THREAD = 908
UNKNOWN = 999

NAMES = {
    INITIALIZATION_ERROR: "cudaErrorInitializationError",
    INVALID_VALUE: "cudaErrorInvalidValue",
    OUT_OF_MEMORY: "cudaErrorMemoryAllocation",
    INVALID_CONFIGURATION: "cudaErrorInvalidConfiguration",
    INVALID_PITCH: "cudaErrorInvalidPitchValue",
    INVALID_DEVICE: "cudaErrorInvalidDevice",
    ALREADY_MAPPED: "cudaErrorAlreadyMapped",
    NOT_MAPPED: "cudaErrorNotMapped",
    NOT_MAPPED_AS_POINTER: "cudaErrorNotMappedAsPointer",
    INVALID_GRAPHICS_CONTEXT: "cudaErrorInvalidGraphicsContext",
    OPERATING_SYSTEM: "cudaErrorOperatingSystem",
    INVALID_RESOURCE_HANDLE: "cudaErrorInvalidResourceHandle",
    ILLEGAL_STATE: "cudaErrorIllegalState",
    NOT_READY: "cudaErrorNotReady",
    ILLEGAL_ADDRESS: "cudaErrorIllegalAddress",
    LAUNCH_FAILURE: "cudaErrorLaunchFailure",
    NOT_PERMITTED: "cudaErrorNotPermitted",
    NOT_SUPPORTED: "cudaErrorNotSupported",
    CAPTURE_UNSUPPORTED: "cudaErrorStreamCaptureUnsupported",
    CAPTURE_INVALIDATED: "cudaErrorStreamCaptureInvalidated",
    CAPTURE_MERGE: "cudaErrorStreamCaptureMerge",
    CAPTURE_UNMATCHED: "cudaErrorStreamCaptureUnmatched",
    CAPTURE_UNJOINED: "cudaErrorStreamCaptureUnjoined",
    CAPTURE_ISOLATION: "cudaErrorStreamCaptureIsolation",
    CAPTURE_IMPLICIT: "cudaErrorStreamCaptureImplicit",
    CAPTURED_EVENT: "cudaErrorCapturedEvent",
    CAPTURE_WRONG_THREAD: "cudaErrorStreamCaptureWrongThread",
    UNKNOWN: "cudaErrorUnknown",
}


def name_of(code: int) -> str:
    """CUDA's name of ``code``."""
    return NAMES.get(code, f"cudaError{code}")


def refused(code: int, call: str, what: str, *, got: object = None, expected: object = None) -> DriverError:
    """The error of a refused call."""
    return DriverError(what, got=got, expected=expected, code=code, name=name_of(code), call=call)


def launch_refused(code: int, what: str, *, got: object = None, expected: object = None) -> LaunchError:
    """The error of a refused launch."""
    return LaunchError(what, got=got, expected=expected, code=code, name=name_of(code), call="kernel_launch")


def poisoned(code: int, call: str, what: str) -> DevicePoisoned:
    """The sticky error of a device on which a kernel faulted."""
    return DevicePoisoned(what, code=code, name=name_of(code), call=call)
