"""Sparse gradients: from torch's tensors to rows, and back.

The native reducer calls these once per parameter and step, before the last operation of
the step, because nothing may interrupt what follows it.  "Rows" are a pair: their
indices, ascending and unique, or None for all rows; and their values.
"""

from __future__ import annotations

import torch

Rows = tuple[torch.Tensor | None, torch.Tensor]


def read(parameter: torch.Tensor) -> Rows | None:
    """Return the rows of a parameter's gradient; None if it has no gradient."""
    if parameter.grad is None:
        return None
    grad = parameter.grad.detach()
    if grad.shape != parameter.shape or grad.dtype != parameter.dtype:
        raise RuntimeError(
            f"the gradient of a {parameter.dtype} parameter of shape "
            f"{tuple(parameter.shape)} is {grad.dtype} of shape {tuple(grad.shape)}: "
            "wrap the model again after changing its parameters"
        )
    if grad.layout != torch.sparse_coo:
        return None, _plain(grad.to_dense())
    if grad.sparse_dim() != 1:
        grad = grad.to_dense().to_sparse(1)
    grad = grad.coalesce()
    return grad._indices()[0].contiguous(), _plain(grad._values())


def _plain(values: torch.Tensor) -> torch.Tensor:
    """Return the values as one block of memory, with lazy conj and neg applied."""
    return values.resolve_conj().resolve_neg().contiguous()


def room(
    parameter: torch.Tensor, n_rows: int | None
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Return new memory for the averages of `n_rows` rows, or of all if None.

    Returns the two parts of the rows, then the tensor that owns them.  The memory is
    never the gradient's: a rank keeps that in a shadow step, or if its step fails.
    """
    shape, device = parameter.shape, parameter.device
    if n_rows is None:
        values = torch.empty(shape, dtype=parameter.dtype, device=device)
        return None, values, values
    numbers = torch.empty(n_rows, dtype=torch.int64, device=device)
    values = torch.empty(n_rows, *shape[1:], dtype=parameter.dtype, device=device)
    average = torch.sparse_coo_tensor(
        numbers.unsqueeze(0),
        values,
        shape,
        device=device,
        check_invariants=False,
        is_coalesced=True,
    )
    return numbers, values, average


def densify(grad: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """Return a dense copy and the number of sparse dimensions; None if dense."""
    if grad.layout != torch.sparse_coo:
        return None
    return grad.detach().to_dense(), grad.sparse_dim()
