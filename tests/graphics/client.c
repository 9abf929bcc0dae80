/* A library that takes client parts as C libraries do: it keeps a copy, retains, and ends the registration itself. */
#include <stddef.h>
#include <string.h>

typedef struct {
    void *context;
    void (*retain)(void *context);
    void (*release)(void *context);
    int (*map)(void *context, void *resource, void **address, size_t *nbytes);
    int (*unmap)(void *context, void *resource);
    int (*unregister)(void *context, void *resource);
    void *resource;
    size_t size;
} cuglue_client_parts;

static cuglue_client_parts taken;

size_t client_parts_bytes(void) { return sizeof(cuglue_client_parts); }

int client_attach(const cuglue_client_parts *parts, size_t wanted) {
    if (!parts->context || !parts->retain || !parts->release || !parts->map || !parts->unmap || !parts->unregister)
        return -1;
    if (parts->size < wanted) return -2;
    parts->retain(parts->context);
    memcpy(&taken, parts, sizeof taken);
    return 0;
}

/* Maps, gives address and size, and unmaps. */
int client_map_once(void **address, size_t *nbytes) {
    int status = taken.map(taken.context, taken.resource, address, nbytes);
    return status ? status : taken.unmap(taken.context, taken.resource);
}

int client_map(void **address, size_t *nbytes) { return taken.map(taken.context, taken.resource, address, nbytes); }

int client_unmap(void) { return taken.unmap(taken.context, taken.resource); }

int client_free(void) {
    int status = taken.unregister(taken.context, taken.resource);
    taken.release(taken.context);
    memset(&taken, 0, sizeof taken);
    return status;
}

/* The other way round: parts whose functions are here. They count their calls and map a static array. */
static unsigned char memory[64];
static int counts[5]; /* retain, release, map, unmap, unregister */

static void own_retain(void *context) { ++*(int *)context; counts[0]++; }
static void own_release(void *context) { --*(int *)context; counts[1]++; }
static int own_map(void *context, void *resource, void **address, size_t *nbytes) {
    counts[2]++;
    *address = memory;
    *nbytes = (size_t)resource;
    return 0;
}
static int own_unmap(void *context, void *resource) { counts[3]++; return 0; }
static int own_unregister(void *context, void *resource) { counts[4]++; return 0; }

static int owners = 1;

void client_parts(cuglue_client_parts *parts, size_t size) {
    memset(counts, 0, sizeof counts);
    owners = 1;
    parts->context = &owners;
    parts->retain = own_retain;
    parts->release = own_release;
    parts->map = own_map;
    parts->unmap = own_unmap;
    parts->unregister = own_unregister;
    parts->resource = (void *)sizeof memory;
    parts->size = size;
}

int client_owners(void) { return owners; }
int client_count(int which) { return counts[which]; }
