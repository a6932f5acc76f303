/* peers.h - what a rank that waits finds out about those that it waits for; for
 * shared.c alone.
 */
#ifndef PLI_PEERS_H
#define PLI_PEERS_H

#include "counters.h"

/* Once in a while, for who waits until every rank's counter has reached `least`: fails
 * the world where that can never be. */
void pli_peers_look(pli_shared_comm *self, pli_counter counter, uint64_t least);

/* Blames a rank whose process has ended below `least`; returns whether there was one.
 */
int pli_peers_blame_dead(const pli_shared_comm *self, pli_counter counter,
                         uint64_t least);

#endif
