"""The route that stays inside a compiled graph: an operator of ours behind every fused attention call.

A pass of the inductor backend puts it into the forward graph after autograd has split it, where queries and keys are
whole tensors in any case: full graph, no break, and loss and gradients stay bit-identical. The operator returns at once
unless a sample is being taken; turning it on and off recompiles nothing.
"""

from __future__ import annotations

import itertools
import operator
import re
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from attnwatch.hooks.attention import Attention
from attnwatch.hooks.projections import projected
from attnwatch.hooks.sites import clean_name
from attnwatch.hooks.tap import Frame, Norm, Seen

KERNELS = re.compile(r"_?scaled_dot_product_(\w*_)?attention(_for_cpu|_overrideable)?$")
_PATH = re.compile(r"\['?([^'\]]+)'?\]|\.([A-Za-z_0-9]+)")
_DEPTH = 24  # operations between a projection and the product: views, norm, rotary embedding

Op = Any  # torch's registered operators are not typed


class Place(NamedTuple):
    """Where one operator stands: which route it serves, the module's path from its graph's root, its call there, and
    what the kernel was given beside tensors. names: of the tensors in the operator's list. products: whether
    each weight is `[in, out]`, and whether a bias is still to be added to its output."""

    route: weakref.ref[GraphRoute]
    path: str
    call: int
    names: tuple[str, ...]
    products: tuple[tuple[bool, bool], ...]
    causal: bool
    dropped: bool
    scale: float | None


_PLACES: dict[int, Place] = {}
_COUNT = itertools.count()


def _see(place: int, tensors: list[Tensor], outputs: list[Tensor], weights: list[Tensor], biases: list[Tensor]) -> None:
    known = _PLACES.get(place)
    route = known.route() if known is not None else None
    if known is not None and route is not None and route.armed:
        route.see(known, tensors, outputs, weights, biases)


def _operator() -> Op:
    """Registered once a process, when the route is first asked for."""
    if not hasattr(torch.ops.attnwatch, "see"):
        definition = torch.library.custom_op(
            "attnwatch::see", _see, mutates_args=(), tags=(torch._C.Tag.cudagraph_unsafe,),
            schema="(int place, Tensor[] tensors, Tensor[] outputs, Tensor[] weights, Tensor[] biases) -> ()",
        )  # fmt: skip
        definition.register_fake(lambda place, tensors, outputs, weights, biases: None)
        fx.node.has_side_effect(torch.ops.attnwatch.see.default)  # it returns nothing, and must not be dropped for it
    return torch.ops.attnwatch.see.default


class GraphRoute:
    """Puts the operator into every graph compiled while it is installed, and hands what the operator saw to a probe.

    Raises RuntimeError where this torch has no place for such a pass.
    """

    def __init__(self, probe: Any) -> None:
        self.armed = False
        self._probe = probe
        self._regions = threading.local()  # compiled parts of the model that run now, innermost last
        self._operator = _operator()
        self._pass = _pass(self)
        self._earlier = torch._inductor.config.post_grad_custom_post_pass
        torch._dynamo.reset()  # what was compiled before has no operator in it
        torch._inductor.config.post_grad_custom_post_pass = self._pass

    def remove(self) -> None:
        """Graphs compiled from now on carry nothing of ours; those that do return at once from it."""
        self.armed = False
        if torch._inductor.config.post_grad_custom_post_pass is self._pass:
            torch._inductor.config.post_grad_custom_post_pass = self._earlier

    # --- at run time ----------------------------------------------------------------------------------------------------

    @property
    def regions(self) -> list[str]:
        if not hasattr(self._regions, "names"):
            self._regions.names = []
        names: list[str] = self._regions.names
        return names

    def see(
        self, place: Place, tensors: list[Tensor], outputs: list[Tensor], weights: list[Tensor], biases: list[Tensor]
    ) -> None:
        """One graph may serve many equal layers: the compiled part that runs now tells which of them this is."""
        name = ".".join(part for part in (self.regions[-1] if self.regions else "", place.path) if part)
        modules = {clean_name(key): module for key, module in self._probe.model.named_modules()}
        module = modules.get(name)
        if module is None:
            return
        frame = Frame(name, module, True)
        if self._probe.looking:
            rest = iter(biases)
            for (turned, biased), weight, y in zip(place.products, weights, outputs, strict=True):
                made = projected(True, weight.t() if turned else weight, y)
                rows = made.rows + next(rest) if biased and made.rows is not None else made.rows
                frame.products.append(made._replace(rows=rows))
            frame.norms = list(_norms(module))
        named = dict(zip(place.names, tensors, strict=True))
        attention = Attention(
            q=named["query"], k=named["key"], scale=place.scale, causal=place.causal, mask=named.get("mask")
        )
        seen = Seen(attention, named["value"], named["output"], dropped=place.dropped)
        self._probe.gather(frame, seen, place.call)

    # --- when a graph is compiled -----------------------------------------------------------------------------------------

    def insert(self, graph: fx.Graph) -> None:
        calls: dict[str, int] = {}
        for node in list(graph.nodes):
            if node.op != "call_function" or not KERNELS.search(_name(node)):
                continue
            path = _module_path(node)
            index = calls.get(path, 0)
            calls[path] = index + 1
            call = {
                **dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False)),
                **node.kwargs,
            }
            tensors = {"query": call["query"], "key": call["key"], "value": call["value"]}
            mask = call.get("attn_mask", call.get("attn_bias"))
            if mask is not None:
                tensors["mask"] = mask
            products = list(_projections(call["query"], call["key"]))
            with graph.inserting_after(node):
                tensors["output"] = graph.call_function(operator.getitem, (node, 0))
                tensors["output"].meta["val"] = node.meta["val"][0]
            number = next(_COUNT)
            causal, dropped = bool(call.get("is_causal", False)), call.get("dropout_p", 0.0) != 0.0
            kinds = tuple((product.turned, product.bias is not None) for product in products)
            _PLACES[number] = Place(
                weakref.ref(self), path, index, tuple(tensors), kinds, causal, dropped, call.get("scale")
            )
            with graph.inserting_after(tensors["output"]):
                lists = [p.output for p in products], [p.weight for p in products], [p.bias for p in products if p.bias]
                arguments = (number, list(tensors.values()), *lists)
                graph.call_function(self._operator, arguments)


def _pass(route: GraphRoute) -> Any:
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_custom_graph_passes

    earlier = list(get_custom_graph_passes(torch._inductor.config.post_grad_custom_post_pass))

    class Insert(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            for other in earlier:
                other(graph)
            route.insert(graph)

        def uuid(self) -> None:
            """None: no caching on disk, for the numbers of places are of this process."""

    return Insert()


def _module_path(node: fx.Node) -> str:
    """`layers.0.attn` of a node, from the root of its graph."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    if not stack:
        return ""
    _, _, below = str(stack[-1][0]).partition("]")
    parts = [bracket or name for bracket, name in _PATH.findall(below)]
    return clean_name(".".join(part for part in parts if part != "_modules"))


class _Found(NamedTuple):
    """A matrix product in the graph. turned: the weight is `[in, out]`. bias: where the compiler adds it later."""

    weight: fx.Node
    output: fx.Node
    turned: bool
    bias: fx.Node | None


def _projections(*ends: fx.Node) -> Iterator[_Found]:
    """The matrix products behind queries and keys."""
    seen: set[fx.Node] = set()
    level = list(ends)
    for _ in range(_DEPTH):
        level = [node for node in dict.fromkeys(level) if node not in seen]
        seen.update(level)
        following = []
        for node in level:
            name = _name(node)
            if name in ("aten.mm", "aten.addmm"):
                matrix = node.args[-1] if name == "aten.addmm" else node.args[1]
                if isinstance(matrix, fx.Node):
                    turned = _name(matrix) not in ("aten.permute", "aten.t", "aten.transpose")
                    yield _Found(matrix if turned else matrix.all_input_nodes[0], node, turned, _later_bias(node))
            else:
                following += node.all_input_nodes
        level = following


def _later_bias(product: fx.Node) -> fx.Node | None:
    """A vector added to the product, through views: the compiler parts `addmm` into a product and an addition."""
    node = product
    for _ in range(3):
        for user in node.users:
            if _name(user) == "aten.add":
                other = next((x for x in user.all_input_nodes if x is not node), None)
                if other is not None and other.meta["val"].dim() == 1:
                    return other
        views = [user for user in node.users if _name(user) in ("aten.view", "aten.reshape")]
        if len(views) != 1:
            return None
        node = views[0]
    return None


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "_overloadpacket", ""))


def _norms(module: nn.Module) -> Iterator[Norm]:
    """Norm layers inside an attention layer; a compiled graph no longer shows which function they were."""
    for name, part in module.named_modules():
        label = type(part).__name__
        if name and re.search(r"norm|rms|l2", label, re.IGNORECASE) and not any(part.children()):
            size = max((parameter.numel() for parameter in part.parameters()), default=0)
            yield Norm(label, part.forward, size, False)
