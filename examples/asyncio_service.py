"""A service answers many clients from the device, and its event loop never waits.

Teaches: `await` the future of a read; requests share the device, each with buffers of its own.
Shows:   a hundred clients at once, each answer checked, and how often the loop did something else meanwhile.
Needs:   NumPy. With a CUDA device the kernel runs there; without one, on the simulated device.
"""

import asyncio

import numpy as np

import cuglue
from cuglue import In, Kernel, Out, Runtime

N = 4096
KERNELS: dict[str, str] = {
    "polynomial": """
    extern "C" __global__ void polynomial(const float* x, float* y, float a, float b, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) y[i] = (a * x[i] + b) * x[i];
    }"""
}


def polynomial_sim(grid, block, x, y, a, b, n):
    y[:n] = (a * x[:n] + b) * x[:n]


POLYNOMIAL = Kernel("polynomial", KERNELS["polynomial"], sim=polynomial_sim)


async def answer(rt: Runtime, request: np.ndarray, a: float, b: float) -> np.ndarray:
    """What the service does for one client. Everything before `await` only enqueues."""
    stream = rt.stream(int(a))  # the runtime's own streams, by number
    with rt.create(request, stream=stream) as x, rt.empty(request.nbytes, stream=stream) as y:
        rt.launch(POLYNOMIAL, N // 256, 256, In(x), Out(y), a, b, N, stream=stream)
        result = rt.read(y, dtype="f4", stream=stream)
    return np.asarray(await result)  # the buffers are given back already; the device is told in order


async def client(rt: Runtime, number: int) -> bool:
    x = np.linspace(-1, 1, N, dtype="f4") * number
    a, b = float(number % 7), 0.5
    y = await answer(rt, x, a, b)
    return bool(np.allclose(y, (a * x + b) * x, rtol=1e-5, atol=1e-5))


async def serve(rt: Runtime) -> None:
    ticks = 0

    async def something_else() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    background = asyncio.create_task(something_else())
    right = await asyncio.gather(*(client(rt, number) for number in range(100)))
    background.cancel()
    print(f"the loop went round {ticks} times meanwhile")
    print(f"{len(right)} answers, all right: {all(right)}")


def main() -> None:
    if not cuglue.is_cuda_available():
        cuglue.use_driver("sim")
    with Runtime() as rt:
        asyncio.run(serve(rt))


if __name__ == "__main__":
    main()
