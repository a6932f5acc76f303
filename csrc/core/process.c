/* process.c - a list of pidfds under a lock. */
#include "process.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "alloc.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434 /* Linux 5.3; one number on all architectures */
#endif

struct pli_process {
    pli_processes *processes; /* NULL: not shared */
    pli_process *next;
    int pid;
    int pidfd; /* -1: could not be opened */
    int n_users;
};

struct pli_processes {
    pthread_mutex_t lock;
    pli_process *first;
};

pl_status pli_thread_start(void *(*run)(void *argument), void *argument,
                           const char *what, pthread_t *out)
{
    pl_status st = PL_OK;
    sigset_t all, before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = PL_SYS(pthread_create(out, NULL, run, argument));
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error > 0)
        errno = error;
    if (error != 0)
        PL_FAIL_ERRNO("cannot start the thread that %s", what);
done:
    return st;
}

pl_status pli_processes_create(pli_processes **out)
{
    pl_status st = PL_OK;
    pli_processes *processes = NULL;
    PL_TRY(pli_calloc(1, sizeof *processes, "list of processes", &processes));
    (void)pthread_mutex_init(&processes->lock, NULL); /* cannot fail on Linux */
    *out = processes;
done:
    return st;
}

void pli_processes_destroy(pli_processes *processes)
{
    if (processes == NULL)
        return;
    (void)pthread_mutex_destroy(&processes->lock);
    pli_free(processes);
}

void pli_processes_forget(pli_processes *processes)
{
    if (processes == NULL)
        return;
    (void)pthread_mutex_init(&processes->lock, NULL);
    processes->first = NULL; /* the parent's worlds are not closed in a child */
}

static void set_locked(pli_processes *processes, int is_locked)
{
    if (processes == NULL)
        return;
    if (is_locked)
        (void)pthread_mutex_lock(&processes->lock);
    else
        (void)pthread_mutex_unlock(&processes->lock);
}

static pl_status open_new(pli_processes *processes, int pid, pli_process **out)
{
    pl_status st = PL_OK;
    pli_process *process = NULL;
    PL_TRY(pli_calloc(1, sizeof *process, "a peer's process", &process));
    process->pid = pid;
    process->n_users = 1;
    process->pidfd = (int)PL_SYS(syscall(SYS_pidfd_open, pid, 0));
    const int is_gone =
        process->pidfd < 0 && (errno == ESRCH || (kill(pid, 0) != 0 && errno == ESRCH));
    if (is_gone)
        PL_FAIL(PL_EPEER, "process %d is gone", pid);
    process->processes = processes;
    if (processes != NULL) {
        process->next = processes->first;
        processes->first = process;
    }
    *out = process;
    process = NULL;
done:
    pli_free(process);
    return st;
}

/* Skips processes that have ended: the system may have reused their PID. */
static pli_process *find_locked(const pli_processes *processes, int pid)
{
    pli_process *process = processes != NULL ? processes->first : NULL;
    while (process != NULL && (process->pid != pid || pli_process_has_ended(process)))
        process = process->next;
    return process;
}

pl_status pli_process_open(pli_processes *processes, int pid, pli_process **out)
{
    pl_status st = PL_OK;
    set_locked(processes, 1);
    pli_process *process = find_locked(processes, pid);
    if (process != NULL)
        process->n_users++;
    else
        PL_TRY(open_new(processes, pid, &process));
    *out = process;
done:
    set_locked(processes, 0);
    return st;
}

int pli_process_has_ended(const pli_process *process)
{
    struct pollfd one = {.fd = process->pidfd, .events = POLLIN};
    if (process->pidfd >= 0)
        return poll(&one, 1, 0) > 0;
    return kill(process->pid, 0) != 0 && errno == ESRCH;
}

int pli_process_is_sure(const pli_process *process)
{
    return process->pidfd >= 0;
}

int pli_process_descriptor(const pli_process *process)
{
    return process->pidfd;
}

void pli_process_close(pli_process *process)
{
    if (process == NULL)
        return;
    pli_processes *processes = process->processes;
    set_locked(processes, 1);
    const int is_last = --process->n_users == 0;
    for (pli_process **at = processes != NULL ? &processes->first : NULL;
         is_last && at != NULL && *at != NULL; at = &(*at)->next) {
        if (*at != process)
            continue;
        *at = process->next;
        break;
    }
    set_locked(processes, 0);
    if (!is_last)
        return;
    if (process->pidfd >= 0)
        (void)close(process->pidfd);
    pli_free(process);
}
