/* fake_nccl_world.c - the memory in which the ranks of a communicator meet. */
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "nccl_state.h"

static size_t header_bytes(void)
{
    return (sizeof(fk_board) + 4095) / 4096 * 4096;
}

/* Descriptors of ids whose ranks have not all come. */
typedef struct made_id {
    struct made_id *next;
    char id[NCCL_UNIQUE_ID_BYTES];
    int descriptor;
} made_id;

static made_id *made;

int fk_make_id(ncclUniqueId *out)
{
    const int descriptor = memfd_create("fake-nccl", MFD_CLOEXEC);
    if (descriptor < 0)
        return ncclSystemError;
    if (ftruncate(descriptor, (off_t)(header_bytes() + FK_MAX_RANKS * FK_DATA_BYTES)) !=
        0) {
        (void)close(descriptor);
        return ncclSystemError;
    }
    made_id *it = fk_new(sizeof *it);
    static int n_made;
    (void)snprintf(it->id, sizeof it->id, "fake %d %d %d", (int)getpid(), descriptor,
                   ++n_made);
    it->descriptor = descriptor;
    it->next = made;
    made = it;
    memset(out, 0, sizeof *out);
    memcpy(out->internal, it->id, sizeof it->id);
    return ncclSuccess;
}

static void forget_id(const char *id)
{
    for (made_id **at = &made; *at != NULL; at = &(*at)->next) {
        made_id *it = *at;
        if (strcmp(it->id, id) == 0) {
            *at = it->next;
            (void)close(it->descriptor);
            free(it);
            return;
        }
    }
}

static int open_id(const char *id)
{
    int pid = 0;
    int descriptor = 0;
    char path[64];
    if (sscanf(id, "fake %d %d", &pid, &descriptor) != 2)
        return -1;
    (void)snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, descriptor);
    return open(path, O_RDWR | O_CLOEXEC);
}

static fk_world *find_world(const char *id)
{
    for (fk_world *it = fk.worlds; it != NULL; it = it->next)
        if (strcmp(it->id, id) == 0)
            return it;
    return NULL;
}

static fk_world *map_world(const char *id, int n_ranks)
{
    const int descriptor = open_id(id);
    if (descriptor < 0)
        return NULL;
    const size_t n_bytes = header_bytes() + (size_t)n_ranks * FK_DATA_BYTES;
    void *memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_NORESERVE, descriptor, 0);
    (void)close(descriptor);
    if (memory == MAP_FAILED)
        return NULL;
    fk_world *it = fk_new(sizeof *it);
    (void)snprintf(it->id, sizeof it->id, "%s", id);
    it->n_ranks = n_ranks;
    it->board = memory;
    it->data = (char *)memory + header_bytes();
    it->n_mapped_bytes = n_bytes;
    it->next = fk.worlds;
    fk.worlds = it;
    return it;
}

static uint64_t host_of_this_process(void)
{
    uint64_t hash = 5381;
    const char *text = getenv("NCCL_HOSTID");
    for (; text != NULL && *text != '\0'; text++)
        hash = hash * 33 + (unsigned char)*text;
    return hash;
}

static int may_share(void)
{
    const char *text = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    return fk.options.nccl >= 23003 && text != NULL && strcmp(text, "1") == 0;
}

int fk_has_duplicate(const fk_world *world, int *one, int *other)
{
    const fk_board *board = world->board;
    for (int a = 0; a < world->n_ranks; a++) {
        for (int b = a + 1; b < world->n_ranks; b++) {
            *one = a;
            *other = b;
            /* Up to 2.29 NCCL compares the card, since then the part of it. */
            const int is_one_card = fk.options.one_bus && fk.options.nccl < 23000;
            if ((is_one_card ||
                 atomic_load(&board->devices[a]) == atomic_load(&board->devices[b])) &&
                atomic_load(&board->hosts[a]) == atomic_load(&board->hosts[b]))
                return !fk.options.share_device && !may_share();
        }
    }
    return 0;
}

int fk_join(ncclComm_t comm, const ncclUniqueId *id)
{
    char text[NCCL_UNIQUE_ID_BYTES];
    memcpy(text, id->internal, sizeof text);
    text[sizeof text - 1] = '\0';
    fk_world *world = find_world(text);
    if (world == NULL)
        world = map_world(text, comm->n_ranks);
    if (world == NULL)
        return ncclSystemError;
    int none = 0;
    fk_board *board = world->board;
    if (!atomic_compare_exchange_strong(&board->n_ranks, &none, comm->n_ranks) &&
        none != comm->n_ranks)
        return ncclInvalidArgument;
    if (atomic_load(&board->has_joined[comm->rank]) != 0)
        return ncclInvalidUsage;
    atomic_store(&board->devices[comm->rank], comm->device);
    atomic_store(&board->hosts[comm->rank], host_of_this_process());
    atomic_store(&board->pids[comm->rank], (int)getpid());
    atomic_store(&board->has_joined[comm->rank], 1);
    world->comms[comm->rank] = comm;
    world->n_comms++;
    comm->world = world;
    if (atomic_fetch_add(&board->n_joined, 1) + 1 == comm->n_ranks)
        fk_moved();
    return ncclSuccess;
}

int fk_all_joined(const fk_world *world)
{
    if (atomic_load(&world->board->n_joined) < world->n_ranks)
        return 0;
    forget_id(world->id);
    if (world->n_comms < world->n_ranks)
        fk_pump_start(); /* for the ranks of other processes */
    return 1;
}

static void unmap_world(fk_world *world)
{
    for (fk_world **at = &fk.worlds; *at != NULL; at = &(*at)->next) {
        if (*at == world) {
            *at = world->next;
            break;
        }
    }
    (void)munmap(world->board, world->n_mapped_bytes);
    forget_id(world->id);
    free(world);
}

/* Its operations must have ended. */
void fk_leave_world(ncclComm_t comm)
{
    fk_world *world = comm->world;
    if (world == NULL)
        return;
    comm->world = NULL;
    world->comms[comm->rank] = NULL;
    if (--world->n_comms == 0)
        unmap_world(world);
}

void fk_nccl_reset(void)
{
    for (fk_object *it = fk.objects; it != NULL; it = it->next) {
        if (it->kind == FAKE_COMMS) {
            fk_leave_world((ncclComm_t)it);
            free(((ncclComm_t)it)->chunks);
            free(((ncclComm_t)it)->unsent);
            fk_list_free(&((ncclComm_t)it)->launches);
        }
    }
    while (made != NULL)
        forget_id(made->id);
}
