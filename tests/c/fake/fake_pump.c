/* fake_pump.c - a thread that stands for devices which work by themselves.
 *
 * With options.pump it executes operations at random times.  Otherwise it runs only if
 * ranks of other processes may wait for this one's operations, and executes those that
 * they want.
 */
#include <time.h>
#include <unistd.h>

#include "nccl_state.h"

static struct {
    pthread_t thread;
    int is_running;
    atomic_int is_stopped;
    pid_t pid;
} pump;

/* Executes what ranks of other processes wait for. */
static void serve(void)
{
    int is_wanted = 0;
    for (const fk_world *world = fk.worlds; world != NULL; world = world->next)
        for (int r = 0; r < world->n_ranks; r++)
            if (world->comms[r] != NULL)
                is_wanted |= fk_need_wanted(world->comms[r]);
    if (is_wanted)
        fk_need_residents();
    while (is_wanted && fk_run_one(1))
        continue;
    (void)fk_proxy_step(-1);
    (void)fk_poll_residents();
}

static void *pump_main(void *unused)
{
    (void)unused;
    while (!atomic_load(&pump.is_stopped)) {
        (void)pthread_mutex_lock(&fk.lock);
        if (fk.options.pump)
            fk_run_at_random(fk_below(6));
        if (fk.worlds != NULL)
            serve();
        fk_memory_close();
        const unsigned rest = 1000 + (fk.options.pump ? fk_below(100000) : 100000);
        (void)pthread_mutex_unlock(&fk.lock);
        const struct timespec pause = {.tv_nsec = (long)rest};
        (void)nanosleep(&pause, NULL);
    }
    return NULL;
}

static int is_running(void)
{
    return pump.is_running && pump.pid == getpid();
}

void fk_pump_start(void)
{
    if (is_running())
        return;
    atomic_store(&pump.is_stopped, 0);
    pump.pid = getpid();
    pump.is_running = pthread_create(&pump.thread, NULL, pump_main, NULL) == 0;
}

/* Call without the lock.  In a forked child there is no thread. */
void fk_pump_stop(void)
{
    if (is_running()) {
        atomic_store(&pump.is_stopped, 1);
        (void)pthread_join(pump.thread, NULL);
    }
    pump.is_running = 0;
}

/* ---- forks ---------------------------------------------------------------------- */

static void before_fork(void)
{
    (void)pthread_mutex_lock(&fk.lock);
    fk_memory_close();
}

static void after_fork(void)
{
    (void)pthread_mutex_unlock(&fk.lock);
}

/* A driver initialised before a fork does not work after it. */
static void in_child(void)
{
    fk.is_forked = fk.is_initialized;
    pump.is_running = 0;
    (void)pthread_mutex_unlock(&fk.lock);
}

__attribute__((constructor)) static void load(void)
{
    (void)pthread_atfork(before_fork, after_fork, in_child);
}

__attribute__((destructor)) static void unload(void)
{
    fk_pump_stop();
}
