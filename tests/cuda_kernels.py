"""Kernels that the driver's own tests launch."""

SOURCE = r"""
extern "C" __global__ void nothing() {}
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
