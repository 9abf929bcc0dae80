"""Kernels that the driver's own tests launch, and a latch: work that stays queued until the test lets it run."""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Any, Self

SOURCE = r"""
extern "C" __global__ void hold(volatile int* flag, long long cycles) {
    long long began = clock64();
    while (!*flag && clock64() - began < cycles) {}
}
extern "C" __global__ void arguments(unsigned char* out, signed char a, short b, int c, long long d,
                                     unsigned long long e, float f, double g, bool h) {
    *(signed char*)(out + 0) = a;  *(short*)(out + 2) = b;  *(int*)(out + 4) = c;
    *(long long*)(out + 8) = d;    *(unsigned long long*)(out + 16) = e;
    *(float*)(out + 24) = f;       *(unsigned char*)(out + 28) = h;  *(double*)(out + 32) = g;
}
extern "C" __global__ void add(int* data, int n, int by) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] += by;
}
extern "C" __global__ void invert(cudaSurfaceObject_t image, int width, int height) {
    int x = threadIdx.x, y = blockIdx.x;
    if (x >= width || y >= height) return;
    uchar4 texel;
    surf2Dread(&texel, image, x * 4, y);
    surf2Dwrite(make_uchar4(255 - texel.x, 255 - texel.y, 255 - texel.z, 255 - texel.w), image, x * 4, y);
}
extern "C" __global__ void sample(cudaTextureObject_t image, float* out, int width) {
    float4 texel = tex2D<float4>(image, threadIdx.x + 0.5f, blockIdx.x + 0.5f);
    out[blockIdx.x * width + threadIdx.x] = texel.x;
}
extern "C" __global__ void shared(int* out) {
    extern __shared__ int room[];
    int last = 16 * 1024 - 1;  // the last int of 64 KiB
    room[last] = 7;
    *out = room[last];
}
extern "C" __global__ void fault(int* nowhere) { *nowhere = 1; }
"""

#: What a latch waits at most, in clock cycles: 5 s and more, so that a failing test cannot hang the device.
_CYCLES = 10_000_000_000


class Latch:
    """``with Latch(driver, stream)``: later work of the stream waits until :meth:`release` or the end of the block."""

    def __init__(self, driver: Any, stream: int, device: int = 0) -> None:
        self._driver = driver
        self._stream = stream
        self._flag = driver.host_alloc(64)
        self._view = driver.host_view(self._flag, 4, True)
        self._view[:] = bytes(4)
        kernel = driver.kernel_load("hold", SOURCE, (), device)
        driver.kernel_launch(kernel, (1, 1, 1), (1, 1, 1), (self._flag, _CYCLES), (None, None), 0, stream)

    def release(self) -> None:
        ctypes.c_int.from_address(self._flag).value = 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
        self._driver.stream_synchronize(self._stream)
        self._view.release()
        self._driver.host_free(self._flag)
