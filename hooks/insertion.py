"""What graph.py asks of the compiler: the operator `attnwatch::see` behind every fused attention call of a graph.

A pass of the inductor backend, run after autograd has split the graph and after the compiler's own passes. Everything
the operator is given is a whole tensor in any case, because a kernel that is not generated takes or makes it: what is
fused, and so every bit of the result, stays as it was. Imported when it is needed only: it loads the compiler.
"""

from __future__ import annotations

import operator
import re
import weakref
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_custom_graph_passes, get_hash_for_files

from attnwatch.hooks.graph import kind_of

_KERNELS = re.compile(r"aten\._scaled_dot_product_(\w*_)?attention(_for_cpu|_overrideable)?$")
_TURNS = {"aten.permute", "aten.t", "aten.transpose"}
_CASTS = {"prims.convert_element_type", "aten._to_copy"}
_VIEWS = {"aten.slice", "aten.select", "aten.view", "aten.split", "aten.split_with_sizes"}
_DEPTH = 40  # operations between a projection and the product: views, norm, rotary embedding, in half precision
_MOST = 16  # inputs of the graph given to the operator


_ROUTES: weakref.WeakSet[Any] = weakref.WeakSet()
"""Whom errors are told; while there is none the pass does nothing."""


def stand(route: Any) -> None:
    """Graphs compiled from now on carry the operator. What was compiled before has none, and is dropped. Idempotent."""
    if route in _ROUTES:
        return
    passes = get_custom_graph_passes(config.post_grad_custom_post_pass)
    stands = any(isinstance(each, Insert) for each in passes)
    if not (stands and _ROUTES):
        torch.compiler.reset()
    if not stands:
        config.post_grad_custom_post_pass = [*passes, Insert()] if passes else Insert()
    _ROUTES.add(route)


def leave(route: Any) -> None:
    """With the last one the compiler's configuration is as it was found."""
    _ROUTES.discard(route)
    if not _ROUTES:
        passes = get_custom_graph_passes(config.post_grad_custom_post_pass)
        left = [each for each in passes if not isinstance(each, Insert)]
        if len(left) < len(passes):
            config.post_grad_custom_post_pass = left if len(left) > 1 else left[0] if left else None


class Insert(CustomGraphPass):
    """The pass. Without state of its own: the compiler copies its configuration."""

    def __call__(self, graph: fx.Graph) -> None:
        calls: Counter[tuple[fx.Node, ...]] = Counter()  # of each layer
        for node in list(graph.nodes) if _ROUTES else ():
            try:
                kernel = _kernel(node)
                if kernel is not None:
                    _insert(graph, kernel, calls)
            except Exception as error:  # the user's compilation goes on
                for route in list(_ROUTES):
                    route.failed(error)

    def uuid(self) -> Any:
        """Identity in the compiler's cache on disk: graphs with and without the operator are kept apart."""
        return get_hash_for_files((__file__,), str(bool(_ROUTES)))


class _Kernel(NamedTuple):
    """A fused call. arguments: by name. output: where its output lies in what the node returns."""

    node: fx.Node
    arguments: dict[str, Any]
    output: tuple[int, ...]


def _kernel(node: fx.Node) -> _Kernel | None:
    """What the node calls, if that is fused attention."""
    target: Any = node.target
    values: Any = node.args
    output: tuple[int, ...] = (0,)
    if str(target) in ("run_and_save_rng_state", "graphsafe_run_with_rng_state"):  # in checkpoints, dropout or not
        output = (1, 0) if str(target) == "run_and_save_rng_state" else (0,)
        target, *values = values
    if not _KERNELS.match(_name(target)):
        return None
    names = [argument.name for argument in target._schema.arguments]
    return _Kernel(node, {**dict(zip(names, values, strict=False)), **node.kwargs}, output)


def _item(graph: fx.Graph, node: fx.Node, index: int) -> fx.Node:
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == index:
            return user
    with graph.inserting_after(node):
        item = graph.call_function(operator.getitem, (node, index))
    item.meta["val"] = node.meta["val"][index]
    return item


def _insert(graph: fx.Graph, kernel: _Kernel, calls: Counter[tuple[fx.Node, ...]]) -> None:
    call = kernel.arguments
    stack = list(kernel.node.meta.get("nn_module_stack", {}).values())
    products, parameters = _behind(call["query"], call["key"])
    output = kernel.node
    for index in kernel.output:
        output = _item(graph, output, index)
    given = (
        *(call[name] for name in ("query", "key", "value")),
        output,
        call.get("attn_mask", call.get("attn_bias")),
        call.get("scale"),
        bool(call.get("is_causal", False)),
        call.get("dropout_p", 0.0) != 0.0,
        [product.input for product in products],
        [product.weight for product in products],
        [product.bias for product in products],
        [product.turned for product in products],
        parameters,
        list(dict.fromkeys(kind_of(kind) for _, kind in reversed(stack))),
        calls[tuple(parameters)],
    )
    calls[tuple(parameters)] += 1
    with graph.inserting_after(output):
        graph.call_function(torch.ops.attnwatch.see.default, given)


class _Product(NamedTuple):
    """A projection in the graph. turned: its weight is `[in, out]`."""

    input: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    turned: bool


def _behind(query: fx.Node, key: fx.Node) -> tuple[list[_Product], list[fx.Node]]:
    """The projections that queries and keys come from, and the inputs of the graph on the way: parameters, nearest
    first, those of the queries before those of the keys."""
    products: dict[fx.Node, _Product] = {}
    inputs: dict[fx.Node, None] = {}
    for end in (query, key):
        seen: set[fx.Node] = set()
        level = [end]
        for _ in range(_DEPTH):
            following: list[fx.Node] = []
            for node in level:
                if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor):
                    inputs[node] = None
                elif _name(node.target) in ("aten.mm", "aten.addmm"):
                    products[node] = _product(node)
                    following.append(products[node].weight)
                else:
                    following += node.all_input_nodes
            seen.update(level)
            level = [node for node in dict.fromkeys(following) if node not in seen]
    return list(products.values()), list(inputs)[:_MOST]


def _product(node: fx.Node) -> _Product:
    *added, rows, matrix = node.args
    weight, turns = _parameter(matrix) or (matrix, 0)
    bias = _parameter(added[0] if added else _added_later(node))
    return _Product(rows, weight, bias[0] if bias else None, turns % 2 == 0)  # type: ignore[arg-type]


def _parameter(used: Any) -> tuple[fx.Node, int] | None:
    """What a weight was before autocast cast it, and how often it was turned since; None for what is not a part of one
    of the graph's inputs: it may be no whole tensor."""
    node, turns = used, 0
    while node is not None and _name(node.target) in _TURNS | _CASTS:
        turns += _name(node.target) in _TURNS
        node = node.args[0]
    root = node
    while root is not None and (_name(root.target) in _VIEWS or root.target is operator.getitem):
        root = root.args[0]
    return None if root is None or root.op != "placeholder" else (node, turns)


def _added_later(product: fx.Node) -> fx.Node | None:
    """A vector added to the product, perhaps behind views: the compiler parts `addmm` into product and addition."""
    node: fx.Node | None = product
    while node is not None:
        for user in node.users:
            others = [x for x in user.all_input_nodes if x is not node]
            if _name(user.target) == "aten.add" and others and others[0].meta["val"].dim() == 1:
                return others[0]
        node = next((user for user in node.users if _name(user.target) in ("aten.view", "aten.reshape")), None)
    return None


def _name(target: Any) -> str:
    """`aten.mm` of that operator, "" of what is none."""
    return str(getattr(target, "_overloadpacket", ""))
