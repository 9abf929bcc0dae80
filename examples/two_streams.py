"""A pipeline on two streams: the next piece is uploaded while the device computes on the last one.

Teaches: buffers carry their order with them: no event, no wait and no lock in this file; profiles tell the time.
Shows:   a timeline of both streams, and how much of the uploads ran beside a kernel.
Needs:   NumPy. Without a CUDA device it runs on the simulated one, which does one thing at a time: order, not speed.
"""

import numpy as np

import cuglue
from cuglue import InOut, Kernel, Out, Runtime

PIECES, N, ROUNDS = 6, 1 << 21, 1200
KERNELS: dict[str, str] = {
    "relax": """
    extern "C" __global__ void relax(float* x, int rounds, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        float v = x[i];
        for (int k = 0; k < rounds; ++k) v = 0.5f * (v + 2.0f / v);  // towards the square root of two
        x[i] = v;
    }"""
}


def relax_sim(grid, block, x, rounds, n):
    for _ in range(rounds):
        x[:n] = np.float32(0.5) * (x[:n] + np.float32(2) / x[:n])


RELAX = Kernel("relax", KERNELS["relax"], sim=relax_sim)


def timeline(rows) -> None:
    """Print a bar for each profile, on one scale, and the share of the uploads beside which a kernel ran."""
    first = rows[0][1]
    spans = [(name, profile.begins_after(first), profile.milliseconds) for name, profile in rows]
    end = max(start + length for _, start, length in spans)
    for name, start, length in spans:
        left, width = round(start / end * 60), max(1, round(length / end * 60))
        print(f"{name:10s}|{' ' * left}{'#' * width:{62 - left}}| {start:7.3f} + {length:.3f} ms")
    uploads, kernels = (
        [(s, s + n) for name, s, n in spans if name.startswith(kind)] for kind in ("upload", "compute")
    )
    both = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in uploads for b in kernels)
    print(f"uploads beside a kernel: {both / sum(end - start for start, end in uploads):.0%} of their time")


def main() -> None:
    simulated = not cuglue.is_cuda_available()
    if simulated:
        cuglue.use_driver("sim")
    n = N >> 8 if simulated else N
    pieces = np.random.default_rng(0).uniform(1, 3, (PIECES, n)).astype("f4")
    with Runtime() as rt:
        upload, compute = rt.stream(0), rt.stream(1)
        with rt.command(stream=upload) as cmd:  # pinned memory: the bus reads it without the processor
            sources = [cmd.reserve_cpu(piece.nbytes) for piece in pieces]
        for source, piece in zip(sources, pieces, strict=True):
            source.view("f4")[:] = piece
        buffers = [rt.empty(4 * n, stream=upload) for _ in pieces]
        with rt.empty(4, stream=compute) as first:  # the first launch compiles; it is not what is measured
            rt.launch(RELAX, 1, 1, InOut(first), 0, 1, stream=compute)
        rt.synchronize()
        rows = []
        for number, (source, x) in enumerate(zip(sources, buffers, strict=True)):
            with rt.profile(upload) as sent, rt.command(Out(x), stream=upload) as cmd:
                cmd.write_to_gpu(x.descriptor(n, "f4"), source)
            with rt.profile(compute) as computed:  # waits on the device for this piece, not for the next ones
                rt.launch(RELAX, (n + 255) // 256, 256, InOut(x), ROUNDS, n, stream=compute)
            rows += [(f"upload {number}", sent), (f"compute {number}", computed)]
        roots = np.stack([rt.read(x, dtype="f4", stream=compute).result() for x in buffers])
        timeline(rows)
    print("largest error:", float(np.abs(roots - np.sqrt(2)).max()))


if __name__ == "__main__":
    main()
