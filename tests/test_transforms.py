"""Training by torch.func: gradients as a function, and by example."""

from __future__ import annotations

import torch
from tests.models import Mixer, parts, sampled, tokens
from tests.test_probe import Stack, by_hand, twin
from torch import Tensor, nn

from attnwatch.hooks.probe import Probe


def test_gradients_by_torch_func() -> None:
    """Inside its transforms tensors have no memory, by which weights and parameters are told: their content has."""
    model, x = Stack(), tokens()
    given = {name: p.detach() for name, p in model.named_parameters()}

    def loss(given: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, given, (x,)).square().sum()

    expected = torch.func.grad(loss)(given)
    probe = Probe(model)
    probe.arm(look=True)
    found = torch.func.grad(loss)(given)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    reading = probe.finish()
    assert [layer.state for layer in reading.layers] == ["verified", "verified"]
    twin(reading, sampled(Stack(), x))


def test_a_forward_inside_vmap_is_not_counted() -> None:
    """Gradients by example, say: what such a forward holds is gone when it ends. The others are measured as ever."""
    model, x = Stack(call=by_hand), tokens()
    given = {name: p.detach() for name, p in model.named_parameters()}

    def loss(given: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, given, (x[None],)).square().sum()

    by_example = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    probe = Probe(model)
    probe.arm(look=True)
    expected = by_example(given, x)
    probe.disarm()
    assert all(torch.equal(expected[name], made) for name, made in by_example(given, x).items())
    probe.arm(look=True)
    by_example(given, x)
    model(x).sum().backward()
    twin(probe.finish(), sampled(Stack(call=by_hand), x))
    probe.arm(look=True)
    by_example(given, x)
    ((where, text),) = probe.finish().problems
    assert where == "model"
    assert text.startswith("no attention call was seen in this step: ")


def test_attention_inside_vmap_is_named() -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = Mixer(parts(), by_hand)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = torch.func.vmap(lambda x: self.mix(x[None])[0])(x)
            return made

    reading = sampled(Mapped(), tokens())
    assert [(layer.name, layer.state) for layer in reading.layers] == [("mix", "uncovered")]
    assert [where for where, _ in reading.problems] == ["model"]
