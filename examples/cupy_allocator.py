"""Every cuglue resource is a CuPy allocator.

Teaches: `cupy.cuda.set_allocator(resource.malloc)`, and `with resource.as_cupy_allocator()` for a part of a program.
Shows:   how many bytes CuPy holds, asked of the resource.
Needs:   CuPy. Without a CUDA device CuPy cannot compute, so only `allocate`/`deallocate` run, on the simulated device.
"""

import cuglue


def with_cupy() -> None:
    import cupy as cp

    with cuglue.DirectCudaResource(device=0) as memory:
        with memory.as_cupy_allocator():
            x = cp.arange(1 << 20, dtype="f4")
            y = cp.sqrt(x)
            print(f"CuPy holds {memory.bytes_outstanding} bytes of ours, sqrt(9) = {float(y[9])}")
        del x, y
        memory.reap_pending()
        print(f"after the arrays died: {memory.bytes_outstanding} bytes")


def without_cupy() -> None:
    with cuglue.use_driver("sim"), cuglue.DirectCudaResource(device=0) as memory:
        block = memory.allocate(4 << 20, tag="picture")
        print(f"{block.nbytes} bytes at {block.ptr:#x}, tag {block.tag!r}, {block.state.value}")
        memory.deallocate(block)
        print(f"after deallocate: {memory.bytes_outstanding} bytes outstanding")


def main() -> None:
    if cuglue.is_cuda_available():
        with_cupy()
    else:
        without_cupy()


if __name__ == "__main__":
    main()
