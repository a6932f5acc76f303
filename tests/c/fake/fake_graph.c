/* fake_graph.c - graphs: captured work, to be launched again and again. */
#include "state.h"

struct CUgraph_st {
    fk_object object;
    fk_list nodes;
};

struct CUgraphExec_st {
    fk_object object;
    fk_list nodes;
    fk_op *last; /* the end of its last launch; counted */
};

/* Drops the newest first, so that no chain is dropped recursively. */
void fk_nodes_drop(fk_list *nodes)
{
    while (nodes->n > 0)
        fk_op_drop(nodes->ops[--nodes->n]);
    fk_list_free(nodes);
}

static void count_launches(const fk_list *nodes, int by)
{
    for (size_t i = 0; i < nodes->n; i++)
        if (nodes->ops[i]->kind == FK_LAUNCH)
            fk_launch_count_graph(nodes->ops[i], by);
}

static void hold_nodes(fk_list *to, const fk_list *from)
{
    for (size_t i = 0; i < from->n; i++)
        fk_list_add(to, fk_op_hold(from->ops[i]));
    count_launches(to, 1);
}

CUgraph fk_graph_new(const fk_list *nodes)
{
    CUgraph graph = fk_new(sizeof *graph);
    hold_nodes(&graph->nodes, nodes);
    fk_object_add(&graph->object, FAKE_GRAPHS);
    return graph;
}

static int check(const fk_object *object, const char *what)
{
    if (object == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (object->is_dead)
        fk_error("%s: graph %d was used after its end", what, object->id);
    return object->is_dead ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuGraphInstantiate(CUgraphExec *out, CUgraph graph, uint64_t flags)
{
    FAKE_CALL(cuGraphInstantiate);
    (void)flags;
    FAKE_TRY(check((const fk_object *)graph, "cuGraphInstantiate"));
    FAKE_TRY(fk_forbid_unsafe("cuGraphInstantiate"));
    CUgraphExec exec = fk_new(sizeof *exec);
    hold_nodes(&exec->nodes, &graph->nodes);
    fk_object_add(&exec->object, FAKE_EXECS);
    *out = exec;
    return fk_leave(CUDA_SUCCESS);
}

CUresult cuGraphDestroy(CUgraph graph)
{
    FAKE_CALL(cuGraphDestroy);
    FAKE_TRY(check((const fk_object *)graph, "cuGraphDestroy"));
    count_launches(&graph->nodes, -1);
    fk_nodes_drop(&graph->nodes);
    fk_object_kill(&graph->object);
    return fk_leave(CUDA_SUCCESS);
}

CUresult cuGraphExecDestroy(CUgraphExec exec)
{
    FAKE_CALL(cuGraphExecDestroy);
    FAKE_TRY(check((const fk_object *)exec, "cuGraphExecDestroy"));
    count_launches(&exec->nodes, -1);
    fk_nodes_drop(&exec->nodes);
    fk_op_drop(exec->last);
    exec->last = NULL;
    fk_object_kill(&exec->object);
    return fk_leave(CUDA_SUCCESS);
}

/* ---- launches ------------------------------------------------------------------- */

static fk_op *copy_of(const fk_op *node)
{
    fk_op *op = fk_op_new(node->kind, node->device, node->what);
    op->stream_id = node->stream_id;
    op->event_id = node->event_id;
    if (node->kind == FK_KERNEL) {
        const size_t n_bytes = fk_args_bytes(node->kernel);
        op->kernel = node->kernel;
        memcpy(op->grid, node->grid, sizeof op->grid);
        memcpy(op->block, node->block, sizeof op->block);
        op->args = fk_new(n_bytes);
        memcpy(op->args, node->args, n_bytes);
    } else if (node->kind == FK_LAUNCH) {
        op->launch = fk_launch_clone(node->launch);
    } else if (node->kind != FK_MARK) {
        op->to = node->to;
        op->from = node->from;
        op->n_bytes = node->n_bytes;
        op->value = node->value;
        op->is_to_device = node->is_to_device;
        op->is_from_device = node->is_from_device;
    }
    return op;
}

/* All nodes come after `before`, and `after` after them. */
static void submit(const fk_list *nodes, fk_op *before, fk_op *after)
{
    fk_op **clones = fk_new(nodes->n * sizeof(fk_op *));
    for (size_t i = 0; i < nodes->n; i++) {
        const fk_op *node = nodes->ops[i];
        clones[i] = fk_op_hold(copy_of(node));
        fk_op_depend(clones[i], before);
        for (size_t d = 0; d < node->deps.n; d++)
            fk_op_depend(clones[i], clones[node->deps.ops[d]->node]);
        if (node->dependents.n == 0)
            fk_op_depend(after, clones[i]);
        fk_op_submit(clones[i]);
    }
    for (size_t i = 0; i < nodes->n; i++)
        fk_op_drop(clones[i]);
    free(clones);
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream handle)
{
    CUstream stream = NULL;
    FAKE_CALL(cuGraphLaunch);
    FAKE_TRY(check((const fk_object *)exec, "cuGraphLaunch"));
    FAKE_TRY(fk_stream(handle, &stream));
    if (stream->capture != NULL) {
        fk_error("the fake has no graphs within graphs");
        return fk_leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    for (size_t i = 0; i < exec->nodes.n; i++)
        if (exec->nodes.ops[i]->kind == FK_LAUNCH)
            fk_launch_check(exec->nodes.ops[i]);
    fk_op *before = fk_op_hold(fk_op_new(FK_MARK, stream->device, "a graph's begin"));
    fk_op *after = fk_op_hold(fk_op_new(FK_MARK, stream->device, "a graph's end"));
    fk_op_depend(before, exec->last);
    int result = fk_enqueue(before, stream);
    if (result == CUDA_SUCCESS) {
        submit(&exec->nodes, before, after);
        result = fk_enqueue(after, stream);
        fk_op_drop(exec->last);
        exec->last = fk_op_hold(after);
    } else {
        fk_op_drop(after);
    }
    fk_op_drop(before);
    fk_op_drop(after);
    return fk_leave(result);
}

void fk_graph_reset(void)
{
    for (fk_object *it = fk.objects; it != NULL; it = it->next) {
        if (it->is_dead)
            continue;
        if (it->kind == FAKE_GRAPHS)
            fk_nodes_drop(&((CUgraph)it)->nodes);
        if (it->kind == FAKE_EXECS) {
            fk_nodes_drop(&((CUgraphExec)it)->nodes);
            fk_op_drop(((CUgraphExec)it)->last);
        }
    }
}
