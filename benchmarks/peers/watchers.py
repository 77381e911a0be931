"""The monitors, each called where its documentation says."""

from __future__ import annotations

import importlib
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from benchmarks.peers.model import Attention, Decoder, tell
from torch import Tensor, nn

import attnwatch


class Watcher:
    """A monitor, called where its documentation says. This one does nothing.

    packages: what to install for it. optimizer: the one to step, its own where it wraps one.
    """

    packages: tuple[str, ...] = ()
    what = ""

    def __init__(self, model: Decoder, optimizer: torch.optim.Optimizer, place: Path):
        self.optimizer: Any = optimizer

    def before(self, number: int) -> None: ...

    def after_backward(self, number: int, loss: Tensor) -> None: ...

    def after_step(self, number: int, loss: Tensor) -> None: ...

    def close(self) -> None: ...


class Ours(Watcher):
    what = "30 metrics a head from 64 query rows, the weights in every 5th step; on disk, with rules"
    options: dict[str, Any] = {"every": 1}  # noqa: RUF012

    def __init__(self, model: Decoder, optimizer: torch.optim.Optimizer, place: Path):
        super().__init__(model, optimizer, place)
        self.monitor = attnwatch.watch(model, run=place / "run", report=False, **self.options)

    def after_step(self, number: int, loss: Tensor) -> None:
        self.monitor.step(loss=loss)

    def close(self) -> None:
        if self.monitor.problems or {layer.state for layer in self.monitor.coverage} != {"verified"}:
            raise RuntimeError(f"not the measurement it should be: {self.monitor}")
        self.monitor.close()


class OursOfEveryRow(Ours):
    what = "the same, and entropy from every row"
    options = {"every": 1, "every_row": True}  # noqa: RUF012


class OursByDefault(Ours):
    what = "the same as every=1, in every 20th step"
    options = {}  # noqa: RUF012


class WholeMaps(Watcher):
    """What anybody would write first: softmax over all T x T logits and its entropy."""

    what = "entropy from every row, in memory"

    def __init__(self, model: Decoder, optimizer: torch.optim.Optimizer, place: Path):
        super().__init__(model, optimizer, place)
        tell(model, self.entropy)

    @torch.no_grad()
    def entropy(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, y: Tensor) -> None:
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        p = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, -torch.inf).softmax(-1)
        self.found = torch.special.entr(p).sum(-1).mean((0, 2)).tolist()


class EntropyMonitor(Watcher):
    packages = ("torch-module-monitor==0.1.0", "h5py==3.16.0")
    what = "entropy from every row, in memory"

    def __init__(self, model: Decoder, optimizer: torch.optim.Optimizer, place: Path):
        super().__init__(model, optimizer, place)
        library = importlib.import_module("torch_module_monitor")
        self.monitor = library.ModuleMonitor(monitor_step_fn=lambda step: True)
        self.monitor.set_module(model)
        look = importlib.import_module("torch_module_monitor.attention").monitor_scaled_dot_product_attention
        tell(model, lambda module, q, k, v, y: look(self.monitor, module, q, k, v, is_causal=True, activation=y))

    def before(self, number: int) -> None:
        self.monitor.begin_step(number)

    def after_step(self, number: int, loss: Tensor) -> None:
        self.monitor.end_step()
        if not any("entropy" in key for key in self.monitor.get_step_metrics()):
            raise RuntimeError("it measured no entropy")


class ModuleMonitor(EntropyMonitor):
    what = "the same, and norms of activations, weights and gradients"

    def __init__(self, model: Decoder, optimizer: torch.optim.Optimizer, place: Path):
        super().__init__(model, optimizer, place)
        self.monitor.add_activation_metric("norm", lambda x: x.norm())
        self.monitor.add_parameter_metric("norm", lambda x: x.norm())
        self.monitor.add_gradient_metric("norm", lambda x: x.norm())

    def after_backward(self, number: int, loss: Tensor) -> None:
        self.monitor.monitor_parameters()
        self.monitor.monitor_gradients()


class Core(nn.Module):
    """Where Megatron calls its attention, with q and k `[B, T, H, d]`: the only place that msprobe looks at."""

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return q


class Msprobe(Watcher):
    packages = ("mindstudio-probe==26.2.0", "pytz==2026.6")
    what = "entropy of ONE head of ONE sequence a layer, stable rank of each weight; on disk"

    def __init__(self, model: Decoder, optimizer: torch.optim.Optimizer, place: Path):
        super().__init__(model, optimizer, place)
        for module in model.modules():
            if isinstance(module, Attention):
                module.core = Core()
        tell(model, lambda module, q, k, v, y: module.core(q.transpose(1, 2), k.transpose(1, 2)))
        linear, cores = (
            [f"0:{name}" for name, module in model.named_modules() if isinstance(module, kind)]
            for kind in (nn.Linear, Core)
        )
        features = {"linear_hook": linear, "attention_hook": cores}
        config = {"targets": {}, "recording_l2_features": True, "l2_targets": features, "sa_order": "b,s,h,d"}
        (place / "config.json").write_text(json.dumps(config))
        self.place = place / "out"
        os.environ["MONITOR_OUTPUT_DIR"] = str(self.place)
        monitor = importlib.import_module("msprobe.pytorch").TrainerMon
        self.monitor = monitor(str(place / "config.json"), params_have_main_grad=False)
        self.monitor.set_monitor(model, optimizer)

    def close(self) -> None:
        if not any("entropy" in path.read_text() for path in self.place.rglob("*.csv")):
            raise RuntimeError("it measured no entropy")


class Thermoclaw(Watcher):
    packages = ("thermoclaw==0.1.6",)
    what = "norms and updates of weights at every step, in memory; no attention"

    def __init__(self, model: Decoder, optimizer: torch.optim.Optimizer, place: Path):
        super().__init__(model, optimizer, place)
        self.observer = importlib.import_module("thermoclaw").Observer(model, optimizer)

    def after_step(self, number: int, loss: Tensor) -> None:
        self.observer.step(loss=loss.item())


class Trainscope(Watcher):
    packages = ("trainscope==1.8.1",)
    what = "weights and gradients at every step, activations at every 5th, on disk; no attention"

    def __init__(self, model: Decoder, optimizer: torch.optim.Optimizer, place: Path):
        super().__init__(model, optimizer, place)
        config = importlib.import_module("trainscope.core.config").TrainScopeConfig(run_dir=str(place))
        self.scope = importlib.import_module("trainscope").TrainScope(model, optimizer, config=config).attach()

    def after_backward(self, number: int, loss: Tensor) -> None:
        self.scope.step(loss.item(), batch_index=number)

    def close(self) -> None:
        self.scope.detach()


class Stabilityguard(Watcher):
    packages = ("stabilityguard==0.3.0",)
    what = "gradient norms at every step, in memory; skips steps that it calls spikes; no attention"

    def __init__(self, model: Decoder, optimizer: torch.optim.Optimizer, place: Path):
        guard = importlib.import_module("stabilityguard").GuardedOptimizer
        self.optimizer = guard(optimizer, model, log_dir=str(place))


class Llmreport(Watcher):
    packages = ("llmreport==0.3.0",)
    what = "loss and gradient norm at every step, on disk, with a page; no attention"

    def __init__(self, model: Decoder, optimizer: torch.optim.Optimizer, place: Path):
        super().__init__(model, optimizer, place)
        self.tracker = importlib.import_module("llmreport").Tracker(model, log_dir=str(place / "run"))

    def after_backward(self, number: int, loss: Tensor) -> None:
        self.tracker.step(loss, optimizer=self.optimizer)

    def close(self) -> None:
        self.tracker.close()


class ArcVigil(Watcher):
    packages = ("arc-vigil==1.0.0",)
    what = "how far weights moved and gradients at every step, in memory; no attention"

    def __init__(self, model: Decoder, optimizer: torch.optim.Optimizer, place: Path):
        super().__init__(model, optimizer, place)
        self.monitor = importlib.import_module("arc_vigil").BendexMonitor(model)

    def before(self, number: int) -> None:
        self.monitor.observe(number)


class Trainpulse(Watcher):
    packages = ("trainpulse==0.4.0",)
    what = "the loss at every step, in memory; no attention"

    def __init__(self, model: Decoder, optimizer: torch.optim.Optimizer, place: Path):
        super().__init__(model, optimizer, place)
        self.monitor = importlib.import_module("trainpulse").Monitor()

    def after_step(self, number: int, loss: Tensor) -> None:
        self.monitor.log("loss", number, loss.item())


SAME_WORK: dict[str, type[Watcher]] = {
    "attnwatch, every=1": Ours,
    "attnwatch, every=1, every row": OursOfEveryRow,
    "whole maps by hand": WholeMaps,
    "torch-module-monitor, entropy": EntropyMonitor,
    "torch-module-monitor": ModuleMonitor,
}
OTHERS: dict[str, type[Watcher]] = {
    "attnwatch, default": OursByDefault,
    "msprobe": Msprobe,
    "trainscope": Trainscope,
    "stabilityguard": Stabilityguard,
    "thermoclaw": Thermoclaw,
    "arc-vigil": ArcVigil,
    "llmreport": Llmreport,
    "trainpulse": Trainpulse,
}
