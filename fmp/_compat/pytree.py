"""Registering nodes, so that every caller of optree and of torch's own pytree sees them."""

from collections.abc import Callable, Hashable
from typing import Any, cast

import optree
import optree.registry
import torch.utils._pytree as torch_pytree

# `register_pytree_node(..., namespace="")` is refused, yet only nodes of the global registry are seen by every
# caller of optree, torch.compile's tracer included.
_GLOBAL: Any = cast(Any, optree.registry).__GLOBAL_NAMESPACE


def register_pytree(
    cls: type,
    *,
    fields: tuple[str, ...],
    flatten: Callable[[Any], tuple[tuple[Any, ...], Hashable]],
    unflatten: Callable[[Any, Any], Any],
) -> None:
    """Makes a class a pytree node for optree (in every namespace) and for torch's own pytree.

    Args:
        cls: The class to register.
        fields: Names of the child fields, in the order in which `flatten` returns them.
        flatten: Maps an instance to its children and its static data.
        unflatten: Maps static data and children back to an instance.
    """
    optree.register_pytree_node(
        cls,
        lambda node: (*flatten(node), fields),
        unflatten,
        path_entry_type=optree.DataclassEntry,
        namespace=_GLOBAL,
    )

    # torch.func.vmap refuses None among its inputs and outputs. Taking the node apart down to its leaves, and keeping
    # the holes in the context, hides them from it. (By torch's own pytree: Dynamo fails on optree's dictionaries here.)
    def flatten_leaves_with_keys(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
        children, static = flatten(node)
        pairs, spec = torch_pytree.tree_flatten_with_path(dict(zip(fields, children, strict=True)))
        context = (spec, tuple(leaf is None for _, leaf in pairs), static)
        keyed = [(torch_pytree.GetAttrKey(torch_pytree.keystr(path)), leaf) for path, leaf in pairs if leaf is not None]
        return keyed, context

    def flatten_leaves(node: Any) -> tuple[list[Any], Any]:
        children, static = flatten(node)
        leaves, spec = torch_pytree.tree_flatten(dict(zip(fields, children, strict=True)))
        return [leaf for leaf in leaves if leaf is not None], (spec, tuple(leaf is None for leaf in leaves), static)

    def unflatten_leaves(leaves: Any, context: Any) -> Any:
        spec, holes, static = context
        remaining = iter(leaves)
        children = torch_pytree.tree_unflatten([None if hole else next(remaining) for hole in holes], spec)
        return unflatten(static, tuple(children.values()))

    torch_pytree.register_pytree_node(
        cls,
        flatten_leaves,
        unflatten_leaves,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=flatten_leaves_with_keys,
    )
