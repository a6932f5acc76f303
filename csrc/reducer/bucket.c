/* bucket.c - the table of moves. */
#include "bucket.h"

static const char *const phase_texts[PL_N_BUCKET_PHASES] = {
#define PHASE_TEXT(name, text) [name] = text,
    PLI_BUCKET_PHASE_MAP(PHASE_TEXT)
#undef PHASE_TEXT
};

static const unsigned char is_allowed[PL_N_BUCKET_PHASES][PL_N_BUCKET_PHASES] = {
    [PL_BUCKET_FILLING] = {[PL_BUCKET_READY] = 1},
    [PL_BUCKET_READY] = {[PL_BUCKET_POSTED] = 1},
    [PL_BUCKET_POSTED] = {[PL_BUCKET_REDUCED] = 1},
    [PL_BUCKET_REDUCED] = {[PL_BUCKET_FILLING] = 1},
};

pl_status pl_bucket_move(pl_bucket_phase *phase, pl_bucket_phase to, size_t bucket)
{
    pl_status st = PL_OK;
    if (!is_allowed[*phase][to])
        PL_FAIL(PL_ESTATE, "bucket %zu cannot go from %s to %s", bucket,
                phase_texts[*phase], phase_texts[to]);
    *phase = to;
done:
    return st;
}
