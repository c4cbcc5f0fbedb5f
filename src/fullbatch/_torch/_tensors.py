"""What a tensor is: its storage, its version, the tensors that it wraps. Seen on torch 2.13.

Reason: whose memory is whose, and whether it was written since, torch tells autograd and nobody else.
"""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree

# Flattening of nests is public only in C++ form (optree); transformers registers its outputs here.
tree_map = pytree.tree_map


# The common base of every batch normalisation; its subclasses alone are public.
BatchNorm = torch.nn.modules.batchnorm._BatchNorm


# A tensor inside of torch.func's transforms (vmap, grad) wraps another; captured, the transform would be left out.
is_transformed = torch._C._functorch.is_functorch_wrapped_tensor


def storage_key(tensor: torch.Tensor) -> int:
    """Identifies the storage behind a tensor; an address would not do, since all storages of `meta` have none."""
    return int(tensor.untyped_storage()._cdata)


def version(tensor: torch.Tensor) -> int:
    """How often a tensor, or one that shares its memory, was changed in place; what autograd checks in a backward."""
    return 0 if tensor.is_inference() else int(tensor._version)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows the tensor as a view of another; `_base` is private, and so is `_is_view`."""
    return tensor._base is not None


def is_wrapper(kind: type) -> bool:
    """Whether tensors of this class hold others and have no storage of their own (a low-bit optimizer state)."""
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with storage that `tensor` is made of: itself, but for one that wraps others."""
    if not is_wrapper(type(tensor)):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [part for name in names for part in plain_parts(getattr(tensor, name))]
