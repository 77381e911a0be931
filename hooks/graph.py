"""The route that stays inside a compiled graph: an operator of ours behind every fused attention call.

The inductor backend puts it there (insertion.py): full graph, no break, and loss and gradients stay bit-identical.
It returns at once unless a sample is being taken; turning it on and off recompiles nothing, and the model carries no
hooks. One graph may serve many equal layers, of several models too: which layer a call belongs to is told by the
parameters behind its queries.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attnwatch.hooks import sites
from attnwatch.hooks.adapters import adapter_for
from attnwatch.hooks.attention import Attention
from attnwatch.hooks.projections import projected
from attnwatch.hooks.tap import Frame, Norm, Product, Seen

BLIND = (
    'compiled="graph" sees fused attention in graphs that inductor compiled after watch(); attention by hand or flex, '
    'with dropout or a learned bias on a CPU, observe() and what runs eagerly stay unseen: use compiled="eager"'
)

_SCHEMA = (
    "see(Tensor query, Tensor key, Tensor value, Tensor output, Tensor? mask, float? scale, bool causal, bool dropped, "
    "Tensor[] inputs, Tensor[] weights, Tensor?[] biases, bool[] turned, Tensor[] parameters, str[] kinds, int nth) "
    "-> ()"
)


class Call(NamedTuple):
    """What the operator is given, in the order of its schema.

    output: the kernel's. inputs `[n, in]`, weights (`[in, out]` where turned), biases: of the projections behind
    queries and keys. parameters: the graph's inputs behind them. kinds: of the modules around the call, innermost
    first. nth: which call in that module and graph.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    mask: Tensor | None
    scale: float | None
    causal: bool
    dropped: bool
    inputs: list[Tensor]
    weights: list[Tensor]
    biases: list[Tensor | None]
    turned: list[bool]
    parameters: list[Tensor]
    kinds: list[str]
    nth: int


class GraphRoute:
    """Hands to a probe what the operator sees in the probe's model. Raises ValueError where this torch cannot do it."""

    def __init__(self, probe: Any) -> None:
        self._probe = probe
        self._insertion = _load()
        self._modules: dict[str, nn.Module] = {}
        self._parameters: dict[int, tuple[str, Tensor]] = {}  # by address

    def start(self) -> None:
        """From now on calls are seen. The first time, whatever was compiled before is dropped: it has no operator."""
        self._insertion.stand(self)
        self._look_around()
        _STARTED.add(self)

    def stop(self) -> None:
        _STARTED.discard(self)

    def close(self) -> None:
        """Graphs compiled from now on carry nothing of ours; those that do return at once from it."""
        self.stop()
        self._insertion.leave(self)

    def failed(self, error: Exception) -> None:
        """The compiler's graph was not understood, or a call in it."""
        self._probe.failed("compiled graph", error)

    def see(self, call: Call) -> None:
        if not self._probe.counts:
            return
        name = self._layer_of(call)
        if name is None:
            return
        module = self._modules[name]
        frame = Frame(name, module, True, adapter=adapter_for(self._probe.adapters, name, module))
        if self._probe.looking:
            frame.products = list(_products(call))
            frame.norms = list(_norms(module))
        attention = Attention(q=call.query, k=call.key, scale=call.scale, causal=call.causal, mask=call.mask)
        self._probe.gather(frame, Seen(attention, call.value, call.output, dropped=call.dropped), call.nth)

    def _layer_of(self, call: Call) -> str | None:
        """The innermost module around the call that holds one of the parameters; None if none is the model's."""
        names = self._names_of(call.parameters)
        if not names:
            self._look_around()  # sharded parameters are whole, and elsewhere, while the forward runs
            names = self._names_of(call.parameters)
        around = [name for parameter in names for name in self._around(parameter)]
        for kind in call.kinds:
            for name in around:
                if kind_of(type(self._modules[name])) == kind:
                    return name
        return next(iter(around), None)

    def _names_of(self, tensors: list[Tensor]) -> list[str]:
        """Of parameters that still are where they were found: what they leave is given to others."""
        addresses = [x.data_ptr() for x in tensors if x.data_ptr() in self._parameters]
        return [name for at in addresses for name, parameter in [self._parameters[at]] if parameter.data_ptr() == at]

    def _around(self, parameter: str) -> Iterator[str]:
        """Modules that hold a parameter and may be an attention layer, innermost first."""
        parts = parameter.split(".")
        for end in range(len(parts) - 1, -1, -1):
            name = ".".join(parts[:end])
            if name in self._modules:
                yield name

    def _look_around(self) -> None:
        owners = sites.owners(self._probe.model)
        self._modules = {name: module for name, module in sites.hookable(self._probe.model) if name in owners}
        named = self._probe.model.named_parameters()
        self._parameters = {parameter.data_ptr(): (sites.clean_name(name), parameter) for name, parameter in named}
        self._parameters.pop(0, None)  # of parameters without storage


_STARTED: weakref.WeakSet[GraphRoute] = weakref.WeakSet()


def _see(*given: Any) -> None:
    for route in list(_STARTED):
        try:
            route.see(Call(*given))
        except Exception as error:  # never into the model
            route.failed(error)


@functools.cache
def _library() -> torch.library.Library:
    """The operator, registered once a process, when a route is first asked for."""
    # What it does differs from call to call: it is no part of a CUDA graph. It takes tensors as they lie.
    tags = torch.Tag.cudagraph_unsafe, torch.Tag.flexible_layout
    library = torch.library.Library("attnwatch", "DEF")
    library.define(_SCHEMA, tags=tags)
    library.impl("see", _see, "CompositeExplicitAutograd")
    torch.library.register_fake("attnwatch::see", lambda *given: None, lib=library)
    torch.fx.node.has_side_effect(torch.ops.attnwatch.see.default)  # it returns nothing, and must not be dropped for it
    return library


def _load() -> ModuleType:
    """insertion.py, whose import loads the compiler. Raises ValueError where this torch has no place for it."""
    try:
        from attnwatch.hooks import insertion

        _library()
    except (ImportError, AttributeError):
        raise ValueError(
            "expected torch with a list of passes in torch._inductor.config.post_grad_custom_post_pass and the tag "
            f'cudagraph_unsafe, found {torch.__version__}; update torch or use compiled="eager"'
        ) from None
    return insertion


def kind_of(kind: Any) -> str:
    """What a class of modules is called in a graph; graphs from the compiler's cache hold the name only."""
    return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


def _products(call: Call) -> Iterator[Product]:
    for x, weight, bias, turned in zip(call.inputs, call.weights, call.biases, call.turned, strict=True):
        matrix = weight.t() if turned else weight
        made = projected(True, matrix, x)
        assert made.rows is not None
        rows = nn.functional.linear(made.rows, matrix.to(x.dtype))
        yield made._replace(rows=rows if bias is None else rows + bias)


def _norms(module: nn.Module) -> Iterator[Norm]:
    """Norm layers inside an attention layer; a compiled graph no longer shows which function they were."""
    for name, part in module.named_modules():
        label = type(part).__name__
        if name and re.search(r"norm|rms|l2", label, re.IGNORECASE) and sites.is_leaf(part):
            size = max((parameter.numel() for parameter in part.parameters()), default=0)
            yield Norm(label, part.forward, size, False)
