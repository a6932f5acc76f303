"""Data parallelism on one dimension of a 2 x 2 mesh, with other kinds on the other."""

import pytest
import torch
import torch.distributed as dist
from cases import as_torch, assert_equal, net, on_ranks
from paceline._compat import torch_core
from torch import nn
from torch.distributed import pipelining
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform


def mesh_of(other):
    return dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", other))


def tensor_parallel(mesh, plan="part"):
    layers = [nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)]
    if plan == "part":
        layers += [nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4)]
    split = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(nn.Sequential(*layers), mesh["tp"], split)


WAYS = ["SGD", "AdamW", "accumulation", "through a group", "evaluated first"]


@as_torch(4, plan=["whole", "part"], way=WAYS)
def test_tensor_parallel_parts_are_averaged_in_every_step(ranks, wrap, plan, way):
    mesh = mesh_of("tp")
    kind, module = type(wrap(nn.Linear(1, 1))), tensor_parallel(mesh, plan)
    where = {"device_mesh": mesh["dp"]}
    if way == "through a group":
        _pre_dp_module_transform(module)
        where = {"process_group": mesh["dp"].get_group()}
    model = kind(module, **where)
    parameters = [*model.parameters()]
    optimizer = getattr(torch.optim, way if way == "AdamW" else "SGD")(parameters, 0.05)
    if way == "evaluated first" and kind is ranks.ours:  # then torch trains only a part
        with torch.inference_mode():
            model.eval()(torch.ones(2, 6))
        model.train()
    drawn = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    for _ in range(6):
        optimizer.zero_grad()
        if way == "accumulation":
            with model.no_sync():
                model(torch.randn(3, 6, generator=drawn)).square().sum().backward()
        model(torch.randn(3, 6, generator=drawn)).square().sum().backward()
        yield [p.grad for p in parameters]
        optimizer.step()
    yield [*parameters, sorted(model.state_dict())]


@on_ranks(4)
def test_a_dtensor_that_is_a_parameter_is_refused_in_one_sentence(ranks):
    mesh = mesh_of("tp")
    with pytest.raises(NotImplementedError, match=r"'0\.weight' is a DTensor.*mesh="):
        ranks.ours(tensor_parallel(mesh), process_group=mesh["dp"].get_group())


@on_ranks(4, schedule=["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"])
def test_stages_of_a_pipeline_are_averaged_once_in_every_step(ranks, schedule):
    """Compare with plain stages, averaged by hand: torch's class rounds differently."""
    if torch_core.version() < (2, 6):
        pytest.skip(f"torch {torch.__version__} has another PipelineStage")
    mesh = mesh_of("pp")
    dp, group, first = mesh["dp"], mesh["pp"].get_group(), mesh["pp"].get_local_rank()
    numbers = [first, first + 2] if "Interleaved" in schedule else [first]
    grads = {True: [], False: []}
    for is_wrapped, seen in grads.items():
        modules = [net(6, 8, 6) for _ in numbers]
        if is_wrapped:
            modules = [ranks.ours(module, device_mesh=dp) for module in modules]
        stages = [
            pipelining.PipelineStage(
                *row, 2 * len(numbers), dp.device_type, group=group
            )
            for row in zip(modules, numbers, strict=True)
        ]
        run = getattr(pipelining, schedule)(
            stages if len(stages) > 1 else stages[0], 4, loss_fn=nn.MSELoss()
        )
        drawn = torch.Generator().manual_seed(dp.get_local_rank())
        for _ in range(3):
            x, y = (torch.randn(8, 6, generator=drawn) / 64 for _ in range(2))
            run.step(*([] if first else [x]), **({"target": y} if first else {}))
            for p in nn.ModuleList(modules).parameters():
                if not is_wrapped:
                    dist.all_reduce(p.grad, group=dp.get_group())
                    p.grad /= 2
                seen.append(p.grad.clone())
                p.grad = None
    for theirs, mine in zip(grads[False], grads[True], strict=True):
        assert_equal(mine, theirs, "a gradient")
