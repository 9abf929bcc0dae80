"""Promises about kernels, arrays, surfaces and textures.

Owns these tests and their kernels, each with the ``sim`` function that does the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...driver.protocol import Access, ArrayInfo, Span, SurfaceArg, TexelKind
from ...errors import LaunchError
from .case import DriverCase, N

KERNELS: dict[str, str] = {
    "suite_saxpy": """
extern "C" __global__ void suite_saxpy(const float* x, float* y, float a, int n)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
""",
    "suite_invert": """
extern "C" __global__ void suite_invert(cudaSurfaceObject_t image, int width, int height)
{
    const int x = blockIdx.x * blockDim.x + threadIdx.x;
    const int y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= width || y >= height) return;
    uchar4 texel = surf2Dread<uchar4>(image, x * 4, y);
    texel.x = 255 - texel.x;
    surf2Dwrite(texel, image, x * 4, y);
}
""",
    "suite_sample": """
extern "C" __global__ void suite_sample(cudaTextureObject_t image, unsigned int* sums, int width, int height)
{
    const int y = blockIdx.x * blockDim.x + threadIdx.x;
    if (y >= height) return;
    unsigned int sum = 0;
    for (int x = 0; x < width; ++x) sum += tex2D<uchar4>(image, x + 0.5f, y + 0.5f).y;
    sums[y] = sum;
}
""",
}


def _saxpy(grid: object, block: object, x: Any, y: Any, a: Any, n: Any) -> None:
    y[:n] = a * x[:n] + y[:n]


def _invert(grid: object, block: object, image: Any, width: Any, height: Any) -> None:
    image.texels[..., 0] = 255 - image.texels[..., 0]


def _sample(grid: object, block: object, image: Any, sums: Any, width: Any, height: Any) -> None:
    sums[...] = image.texels[..., 1].astype(np.uint32).sum(axis=1)


class KernelTests(DriverCase):
    """Kernels and what only they reach."""

    def test_a_kernel_agrees_with_its_sim_function(self) -> None:
        """Pointers and scalars arrive; the result is NumPy's."""
        n = 1000
        stream, x, y = self.stream(), self.memory(4 * n), self.memory(4 * n)
        random = np.random.default_rng(3)
        left, right = random.random((2, n)).astype(np.float32)
        self.put(x, left, stream)
        self.put(y, right, stream)
        values = (x, y, np.float32(2.5), np.int32(n - 3))
        spans = (
            Span(x, 4 * n, Access.READ, (n,), "<f4", (4,)),
            Span(y, 4 * n, Access.READ_WRITE, (n,), "<f4", (4,)),
            None,
            None,
        )
        kernel = self.kernel("suite_saxpy", KERNELS["suite_saxpy"], _saxpy)
        self.driver.kernel_launch(kernel, (-(-n // 128), 1, 1), (128, 1, 1), values, spans, 0, stream)
        expected = np.concatenate([np.float32(2.5) * left[:-3] + right[:-3], right[-3:]])
        got = self.get(y, 4 * n, stream).view(np.float32)
        np.testing.assert_allclose(got, expected, rtol=1e-6)  # the device fuses multiply and add

    def test_a_bad_launch_is_refused_and_nothing_ran(self) -> None:
        """Too many threads, none at all: a LaunchError at once, and the stream goes on."""
        stream, x = self.stream(), self.memory()
        self.driver.fill_async(x, 1, N, stream)
        kernel = self.kernel("suite_saxpy", KERNELS["suite_saxpy"], _saxpy)
        values = (x, x, np.float32(0), np.int32(4))
        span = Span(x, 16, Access.READ_WRITE, (4,), "<f4", (4,))
        for grid, block in (((1, 1, 1), (2048, 1, 1)), ((0, 1, 1), (1, 1, 1))):
            self.refused(
                lambda grid=grid, block=block: self.driver.kernel_launch(  # type: ignore[misc]
                    kernel, grid, block, values, (span, span, None, None), 0, stream
                ),
                kind=LaunchError,
            )
        assert (self.get(x, N, stream) == 1).all()

    # --- arrays, surfaces, textures -----------------------------------------------------------------------------
    def array(self, width: int, height: int) -> int:
        """An RGBA8 array."""
        array = self.driver.array_create(ArrayInfo(width, height, 0, 8, 4, TexelKind.UINT), self.device)
        self._give_back.append(lambda: self.driver.array_destroy(array))
        return array

    def test_arrays_are_copied_by_rows(self) -> None:
        """Whole and in part, at any pitch."""
        if not self.can.surfaces:
            return
        driver, stream, memory, array = self.driver, self.stream(), self.memory(), self.array(9, 5)
        assert driver.array_info(array, self.device) == ArrayInfo(9, 5, 0, 8, 4, TexelKind.UINT)
        image = np.random.default_rng(1).integers(0, 256, (5, 36), np.uint8)
        self.put(memory, image, stream)
        driver.copy_to_array_async(array, memory, 36, 36, 5, stream)
        driver.fill_async(memory, 0, N, stream)
        driver.copy_from_array_async(memory, 64, array, 20, 4, stream)
        got = self.get(memory, 5 * 64, stream).reshape(5, 64)
        assert (got[:4, :20] == image[:4, :20]).all()
        assert not got[4:].any()
        assert not got[:, 20:].any()

    def test_surfaces_and_textures(self) -> None:
        """A kernel reads and writes texels through a surface and reads them through a texture."""
        if not self.can.surfaces:
            return
        driver, stream, memory, array = self.driver, self.stream(), self.memory(), self.array(16, 8)
        image = np.random.default_rng(2).integers(0, 256, (8, 16, 4), np.uint8)
        self.put(memory, image, stream)
        driver.copy_to_array_async(array, memory, 64, 64, 8, stream)
        surface, texture = (
            driver.surface_create(array, self.device),
            driver.texture_create(array, self.device),
        )
        sizes = (np.int32(16), np.int32(8))
        driver.kernel_launch(
            self.kernel("suite_invert", KERNELS["suite_invert"], _invert),
            (1, 1, 1),
            (16, 8, 1),
            (surface, *sizes),
            (SurfaceArg(surface, Access.READ_WRITE), None, None),
            0,
            stream,
        )
        driver.copy_from_array_async(memory, 64, array, 64, 8, stream)
        got = self.get(memory, 512, stream).reshape(8, 16, 4)
        assert (got[..., 0] == 255 - image[..., 0]).all()
        assert (got[..., 1:] == image[..., 1:]).all()
        span = Span(memory, 32, Access.WRITE, (8,), "<u4", (4,))
        driver.kernel_launch(
            self.kernel("suite_sample", KERNELS["suite_sample"], _sample),
            (1, 1, 1),
            (8, 1, 1),
            (texture, memory, *sizes),
            (SurfaceArg(texture, Access.READ), span, None, None),
            0,
            stream,
        )
        sums = self.get(memory, 32, stream).view(np.uint32)
        assert (sums == image[..., 1].astype(np.uint32).sum(axis=1)).all()
        driver.surface_destroy(surface)
        driver.texture_destroy(texture)
