"""The demo's picture processing: edge detection as two kernels, each with its NumPy twin for the simulated device.

Owns the CUDA sources and their twins. Integer arithmetic throughout, so that every device gives the same bytes.
Must not know where the image comes from.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..command.kernels import Kernel

KERNELS = {
    # luma (BT.601 weights in 1/256), then |Sobel x| + |Sobel y|, saturated; the border repeats its own pixels
    "edge_strength": r"""
__device__ int luma(const unsigned char* image, int width, int height, int x, int y) {
    x = min(max(x, 0), width - 1);
    y = min(max(y, 0), height - 1);
    const unsigned char* p = image + 4 * ((size_t)y * width + x);
    return (77 * p[0] + 150 * p[1] + 29 * p[2]) >> 8;
}
extern "C" __global__ void edge_strength(const unsigned char* image, unsigned char* strength, int width, int height) {
    int x = blockIdx.x * blockDim.x + threadIdx.x;
    int y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= width || y >= height) return;
    int l[3][3];
    for (int j = 0; j < 3; ++j)
        for (int i = 0; i < 3; ++i) l[j][i] = luma(image, width, height, x + i - 1, y + j - 1);
    int gx = l[0][2] - l[0][0] + 2 * (l[1][2] - l[1][0]) + l[2][2] - l[2][0];
    int gy = l[2][0] - l[0][0] + 2 * (l[2][1] - l[0][1]) + l[2][2] - l[0][2];
    strength[(size_t)y * width + x] = (unsigned char)min(255, abs(gx) + abs(gy));
}
""",
    "paint_edges": r"""
extern "C" __global__ void paint_edges(const unsigned char* strength, unsigned char* image, int width, int height) {
    int x = blockIdx.x * blockDim.x + threadIdx.x;
    int y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= width || y >= height) return;
    size_t at = (size_t)y * width + x;
    unsigned char s = strength[at];
    image[4 * at + 0] = s;
    image[4 * at + 1] = s;
    image[4 * at + 2] = s;
    image[4 * at + 3] = 255;
}
""",
}

BLOCK = (16, 16)


def grid_for(width: int, height: int) -> tuple[int, int]:
    """Blocks of :data:`BLOCK` threads that cover ``width`` x ``height`` pixels."""
    return -(-width // BLOCK[0]), -(-height // BLOCK[1])


def _strength(
    grid: Any, block: Any, image: NDArray[Any], strength: NDArray[Any], width: int, height: int
) -> None:
    """NumPy twin of ``edge_strength``."""
    texels = image.view(np.uint8).reshape(height, width, 4).astype(np.int32)
    luma = (77 * texels[..., 0] + 150 * texels[..., 1] + 29 * texels[..., 2]) >> 8
    p = np.pad(luma, 1, mode="edge")
    top, mid, low = p[:-2], p[1:-1], p[2:]
    gx = (top[:, 2:] - top[:, :-2]) + 2 * (mid[:, 2:] - mid[:, :-2]) + (low[:, 2:] - low[:, :-2])
    gy = (low[:, :-2] - top[:, :-2]) + 2 * (low[:, 1:-1] - top[:, 1:-1]) + (low[:, 2:] - top[:, 2:])
    strength.view(np.uint8).reshape(height, width)[...] = np.minimum(255, abs(gx) + abs(gy))


def _paint(
    grid: Any, block: Any, strength: NDArray[Any], image: NDArray[Any], width: int, height: int
) -> None:
    """NumPy twin of ``paint_edges``."""
    texels = image.view(np.uint8).reshape(height, width, 4)
    texels[..., :3] = strength.view(np.uint8).reshape(height, width, 1)
    texels[..., 3] = 255


EDGE_STRENGTH = Kernel("edge_strength", KERNELS["edge_strength"], sim=_strength)
PAINT_EDGES = Kernel("paint_edges", KERNELS["paint_edges"], sim=_paint)
