/* test_handshake.c - strangers that connect to rank 0 beside its ranks, and what
 * signals do to the exchanged messages. */
#include "processes.h"

#include <errno.h>
#include <stddef.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "comm/shm_init.h"
#include "core/alloc.h"

enum { N_SILENT = 20, N_FLOOD = 3 * 2 * PL_MAX_RANKS };

/* Exit status of rank 1 if it is told that there will be no world. */
enum { OF_ANOTHER_USER = 7, NOT_ACCEPTED = 8 };

static int connect_to(const char *address)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    const size_t n = strlen(address);
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    memcpy(name.sun_path + 1, address, n);
    CHECK(connect(fd, (struct sockaddr *)&name,
                  (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n)) == 0);
    return fd;
}

/* Rank 1 first connects many times without a message, or with a wrong one. */
static void come_among_strangers(child *self)
{
    int silent[N_SILENT];
    pli_handshake_greeting greeting;
    pli_handshake_reply answer = {0};
    if (self->rank == 1) {
        for (int i = 0; i < N_SILENT; i++)
            silent[i] = connect_to(self->board->address);
        CHECK(send(silent[0], "GET /", 5, 0) == 5);
    }
    const int64_t begin = pli_now_ns();
    CHECK_OK(child_join(self));
    CHECK(pli_now_ns() - begin < 4000 * PLI_MS); /* not 5 s for each of them */
    if (self->rank == 1) {
        CHECK(recv(silent[0], &greeting, sizeof greeting, 0) > 0);
        CHECK(recv(silent[0], &answer, sizeof answer, 0) == (ssize_t)sizeof answer);
        CHECK(strstr(answer.message, "no request from a rank") != NULL);
        for (int i = 0; i < N_SILENT; i++)
            (void)close(silent[i]);
    }
}

TEST(connections_that_say_nothing_do_not_hold_up_the_ranks)
{
    processes_run(board_create(2, 1), come_among_strangers);
}

/* A stranger connects until all ranks have joined: it says nothing, or a wrong word. */
static void flood(const board *all)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX};
    static int fds[N_FLOOD];
    (void)alarm(PROCESSES_ALARM_S);
    await_flag(&all->is_listening);
    const size_t n = strlen(all->address);
    memcpy(name.sun_path + 1, all->address, n);
    for (int i = 0;; i = (i + 1) % N_FLOOD) {
        if (fds[i] > 0)
            (void)close(fds[i]);
        fds[i] = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        if (connect(fds[i], (struct sockaddr *)&name,
                    (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n)) != 0)
            _exit(0); /* the world is made */
        if (i % 2 == 0)
            (void)!send(fds[i], "GET /", 5, MSG_NOSIGNAL);
    }
}

static void join_in_a_flood(child *self)
{
    pid_t stranger = 0;
    if (self->rank == 0) {
        stranger = fork();
        if (stranger == 0) {
            pli_listener_close(self->listener);
            flood(self->board);
        }
        pli_sleep_ns(50 * PLI_MS); /* there are many callers before the ranks */
    }
    CHECK_OK(child_join(self));
    if (stranger > 0)
        (void)waitpid(stranger, NULL, 0);
}

TEST(a_flood_of_strangers_keeps_no_rank_out)
{
    processes_run(board_create(4, 1), join_in_a_flood);
}

typedef struct meeting {
    pli_listener *listener;
    char address[PLI_ADDRESS_BYTES];
    int pids[2];
    pli_watch watch;
} meeting;

/* Starts a process that joins a world of two as rank 1. */
static pid_t start_rank_1(meeting *it)
{
    const pid_t parent = getpid();
    (void)fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0) {
        pli_listener_close(it->listener); /* only rank 0 has it */
        const int pids[2] = {parent, 0};
        const pli_shm_options options = {.rank = 1,
                                         .world_size = 2,
                                         .deadline_ns = RANKS_DEADLINE_NS,
                                         .pids = pids,
                                         .prove = secret_prove};
        pli_watch watch;
        int fd = -1;
        if (pli_watch_init(&watch, 2) != PL_OK)
            _exit(2);
        const pl_status st = pli_handshake_request(&options, it->address, &watch, &fd);
        const int how = error_has("user") ? OF_ANOTHER_USER : NOT_ACCEPTED;
        _exit(st == PL_EPEER ? how : 0);
    }
    return pid;
}

static pl_status accept_rank_1(meeting *it)
{
    const pli_shm_options options = {.world_size = 2,
                                     .deadline_ns = RANKS_DEADLINE_NS,
                                     .pids = it->pids,
                                     .prove = secret_prove};
    return pli_handshake_accept(&options, it->listener, &it->watch);
}

static int begin_meeting(meeting *it)
{
    *it = (meeting){0};
    if (!CHECK_OK(pli_watch_init(&it->watch, 2)) ||
        !CHECK_OK(pli_listener_create(it->address, &it->listener)))
        return 0;
    it->pids[1] = start_rank_1(it);
    return 1;
}

static int end_meeting(meeting *it)
{
    int how = 0;
    pli_watch_fini(&it->watch);
    pli_listener_destroy(it->listener);
    (void)waitpid(it->pids[1], &how, 0);
    return WIFEXITED(how) ? WEXITSTATUS(how) : -1;
}

TEST(a_signal_at_any_call_loses_no_rank)
{
    long n_calls = 0;
    for (long n = 1; n == 1 || n <= n_calls; n++) {
        meeting it;
        if (!begin_meeting(&it))
            return;
        pli_fault_set_errno(EINTR);
        pli_fault_arm(PLI_FAULT_SYSCALL, n);
        CHECK_OK(accept_rank_1(&it));
        n_calls = n < 12 ? pli_fault_count(PLI_FAULT_SYSCALL) : 0;
        pli_fault_arm(PLI_FAULT_SYSCALL, 0);
        pli_fault_set_errno(ENOMEM);
        CHECK(it.watch.ranks[1].socket >= 0);
        (void)end_meeting(&it);
    }
}

TEST(a_rank_of_another_user_is_refused_in_words)
{
    meeting it;
    if (geteuid() != 0 || !begin_meeting(&it)) /* only root can become another user */
        return;
    CHECK(seteuid(12345) == 0);
    CHECK_FAILS(accept_rank_1(&it), PL_ESYS,
                "rank 0 runs as user 12345 and rank 1 as user 0");
    CHECK(seteuid(0) == 0);
    CHECK(end_meeting(&it) == OF_ANOTHER_USER);
}

TEST(a_rank_that_cannot_be_accepted_is_not_left_waiting)
{
    meeting it;
    struct rlimit before;
    pl_comm *comm = NULL;
    if (!CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0) || !begin_meeting(&it))
        return;
    const int pids[2] = {0, 0};
    const pli_shm_options options = {.world_size = 2,
                                     .deadline_ns = RANKS_DEADLINE_NS,
                                     .pids = pids,
                                     .prove = secret_prove};
    const int lowest = dup(0); /* no descriptor is left from it on */
    (void)close(lowest);
    const struct rlimit none_left = {(rlim_t)lowest, before.rlim_max};
    CHECK(setrlimit(RLIMIT_NOFILE, &none_left) == 0);
    CHECK_FAILS(pli_shm_create(&options, it.listener, NULL, &comm), PL_ESYS,
                "cannot accept another rank's connection");
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
    int how = 0;
    CHECK(waitpid(it.pids[1], &how, 0) == it.pids[1]); /* while the listener is open */
    CHECK(WIFEXITED(how) && WEXITSTATUS(how) == NOT_ACCEPTED);
    CHECK_FAILS(pli_shm_create(&options, it.listener, NULL, &comm), PL_EINVAL,
                "this listener has already made a world");
    pli_watch_fini(&it.watch);
    pli_listener_destroy(it.listener);
}

/* ---- strangers that know the protocol -------------------------------------------- */

typedef enum trick {
    NO_SECRET, /* rank 1's request with a wrong proof */
    REPLAY,    /* with the proof of an earlier connection */
    NO_RANK,   /* with a right proof, of a rank that is none */
    MOST_TRICKS
} trick;

static void try_trick(const char *address, trick how, pli_handshake_reply *reply)
{
    struct {
        char side[8];
        unsigned char nonces[2][PLI_NONCE_BYTES];
        int32_t rank, is_sure;
    } message = {.side = "join", .rank = how == NO_RANK ? 2 : 1};
    pli_handshake_join join = {.magic = PLI_HANDSHAKE_MAGIC, .rank = message.rank};
    pli_handshake_greeting greetings[2];
    const int fds[2] = {connect_to(address), connect_to(address)};
    for (int i = 0; i < 2; i++)
        CHECK(recv(fds[i], &greetings[i], sizeof greetings[i], 0) ==
              (ssize_t)sizeof greetings[i]);
    CHECK(memcmp(greetings[0].nonce, greetings[1].nonce, PLI_NONCE_BYTES) != 0);
    memcpy(message.nonces[0], greetings[how == REPLAY].nonce, PLI_NONCE_BYTES);
    CHECK_OK(secret_prove(NULL, &message, sizeof message, join.proof));
    join.proof[PLI_PROOF_BYTES - 1] ^= how == NO_SECRET;
    CHECK(send(fds[0], &join, sizeof join, MSG_NOSIGNAL) == (ssize_t)sizeof join);
    CHECK(recv(fds[0], reply, sizeof *reply, 0) == (ssize_t)sizeof *reply);
    (void)close(fds[0]);
    (void)close(fds[1]); /* without a word */
}

/* Rank 2 has said nothing yet when rank 0 misses rank 1. */
static void be_slow_to_speak(child *self)
{
    if (self->rank == 1)
        await_flag(&self->board->is_stopped);
    if (self->rank == 2) {
        pli_handshake_greeting greeting;
        const int fd = connect_to(self->board->address);
        CHECK(recv(fd, &greeting, sizeof greeting, 0) == (ssize_t)sizeof greeting);
        atomic_store(&self->board->note, 1);
        CHECK(recv(fd, &greeting, sizeof greeting, 0) == 0); /* no refusal */
        (void)close(fd);
    }
    child_report(self, child_join(self));
    await_flag(&self->board->is_stopped);
}

TEST(a_rank_that_rank_0_no_longer_reads_names_the_rank_that_is_gone)
{
    board *all = board_create(3, 1);
    processes_start(all, be_slow_to_speak);
    await_flag(&all->note);
    processes_blame(all, 1, PL_EPEER, processes_lose(all, 1, SIGKILL),
                    RANKS_DEADLINE_NS);
    board_destroy(all);
}

static void meet_a_stranger(child *self)
{
    static const char *const words[] = {"does not have this job's secret",
                                        "does not have this job's secret",
                                        "does not wait for a rank 2"};
    if (self->rank == 1) {
        self->board->pids[1] = 0; /* unless the pid tells, the secret does */
        atomic_store(&self->board->note, 1);
        for (int how = 0; how < MOST_TRICKS; how++) {
            pli_handshake_reply reply = {0};
            try_trick(self->board->address, (trick)how, &reply);
            if (!CHECK(strstr(reply.message, words[how]) != NULL))
                CHECK_MORE("but %s", reply.message);
        }
    } else {
        await_flag(&self->board->note);
    }
    CHECK_OK(child_join(self));
}

TEST(a_stranger_without_the_secret_takes_no_ranks_place)
{
    processes_run(board_create(2, 1), meet_a_stranger);
}

typedef enum impostor { REFUSES, GUESSES, SPEAKS_SSH, MOST_IMPOSTORS } impostor;

/* Answers rank 1 at rank 0's address, without the secret. */
static void answer_as(impostor how, const pli_listener *listener)
{
    const pli_handshake_greeting greeting = {.magic = PLI_HANDSHAKE_MAGIC};
    pli_handshake_reply reply = {.magic = PLI_HANDSHAKE_MAGIC,
                                 .status = how == REFUSES ? PL_ESYS : PL_OK,
                                 .message = "no room"};
    pli_handshake_join join;
    const int fd = accept(listener->fd, NULL, NULL);
    if (how == SPEAKS_SSH)
        (void)!send(fd, "SSH-2.0-OpenSSH", 15, MSG_NOSIGNAL);
    else
        (void)!send(fd, &greeting, sizeof greeting, MSG_NOSIGNAL);
    (void)!recv(fd, &join, sizeof join, 0);
    (void)!pli_handshake_answer(fd, &reply, listener->fd);
    (void)close(fd);
}

TEST(a_stranger_at_rank_0s_address_is_an_error_that_says_so)
{
    static const char *const words[] = {
        "rank 0, or another process at its address, refuses this rank: no room",
        "the process at rank 0's address does not have this job's",
        "no rank of the same version of paceline listens at rank 0's address"};
    const int pids[2] = {0, 0};
    const pli_shm_options options = {.rank = 1,
                                     .world_size = 2,
                                     .deadline_ns = RANKS_DEADLINE_NS,
                                     .pids = pids,
                                     .prove = secret_prove};
    for (int how = 0; how < MOST_IMPOSTORS; how++) {
        char address[PLI_ADDRESS_BYTES];
        pli_listener *listener = NULL;
        pl_comm *comm = NULL;
        if (!CHECK_OK(pli_listener_create(address, &listener)))
            return;
        (void)fflush(NULL);
        const pid_t pid = fork();
        if (pid == 0) {
            answer_as((impostor)how, listener);
            _exit(0);
        }
        CHECK_FAILS(pli_shm_create(&options, NULL, address, &comm), PL_EPEER,
                    words[how]);
        (void)waitpid(pid, NULL, 0);
        pli_listener_destroy(listener);
    }
}

TEST(processes_that_are_known_must_be_the_ranks)
{
    char address[PLI_ADDRESS_BYTES];
    pli_listener *listener = NULL;
    pl_comm *comm = NULL;
    const int pids[2] = {getppid(), 0}; /* but this process listens */
    pli_shm_options options = {.rank = 1,
                               .world_size = 2,
                               .deadline_ns = RANKS_DEADLINE_NS,
                               .pids = pids,
                               .prove = secret_prove};
    if (!CHECK_OK(pli_listener_create(address, &listener)))
        return;
    CHECK_FAILS(pli_shm_create(&options, NULL, address, &comm), PL_EPEER,
                "listens at rank 0's address, but rank 0 is process");
    options.prove = NULL;
    CHECK_FAILS(pli_shm_create(&options, NULL, address, &comm), PL_EINVAL,
                "need a secret");
    pli_listener_destroy(listener);
}

TEST(words_are_cut_between_characters)
{
    char text[8];
    pli_text_print(text, sizeof text, "abcdef%s", "\xc3\xbc!");
    CHECK(strcmp(text, "abcdef") == 0);
    pli_text_print(text, sizeof text, "abcde%s", "\xc3\xbc");
    CHECK(strcmp(text, "abcde\xc3\xbc") == 0);
    pli_text_print(text, sizeof text, "abcd%s", "\xf0\x9f\x8e\x89");
    CHECK(strcmp(text, "abcd") == 0);
    CHECK(strcmp(pli_text_tail("\xc3\xbc"
                               "abc",
                               4),
                 "abc") == 0);
    CHECK(strcmp(pli_text_tail("\xc3\xbc"
                               "abc",
                               5),
                 "\xc3\xbc"
                 "abc") == 0);
}
