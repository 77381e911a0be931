"""Symptoms that users of hooks and monitors have reported in public, each as it would show here. (Those of
torch.compile have tests of their own.)"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from benchmarks.families import watched
from tests import zoo, zoo_own
from tests.models import Mixer, Model, assert_spectrum, assert_statistics, layer_of, parts, step, tokens, values_of
from torch import Tensor, nn

from attnwatch.hooks.probe import Probe

pytestmark = pytest.mark.filterwarnings(*zoo.NOISE)


@pytest.fixture
def armed() -> Iterator[Any]:
    """Arms probes, and disarms them whatever happens."""
    probes: list[Probe] = []

    def arm(model: nn.Module) -> Probe:
        probes.append(Probe(model, rows=None, sequences=1000))
        probes[-1].arm(look=True)
        return probes[-1]

    yield arm
    for probe in probes:
        probe.disarm()


def model_of(kv: int = 4) -> tuple[Model, Any]:
    weights = parts(kv=kv)
    return Model(Mixer(weights)), weights


# --- nn.MultiheadAttention ----------------------------------------------------------------------------------------


def test_pytorch_78109_a_hook_on_out_proj_is_never_called() -> None:
    """The layer is seen all the same."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    called: list[str] = []
    layer.self_attn.out_proj.register_forward_hook(lambda *_: called.append("out_proj"))
    reading = watched(layer.train(), torch.randn(2, 5, 16))
    assert called == []
    assert layer_of(reading, "self_attn").state == "verified"


def test_pytorch_128413_the_encoders_fast_path_skips_hooks_in_eval(armed: Any) -> None:
    """An evaluation pass within a sampled step is not counted, and gives what it gives without hooks."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
    )
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        plain = model.eval()(x)
    probe = armed(model)
    model.train()(x).square().mean().backward()
    model.eval()
    with torch.no_grad():
        hooked = model(x)
    model.train()
    alone = watched(model, x)
    torch.testing.assert_close(hooked, plain, rtol=0, atol=1e-6)  # another kernel may be chosen: rounding differs
    np.testing.assert_array_equal(probe.finish().values, alone.values)


def test_pytorch_139191_hooks_change_the_branch_that_attention_takes(armed: Any) -> None:
    """Training gives the same bits with hooks as without."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).train()
    x = torch.randn(2, 5, 16)
    plain = model(x)
    armed(model)
    assert torch.equal(model(x), plain)


# --- copies, shards, replicas -------------------------------------------------------------------------------------


def test_pytorch_11476_replicas_share_hooks_and_race(armed: Any) -> None:
    """DataParallel: replicas run in threads, their parameters are no parameters. Together they are the whole batch."""
    model, weights = model_of()
    x = tokens(6, 7, 24)
    probe = armed(model.train())
    probe.arm(look=True)
    replicas = [replicate(model) for _ in range(2)]
    pairs = zip(replicas, x.chunk(2), strict=True)
    threads = [threading.Thread(target=replica, args=(part,)) for replica, part in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reading = probe.finish()
    assert reading.problems == ()
    assert reading.measured == ("mix",)
    assert_statistics(reading, *weights.project(x)[:2], causal=True)
    assert_spectrum(reading, weights.q, weights.k)


def replicate(module: Any) -> Any:
    """As torch.nn.parallel.replicate does, without a GPU."""
    replica = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        setattr(replica, name, replicate(child))
    for name, parameter in module._parameters.items():
        setattr(replica, name, None if parameter is None else parameter * 1.0)
    return replica


def test_deepspeed_6987_parameters_are_empty_outside_of_the_forward(armed: Any) -> None:
    """ZeRO-3 gathers a layer's parameters in a hook before its forward and frees them after it."""
    model, weights = model_of(kv=2)
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for layer in layers:
        shard(layer)
    assert all(layer.weight.numel() == 0 for layer in layers)
    probe = armed(model.train())
    for _ in range(2):  # nameless weights are found in the first step, and taken in the second
        probe.arm(look=True)
        with torch.no_grad():  # the shards have no gradients here
            model(tokens())
        reading = probe.finish()
    assert_statistics(reading, *weights.project(tokens())[:2], causal=True)
    assert_spectrum(reading, weights.q, weights.k)
    assert layer_of(reading).kv_heads == 2


def shard(layer: nn.Linear) -> None:
    whole = {name: parameter.data.clone() for name, parameter in layer.named_parameters()}
    for parameter in layer.parameters():
        parameter.ds_shape = parameter.shape  # type: ignore[attr-defined]  # as DeepSpeed does

    def gather(module: nn.Module, arguments: Any) -> None:
        for name, parameter in module.named_parameters():
            parameter.data = whole[name].clone()

    def free(module: nn.Module, arguments: Any, output: Any) -> None:
        for parameter in module.parameters():
            parameter.data = torch.empty(0)

    layer.register_forward_pre_hook(gather)
    layer.register_forward_hook(free)
    free(layer, (), None)


# --- memory, recomputation, evaluation ----------------------------------------------------------------------------


def test_opacus_176_hooks_keep_activations_in_passes_without_gradient(armed: Any) -> None:
    """Nothing that a forward made outlives it."""
    model, _ = model_of()
    model.train()
    made: list[weakref.ref[Tensor]] = []
    for module in model.modules():
        module.register_forward_hook(lambda module, arguments, output: made.append(weakref.ref(output)))
    armed(model)
    for _ in range(3):
        with torch.no_grad():
            model(tokens())
    gc.collect()
    assert len(made) >= 15
    assert [ref for ref in made if ref() is not None] == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_torchtitan_1593_counts_are_doubled_by_recomputation(reentrant: bool) -> None:
    """Gradient checkpointing of the library itself: every layer once, the same numbers."""
    plain = watched(zoo.build("Llama"), **zoo.inputs("Llama"))
    model = zoo.build("Llama")
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    reading = watched(model, **zoo.inputs("Llama"))
    assert reading.measured == plain.measured
    np.testing.assert_array_equal(reading.values, plain.values)


def test_transformers_31990_output_attentions_with_sdpa_falls_back_or_fails() -> None:
    """Watching asks for no attention weights: the model does with and without hooks what it does."""
    model, batch = zoo.build("Llama", "sdpa"), zoo.inputs("Llama")
    outcomes: list[Any] = []
    for probe in (None, Probe(model)):
        if probe is not None:
            probe.arm(look=True)
        try:
            outcomes.append(model(**batch, output_attentions=True).loss.detach())
        except Exception as error:
            outcomes.append(type(error))
        if probe is not None:
            probe.disarm()
    assert outcomes[0] == outcomes[1]
    assert {layer.state for layer in watched(model, **batch).layers} == {"verified"}


def test_flash_attention_1876_no_cheap_way_to_the_largest_logit_of_a_head() -> None:
    """`logit_max`, from the arguments of the fused call alone."""
    model, weights = model_of()
    reading = watched(model.train(), tokens())
    q, k, _ = weights.project(tokens())
    logits = (q @ k.mT * 6**-0.5).masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf)
    np.testing.assert_allclose(values_of(reading)["logit_max"], logits.amax((0, 2, 3)), rtol=1e-5)


# --- other libraries in the same process --------------------------------------------------------------------------


def test_sageattention_90_another_library_replaces_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replacement that calls the real one is seen through; it stays in place."""
    real, calls = F.scaled_dot_product_attention, []

    def replaced(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", replaced)
    model, weights = model_of()
    reading = watched(model.train(), tokens())
    assert len(calls) == 1
    assert F.scaled_dot_product_attention is replaced
    assert_statistics(reading, *weights.project(tokens())[:2], causal=True)


def test_sageattention_90_a_kernel_of_its_own_is_named_as_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo_own.made(zoo_own.Kernel(lambda q, k, v: F.scaled_dot_product_attention(q, k, v)))
    monkeypatch.setattr(F, "scaled_dot_product_attention", zoo_own.by_exponentials)
    reading = watched(model, zoo_own.tokens())
    assert [(layer.name, layer.state) for layer in reading.layers] == [("attention", "uncovered")]
    assert len(reading.problems) == 1


def test_executorch_14543_attention_called_through_forward_skips_its_hooks() -> None:
    """It is measured as a part of the module around it, whose hooks do run."""

    class Direct(Model):
        def forward(self, x: Tensor, **call: Any) -> Tensor:
            out: Tensor = self.head(self.norm(x + self.mix.forward(x)))
            return out

    weights = parts()
    reading = watched(Direct(Mixer(weights)).train(), tokens())
    assert reading.measured == ("Direct",)
    assert_statistics(reading, *weights.project(tokens())[:2], name="Direct", causal=True)


def test_an_attention_function_may_be_called_by_keywords(armed: Any) -> None:
    """As the vision towers of Qwen2.5-VL, GLM-4V and others call the library's: with `attention_mask=None`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    class Tower(nn.Module):
        is_causal = False

        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(32, 96)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (zoo_own.heads_of(part) for part in self.qkv(x).chunk(3, -1))
            attend = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)
            out: Tensor = attend(self, q, k, value=v, attention_mask=None, scaling=0.5, dropout=0.0, is_causal=False)[0]
            return out.flatten(2)

    model: Any = zoo_own.made(Tower())
    reading = watched(model, zoo_own.tokens())
    q, k, _ = (zoo_own.heads_of(part).detach() for part in model.attention.qkv(zoo_own.tokens()).chunk(3, -1))
    assert layer_of(reading, "attention").state == "verified"
    assert_statistics(reading, q, k, name="attention", scale=0.5)


def test_two_watched_models_leave_the_librarys_interface_as_it_was() -> None:
    """Whichever is done first."""
    from transformers import AttentionInterface

    models = [zoo.build("Llama"), zoo.build("Qwen3")]
    before = AttentionInterface.get_interface
    for order in ((0, 1), (1, 0)):
        probes = [Probe(model, rows=None) for model in models]
        for probe in probes:
            probe.arm(look=True)
        for model, name in zip(models, ("Llama", "Qwen3"), strict=True):
            model(**zoo.inputs(name)).loss.backward()
        for at in order:
            assert AttentionInterface.get_interface is not before
            assert {layer.state for layer in probes[at].finish().layers} == {"verified"}
        assert AttentionInterface.get_interface is before


def test_a_step_that_measures_nothing_is_said() -> None:
    """A model whose layers all run through `.forward` of a part that no hook sees."""

    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model(Mixer(parts()))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            return out

    model = Outside().train()
    probe = Probe(model, rows=None)
    reading = step(probe, model, tokens())
    assert reading.measured == ("inner.mix",)
    probe.arm(look=False)
    probe.disarm()
    (problem,) = probe.finish().problems
    assert problem[0] == "model"
    assert "no attention call was seen in this step" in problem[1]
