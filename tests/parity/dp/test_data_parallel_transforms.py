"""Many gradients at once, and torch's transforms of functions, through the wrapper."""

import pytest
import torch
from replicas import Power, Twin, loss_of, slopes_of, small, squares_of

# ---- many at once -------------------------------------------------------------------


def test_a_batch_of_gradients_may_have_a_graph(wrap):
    twin = Twin(wrap, Power())
    directions = small(4, 7, 2, seed=5)

    def run(model, x):
        weights = list(model.parameters())[:2]
        slopes = slopes_of(
            model(x), [x, *weights], grad_outputs=directions, is_grads_batched=True
        )
        squares_of(slopes).backward()
        return slopes, x.grad

    for _ in range(2):
        twin.zero()
        twin.compare(run, small(7, 3).requires_grad_())
        twin.assert_same()


def test_vmaps_may_go_over_a_backward(wrap):
    twin = Twin(wrap, Power())
    directions = small(2, 3, 7, 2, seed=5)

    def run(model, x):
        out = model(x)

        def pull(direction, retain=True):
            return torch.autograd.grad(out, x, direction, retain_graph=retain)[0]

        once = torch.vmap(pull)(directions[0])
        twice = torch.vmap(torch.vmap(pull), in_dims=1, out_dims=1)(directions)
        last = torch.vmap(lambda v: pull(v, retain=False))(directions[1])
        with pytest.raises(RuntimeError, match="second time"):
            out.sum().backward()
        return once, twice, last

    twin.compare(run, small(7, 3).requires_grad_())
    twin.step(lambda model, x: loss_of(model(x)), small(7, 3).requires_grad_())


# ---- torch.func ---------------------------------------------------------------------


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda y: loss_of(f(y)))(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda y: loss_of(f(y)))(x),
    "vmap": lambda f, x: torch.vmap(f)(torch.stack([x, x + 1])).detach(),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_of_a_forward_give_what_they_give_plainly(wrap, transform):
    twin = Twin(wrap, Power())
    x = small(5, 3)
    twin.compare(transform, x)
    twin.step(lambda model, x: loss_of(model(x)), x)


def test_forward_mode_gives_what_it_gives_plainly(wrap):
    twin = Twin(wrap, Power())

    def run(model, x):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            return torch.autograd.forward_ad.unpack_dual(model(dual)).tangent.detach()

    assert twin.compare(run, small(7, 3))[4:].any()
    twin.step(lambda model, x: loss_of(model(x)), small(7, 3))
