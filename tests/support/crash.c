/* Print the C stack of a process that a signal kills, before faulthandler prints the
 * stacks of its Python threads.  support.ranks loads this in each rank. */
#include <execinfo.h>
#include <signal.h>
#include <stddef.h>

static const int numbers[] = {SIGSEGV, SIGABRT, SIGBUS, SIGFPE, SIGILL};
static struct sigaction before[65];

static void show_stack(int number)
{
    void *frames[64];

    backtrace_symbols_fd(frames, backtrace(frames, 64), 2);
    sigaction(number, &before[number], NULL);
    raise(number);
}

__attribute__((constructor)) static void listen(void)
{
    struct sigaction action = {.sa_handler = show_stack, .sa_flags = SA_NODEFER};
    void *frame;

    backtrace(&frame, 1); /* loads libgcc, which a signal handler must not do */
    for (unsigned i = 0; i < sizeof numbers / sizeof *numbers; i++)
        sigaction(numbers[i], &action, &before[numbers[i]]);
}
