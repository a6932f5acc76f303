/* bucket.h - the life of a bucket within one step.
 *
 *     FILLING --> READY --> POSTED --> REDUCED
 *        ^                                |
 *        +--------------------------------+        (the next step)
 *
 * A step that fails takes a bucket from any phase back to FILLING.
 */
#ifndef PLI_BUCKET_H
#define PLI_BUCKET_H

#include "core/status.h"

#define PLI_BUCKET_PHASE_MAP(X)                                                        \
    X(PL_BUCKET_FILLING, "filling") /* gradients arrive */                             \
    X(PL_BUCKET_READY, "ready")     /* all expected gradients are in */                \
    X(PL_BUCKET_POSTED, "posted")   /* the peers may read and write it */              \
    X(PL_BUCKET_REDUCED, "reduced") /* means are in place; it is ours again */

typedef enum pl_bucket_phase {
#define PLI_BUCKET_PHASE_ENUM(name, text) name,
    PLI_BUCKET_PHASE_MAP(PLI_BUCKET_PHASE_ENUM)
#undef PLI_BUCKET_PHASE_ENUM
        PL_N_BUCKET_PHASES
} pl_bucket_phase;

/* Moves *phase to `to`; PL_ESTATE, with the bucket's number, if that is not next. */
pl_status pl_bucket_move(pl_bucket_phase *phase, pl_bucket_phase to,
                         size_t bucket) PL_MUST_USE;

#endif
