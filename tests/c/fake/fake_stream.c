/* fake_stream.c - streams and events. */
#include "state.h"

void fk_stream_init(CUstream stream, int device, unsigned flags)
{
    stream->device = device;
    stream->flags = flags;
    stream->lane = device; /* of the default stream; see create() */
}

int fk_stream(CUstream handle, CUstream *out)
{
    CUcontext context = NULL;
    if (handle == NULL || handle == CU_STREAM_LEGACY) {
        const int result = fk_need_context(&context);
        if (result == CUDA_SUCCESS)
            *out = &context->legacy;
        return result;
    }
    if (handle == CU_STREAM_PER_THREAD)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!fk.is_initialized)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (handle->object.is_dead) {
        fk_error("stream %d was used after its end", handle->object.id);
        return CUDA_ERROR_INVALID_HANDLE;
    }
    *out = handle;
    return CUDA_SUCCESS;
}

static int is_blocking(const struct CUstream_st *stream)
{
    return (stream->flags & CU_STREAM_NON_BLOCKING) == 0;
}

/* The legacy default stream waits for all blocking ones of its device, and they for
 * it. */
static void depend_on_legacy(fk_op *op, CUstream stream)
{
    CUstream legacy = &fk.contexts[stream->device].legacy;
    if (stream != legacy) {
        if (is_blocking(stream))
            fk_op_depend(op, legacy->tail);
        return;
    }
    for (fk_object *it = fk.objects; it != NULL; it = it->next) {
        CUstream other = (CUstream)it;
        if (it->kind == FAKE_STREAMS && other->device == stream->device &&
            is_blocking(other) && other->capture == NULL)
            fk_op_depend(op, other->tail);
    }
}

fk_op *fk_stream_next(CUstream stream)
{
    fk_op *op = fk_op_new(FK_MARK, stream->device, "what comes next");
    fk_op_depend(op, stream->tail);
    depend_on_legacy(op, stream);
    return op;
}

int fk_enqueue(fk_op *op, CUstream stream)
{
    op->stream_id = stream->object.id;
    op->lane = stream->lane;
    if (stream->capture != NULL)
        return fk_capture_take(op, stream);
    const int result = fk_forbid_implicit(stream, op->what);
    if (result != CUDA_SUCCESS) {
        fk_op_drop(op);
        return result;
    }
    fk_op_depend(op, stream->tail);
    depend_on_legacy(op, stream);
    fk_op_drop(stream->tail);
    stream->tail = fk_op_hold(op);
    fk_op_submit(op);
    if (!fk.options.blocking || stream != &fk.contexts[stream->device].legacy)
        return CUDA_SUCCESS;
    /* The real host goes on. */
    const fk_clock host = fk.host;
    const int waited = fk_wait_for(stream->tail, op->what);
    fk.host = host;
    return waited;
}

static int create(CUstream *out, unsigned flags)
{
    CUcontext context = NULL;
    const int result = fk_need_context(&context);
    if (result != CUDA_SUCCESS)
        return result;
    if (flags > CU_STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    CUstream stream = fk_new(sizeof *stream);
    fk_stream_init(stream, context->device, flags);
    stream->lane = FK_MAX_DEVICES + fk.n_lanes++ % (FK_GRAPH_LANE - FK_MAX_DEVICES);
    fk_object_add(&stream->object, FAKE_STREAMS);
    *out = stream;
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *out, unsigned flags)
{
    FAKE_CALL(cuStreamCreate);
    return fk_leave(create(out, flags));
}

CUresult cuStreamCreateWithPriority(CUstream *out, unsigned flags, int priority)
{
    FAKE_CALL(cuStreamCreateWithPriority);
    (void)priority; /* CUDA clamps it to its range */
    return fk_leave(create(out, flags));
}

/* Work in the stream is still executed. */
CUresult cuStreamDestroy(CUstream handle)
{
    FAKE_CALL(cuStreamDestroy);
    if (handle == NULL || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD)
        return fk_leave(CUDA_ERROR_INVALID_HANDLE);
    CUstream stream = NULL;
    FAKE_TRY(fk_stream(handle, &stream));
    if (stream->capture != NULL)
        fk_error("stream %d was destroyed while it is captured", stream->object.id);
    fk_object_kill(&stream->object);
    return fk_leave(CUDA_SUCCESS);
}

CUresult cuStreamSynchronize(CUstream handle)
{
    CUstream stream = NULL;
    FAKE_CALL(cuStreamSynchronize);
    FAKE_TRY(fk_stream(handle, &stream));
    FAKE_TRY(fk_forbid_captured(stream, "cuStreamSynchronize"));
    return fk_leave(fk_wait_stream(stream, "cuStreamSynchronize"));
}

CUresult cuStreamQuery(CUstream handle)
{
    CUstream stream = NULL;
    FAKE_CALL(cuStreamQuery);
    FAKE_TRY(fk_stream(handle, &stream));
    FAKE_TRY(fk_forbid_captured(stream, "cuStreamQuery"));
    return fk_leave(fk_query(stream->tail));
}

/* ---- events --------------------------------------------------------------------- */

static int check_event(CUevent event)
{
    if (event == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    if (event->object.is_dead) {
        fk_error("event %d was used after its end", event->object.id);
        return CUDA_ERROR_INVALID_HANDLE;
    }
    return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent *out, unsigned flags)
{
    CUcontext context = NULL;
    FAKE_CALL(cuEventCreate);
    FAKE_TRY(fk_need_context(&context));
    if (flags > 7)
        return fk_leave(CUDA_ERROR_INVALID_VALUE);
    CUevent event = fk_new(sizeof *event);
    event->device = context->device;
    event->flags = flags;
    fk_object_add(&event->object, FAKE_EVENTS);
    *out = event;
    return fk_leave(CUDA_SUCCESS);
}

CUresult cuEventDestroy(CUevent event)
{
    FAKE_CALL(cuEventDestroy);
    FAKE_TRY(check_event(event));
    fk_op_drop(event->record);
    event->record = NULL;
    fk_object_kill(&event->object);
    return fk_leave(CUDA_SUCCESS);
}

CUresult cuEventRecord(CUevent event, CUstream handle)
{
    CUstream stream = NULL;
    FAKE_CALL(cuEventRecord);
    FAKE_TRY(check_event(event));
    FAKE_TRY(fk_stream(handle, &stream));
    if (stream->device != event->device)
        return fk_leave(CUDA_ERROR_INVALID_HANDLE);
    fk_op *op = fk_op_hold(fk_op_new(FK_MARK, stream->device, "cuEventRecord"));
    op->event_id = event->object.id;
    const int result = fk_enqueue(op, stream);
    if (result != CUDA_SUCCESS) {
        fk_op_drop(op);
        return fk_leave(result);
    }
    fk_op_drop(event->record);
    event->record = op;
    return fk_leave(CUDA_SUCCESS);
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned flags)
{
    CUstream stream = NULL;
    FAKE_CALL(cuStreamWaitEvent);
    FAKE_TRY(check_event(event));
    FAKE_TRY(fk_stream(handle, &stream));
    if (flags > 1)
        return fk_leave(CUDA_ERROR_INVALID_VALUE);
    if (event->record == NULL)
        return fk_leave(CUDA_SUCCESS);
    FAKE_TRY(fk_join_capture(stream, event->record));
    fk_op *op = fk_op_new(FK_MARK, stream->device, "cuStreamWaitEvent");
    op->event_id = event->object.id;
    fk_op_depend(op, event->record);
    return fk_leave(fk_enqueue(op, stream));
}

CUresult cuEventQuery(CUevent event)
{
    FAKE_CALL(cuEventQuery);
    FAKE_TRY(check_event(event));
    FAKE_TRY(fk_forbid_captured_event(event, "cuEventQuery"));
    return fk_leave(fk_query(event->record));
}

CUresult cuEventSynchronize(CUevent event)
{
    FAKE_CALL(cuEventSynchronize);
    FAKE_TRY(check_event(event));
    FAKE_TRY(fk_forbid_captured_event(event, "cuEventSynchronize"));
    if (event->record != NULL)
        FAKE_TRY(fk_wait_for(event->record, "cuEventSynchronize"));
    return fk_leave(CUDA_SUCCESS);
}
