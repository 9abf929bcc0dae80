/* COM objects as d3d11.h declares them, as far as they are called; every call is counted, every argument kept. */
#include <stdint.h>
#include <string.h>

typedef int32_t HRESULT;
typedef uint32_t UINT;
typedef struct { uint32_t a; uint16_t b, c; uint8_t d[8]; } GUID;
typedef struct { UINT Count, Quality; } DXGI_SAMPLE_DESC;
typedef struct {
    UINT Width, Height, MipLevels, ArraySize;
    int Format;
    DXGI_SAMPLE_DESC SampleDesc;
    int Usage;
    UINT BindFlags, CPUAccessFlags, MiscFlags;
} D3D11_TEXTURE2D_DESC;

typedef struct Object { void **table; int references; } Object;

static D3D11_TEXTURE2D_DESC desc;
static int dimension, protection, no_multithread, wrong_calls;
static GUID asked;

static const GUID IID_ID3D11Multithread = {
    0x9b7e4e00, 0x342c, 0x4106, {0xa1, 0x9f, 0x4f, 0x27, 0x04, 0xf6, 0x89, 0xf0}};

static Object texture, device, context, multithread;

static UINT AddRef(Object *self) { return (UINT)++self->references; }
static UINT Release(Object *self) { return (UINT)--self->references; }
static HRESULT Wrong(Object *self) { wrong_calls++; return -1; }

static HRESULT QueryInterface(Object *self, const GUID *name, void **out) {
    if (self != &context) wrong_calls++;
    asked = *name;
    *out = 0;
    if (no_multithread || memcmp(name, &IID_ID3D11Multithread, sizeof *name)) return (HRESULT)0x80004002;
    multithread.references++;
    *out = &multithread;
    return 0;
}
static void GetDevice(Object *self, void **out) {
    if (self != &texture) wrong_calls++;
    device.references++;
    *out = &device;
}
static void GetType(Object *self, int *out) { *out = dimension; }
static void GetDesc(Object *self, D3D11_TEXTURE2D_DESC *out) { *out = desc; }
static void GetImmediateContext(Object *self, void **out) {
    if (self != &device) wrong_calls++;
    context.references++;
    *out = &context;
}
static int SetMultithreadProtected(Object *self, int on) {
    int before = protection;
    if (self != &multithread) wrong_calls++;
    protection = on;
    return before;
}

static void *tables[4][64];

void *fake_texture(UINT width, UINT height, int format) {
    Object *all[4] = {&texture, &device, &context, &multithread};
    for (int i = 0; i < 4; i++) {
        for (int place = 0; place < 64; place++) tables[i][place] = (void *)Wrong;
        tables[i][0] = (void *)QueryInterface;
        tables[i][1] = (void *)AddRef;
        tables[i][2] = (void *)Release;
        all[i]->table = tables[i];
        all[i]->references = 1;
    }
    tables[0][3] = (void *)GetDevice;
    tables[0][7] = (void *)GetType;
    tables[0][10] = (void *)GetDesc;
    tables[1][40] = (void *)GetImmediateContext;
    tables[3][5] = (void *)SetMultithreadProtected;
    memset(&desc, 0, sizeof desc);
    desc.Width = width;
    desc.Height = height;
    desc.MipLevels = desc.ArraySize = desc.SampleDesc.Count = 1;
    desc.Format = format;
    dimension = 3;
    protection = no_multithread = wrong_calls = 0;
    return &texture;
}

D3D11_TEXTURE2D_DESC *fake_desc(void) { return &desc; }
void fake_dimension(int value) { dimension = value; }
void fake_no_multithread(void) { no_multithread = 1; }
int fake_protection(void) { return protection; }
int fake_wrong_calls(void) { return wrong_calls; }
const GUID *fake_asked(void) { return &asked; }
UINT fake_desc_bytes(void) { return sizeof(D3D11_TEXTURE2D_DESC); }
int fake_references(int which) {
    Object *all[4] = {&texture, &device, &context, &multithread};
    return all[which]->references;
}

/* What nvcuda.dll has of Direct3D 11. */
static void *registered;
static UINT flags_given;
static int answer;

int cuGraphicsD3D11RegisterResource(void **out, void *resource, UINT flags) {
    registered = resource;
    flags_given = flags;
    *out = answer ? 0 : (void *)0x7700;
    return answer;
}
void fake_answer(int value) { answer = value; }
void *fake_registered(void) { return registered; }
UINT fake_flags(void) { return flags_given; }
