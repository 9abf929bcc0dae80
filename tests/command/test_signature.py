"""Parameters are read from CUDA C++ sources as people write them."""

from __future__ import annotations

import pytest

from cuglue import Kernel
from cuglue.command.signature import signature
from cuglue.errors import LaunchError, UsageError

SOURCE = r"""
// __global__ void commented(int a)
#include <cuda_fp16.h>
#define T float
typedef unsigned char byte; using idx = long long int;
const char* text = "extern \"C\" __global__ void quoted(int a)";
extern "C" {
__global__ void __launch_bounds__(256, 2) many(
    const float* __restrict__ x, T *y, unsigned n, byte b, const idx k, unsigned long long int q, float4 const* p,
    cudaSurfaceObject_t s, cudaTextureObject_t t, double d = 1.0, const struct Foo f, void* v, float** pp, int z[],
    complex<float> const c, signed char sc /* , int no */) { if (1) { } }
}
template <typename U> __global__ void templated(U* x) {}
__global__ void mangled(int a) {}
extern "C" __global__
void nothing() {}
extern "C" __global__ void also_nothing(void) {}
extern "C" __global__ void by_macro(ARGUMENTS) {}
extern "C" __global__ void unnamed(unsigned long, std::uint8_t const *, T) {}
static __device__ int helper(int a) { return a; }
extern "C" __global__ void last(int only) { helper(only); }
"""


def test_a_long_list() -> None:
    parameters = signature("many", SOURCE)
    assert parameters is not None
    told = [
        (p.name, p.kind, p.const, None if p.dtype is None else p.dtype.str[1:], p.components)
        for p in parameters
    ]
    assert told == [
        ("x", "pointer", True, "f4", 1),
        ("y", "pointer", False, "f4", 1),
        ("n", "scalar", False, "u4", 1),
        ("b", "scalar", False, "u1", 1),
        ("k", "scalar", False, "i8", 1),
        ("q", "scalar", False, "u8", 1),
        ("p", "pointer", True, "f4", 4),
        ("s", "surface", False, "u8", 1),
        ("t", "texture", False, "u8", 1),
        ("d", "scalar", False, "f8", 1),
        ("f", "opaque", False, None, 1),
        ("v", "pointer", False, None, 1),
        ("pp", "pointer", False, None, 1),
        ("z", "pointer", False, "i4", 1),
        ("c", "scalar", False, "c8", 1),
        ("sc", "scalar", False, "i1", 1),
    ]


def test_empty_lists_unnamed_parameters_and_what_follows_other_functions() -> None:
    assert signature("nothing", SOURCE) == ()
    assert signature("also_nothing", SOURCE) == ()
    assert [str(p) for p in signature("unnamed", SOURCE) or ()] == [
        "unsigned long",
        "std::uint8_t const *",
        "T",
    ]
    assert [str(p) for p in signature("last", SOURCE) or ()] == ["int only"]


def test_a_list_made_by_a_macro_is_not_guessed() -> None:
    assert signature("by_macro", SOURCE) is None


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("templated", "a template"),
        ("mangled", 'extern "C" __global__ void mangled'),
        ("commented", "defines also_nothing, by_macro"),
        ("quoted", "its definition"),
        ("helper", "its definition"),
    ],
)
def test_kernels_that_cannot_be_found_by_name(name: str, says: str) -> None:
    with pytest.raises(LaunchError, match=says):
        signature(name, SOURCE)


def test_a_kernel_checks_what_it_is_made_of() -> None:
    good = 'extern "C" __global__ void k(int a) {}'
    assert repr(Kernel("k", good, options=["-lineinfo"])) == "Kernel(k(int a))"
    for arguments, keywords in [
        (("", good), {}),
        (("k", b"x"), {}),
        (("k", good), {"options": "-lineinfo"}),
        (("k", good), {"sim": 3}),
    ]:
        with pytest.raises(UsageError):
            Kernel(*arguments, **keywords)  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match="no kernel"):
        Kernel("k", "")
