/* fake_capture.c - captures streams into graphs.
 *
 * A capture takes the work given to its origin stream, and to other streams once they
 * have waited for an event of it.  A forbidden call invalidates the capture, as in
 * CUDA, and all later calls on it fail until it is ended.
 */
#include "state.h"

static _Thread_local struct {
    uint64_t generation;
    int mode;
    char token; /* its address identifies the thread */
} here;

static int my_mode(void)
{
    if (here.generation != fk.generation) {
        here.generation = fk.generation;
        here.mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    }
    return here.mode;
}

CUresult cuThreadExchangeStreamCaptureMode(int *mode)
{
    FAKE_CALL(cuThreadExchangeStreamCaptureMode);
    if (mode == NULL || *mode < CU_STREAM_CAPTURE_MODE_GLOBAL ||
        *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return fk_leave(CUDA_ERROR_INVALID_VALUE);
    const int mine = my_mode();
    here.mode = *mode;
    *mode = mine;
    return fk_leave(CUDA_SUCCESS);
}

/* ---- forbidden calls ------------------------------------------------------------ */

static void invalidate(fk_capture *capture, const char *who)
{
    if (capture->status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
        return;
    capture->status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
    (void)snprintf(capture->reason, sizeof capture->reason, "%s", who);
}

static int has_ended(const fk_capture *capture)
{
    return capture->status == CU_STREAM_CAPTURE_STATUS_NONE;
}

int fk_forbid_unsafe(const char *who)
{
    int result = CUDA_SUCCESS;
    const int mode = my_mode();
    if (mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return result;
    for (fk_object *it = fk.objects; it != NULL; it = it->next) {
        fk_capture *capture = (fk_capture *)it;
        if (it->kind != FK_CAPTURE || has_ended(capture))
            continue;
        const int is_mine = capture->thread == &here.token &&
                            capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
        const int is_global = mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
                              capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
        if (is_mine || is_global) {
            invalidate(capture, who);
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    return result;
}

/* In any mode, no thread may wait for a context while one of its streams is
 * captured. */
int fk_forbid_beside_captures(int device, const char *who)
{
    int result = CUDA_SUCCESS;
    for (fk_object *it = fk.objects; it != NULL; it = it->next) {
        const CUstream stream = (CUstream)it;
        if (it->kind == FAKE_STREAMS && stream->capture != NULL &&
            stream->device == device) {
            invalidate(stream->capture, who);
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    return result;
}

/* The legacy stream would have to wait for blocking ones.  `who`: NULL for a mere
 * query, which invalidates nothing. */
static int check_implicit(CUstream stream, const char *who)
{
    int result = CUDA_SUCCESS;
    if (stream != &fk.contexts[stream->device].legacy)
        return result;
    for (fk_object *it = fk.objects; it != NULL; it = it->next) {
        const CUstream other = (CUstream)it;
        if (it->kind == FAKE_STREAMS && other->capture != NULL &&
            other->device == stream->device &&
            (other->flags & CU_STREAM_NON_BLOCKING) == 0) {
            if (who != NULL)
                invalidate(other->capture, who);
            result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
    }
    return result;
}

int fk_forbid_implicit(CUstream stream, const char *who)
{
    return check_implicit(stream, who);
}

/* The host may not query, or wait for, work that is only recorded. */
int fk_forbid_captured(CUstream stream, const char *who)
{
    if (stream->capture != NULL) {
        invalidate(stream->capture, who);
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    const int result = fk_forbid_implicit(stream, who);
    return result == CUDA_SUCCESS ? fk_forbid_unsafe(who) : result;
}

int fk_forbid_captured_event(CUevent event, const char *who)
{
    if (event->record != NULL && event->record->capture != NULL) {
        invalidate(event->record->capture, who);
        return CUDA_ERROR_CAPTURED_EVENT;
    }
    return fk_forbid_unsafe(who);
}

/* ---- taking --------------------------------------------------------------------- */

int fk_capture_take(fk_op *op, CUstream stream)
{
    fk_capture *capture = stream->capture;
    if (capture->status != CU_STREAM_CAPTURE_STATUS_ACTIVE) {
        fk_op_drop(op);
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    op->capture = capture;
    op->node = (int)capture->nodes.n;
    fk_op_depend(op, stream->node);
    fk_op_drop(stream->node);
    stream->node = fk_op_hold(op);
    fk_list_add(&capture->nodes, op);
    return CUDA_SUCCESS;
}

int fk_join_capture(CUstream stream, const fk_op *on)
{
    fk_capture *capture = on->capture;
    if (capture == NULL) {
        if (stream->capture == NULL)
            return CUDA_SUCCESS;
        invalidate(stream->capture, "a wait for what is not captured");
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (has_ended(capture))
        return CUDA_ERROR_CAPTURED_EVENT;
    if (capture->status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (stream == &fk.contexts[stream->device].legacy) {
        invalidate(capture, "a wait of the legacy stream");
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    }
    if (stream->capture != NULL && stream->capture != capture) {
        invalidate(capture, "a wait of another capture");
        invalidate(stream->capture, "a wait for another capture");
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    stream->capture = capture;
    return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream handle, int *out)
{
    CUstream stream = NULL;
    FAKE_CALL(cuStreamIsCapturing);
    FAKE_TRY(fk_stream(handle, &stream));
    FAKE_TRY(check_implicit(stream, NULL));
    *out = stream->capture != NULL ? stream->capture->status
                                   : CU_STREAM_CAPTURE_STATUS_NONE;
    return fk_leave(CUDA_SUCCESS);
}

/* ---- beginning and end ---------------------------------------------------------- */

CUresult cuStreamBeginCapture(CUstream handle, int mode)
{
    CUstream stream = NULL;
    FAKE_CALL(cuStreamBeginCapture);
    FAKE_TRY(fk_stream(handle, &stream));
    if (mode < CU_STREAM_CAPTURE_MODE_GLOBAL || mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return fk_leave(CUDA_ERROR_INVALID_VALUE);
    if (stream == &fk.contexts[stream->device].legacy)
        return fk_leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    if (stream->capture != NULL)
        return fk_leave(CUDA_ERROR_ILLEGAL_STATE);
    fk_capture *capture = fk_new(sizeof *capture);
    capture->mode = mode;
    capture->status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    capture->origin = stream;
    capture->thread = &here.token;
    fk_object_add(&capture->object, FK_CAPTURE);
    stream->capture = capture;
    return fk_leave(CUDA_SUCCESS);
}

/* Streams leave the capture, and continue after the work they had before it. */
static void release_streams(const fk_capture *capture)
{
    for (fk_object *it = fk.objects; it != NULL; it = it->next) {
        CUstream stream = (CUstream)it;
        if (it->kind != FAKE_STREAMS || stream->capture != capture)
            continue;
        stream->capture = NULL;
        fk_op_drop(stream->node);
        stream->node = NULL;
    }
}

/* All captured work must come before the origin's end. */
static int is_joined(const fk_capture *capture)
{
    const size_t n = capture->nodes.n;
    char *is_before = fk_new(n);
    int is_fine = 1;
    if (capture->origin->node != NULL)
        is_before[capture->origin->node->node] = 1;
    for (size_t i = n; i-- > 0;) {
        const fk_op *op = capture->nodes.ops[i];
        for (size_t d = 0; is_before[i] && d < op->deps.n; d++)
            is_before[op->deps.ops[d]->node] = 1;
        is_fine = is_fine && (is_before[i] || op->kind == FK_MARK);
    }
    free(is_before);
    return is_fine;
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph *out)
{
    CUstream stream = NULL;
    FAKE_CALL(cuStreamEndCapture);
    int result = CUDA_SUCCESS;
    FAKE_TRY(fk_stream(handle, &stream));
    fk_capture *capture = stream->capture;
    *out = NULL;
    if (capture == NULL)
        return fk_leave(CUDA_ERROR_ILLEGAL_STATE);
    if (capture->origin != stream) {
        invalidate(capture, "cuStreamEndCapture of another stream than the origin");
        return fk_leave(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
    }
    if (capture->thread != &here.token &&
        capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED)
        return fk_leave(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    if (capture->status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
        result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    else if (!is_joined(capture))
        result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    else
        *out = fk_graph_new(&capture->nodes);
    if (capture->reason[0] != '\0' && !fk.options.quiet)
        (void)fprintf(stderr, "fake: a capture was invalidated by %s\n",
                      capture->reason);
    capture->status = CU_STREAM_CAPTURE_STATUS_NONE;
    release_streams(capture);
    fk_nodes_drop(&capture->nodes);
    return fk_leave(result);
}

void fk_capture_reset(void)
{
    for (fk_object *it = fk.objects; it != NULL; it = it->next)
        if (it->kind == FK_CAPTURE)
            fk_nodes_drop(&((fk_capture *)it)->nodes);
}
