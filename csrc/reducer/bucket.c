/* bucket.c - each phase allows one move. */
#include "bucket.h"

static const char *const phase_texts[PL_N_BUCKET_PHASES] = {
#define PHASE_TEXT(name, text) [name] = text,
    PLI_BUCKET_PHASE_MAP(PHASE_TEXT)
#undef PHASE_TEXT
};

pl_status pl_bucket_move(pl_bucket_phase *phase, pl_bucket_phase to, size_t bucket)
{
    if (to != (*phase + 1) % PL_N_BUCKET_PHASES)
        return pli_fail(PL_ESTATE, "bucket %zu cannot go from %s to %s", bucket,
                        phase_texts[*phase], phase_texts[to]);
    *phase = to;
    return PL_OK;
}
