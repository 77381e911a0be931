"""Which models are seen, and how surely: families x implementations x result, from tiny models built here. Prints the
tables of docs/families.md; `--write` puts them there.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests import zoo, zoo_others, zoo_own  # noqa: E402
from tests.flash import flash_kernels  # noqa: E402
from tests.returned_maps import of_maps, returned  # noqa: E402

from attnwatch.hooks.layers import METRICS  # noqa: E402
from attnwatch.hooks.probe import Probe, Reading  # noqa: E402

PAGE = ROOT / "docs" / "families.md"
CLOSE = 1e-5
"""Largest difference, in nats and shares of attention, to what the model's own maps say."""


class Result(NamedTuple):
    """states: of every layer, with the reasons of those not verified. error: to the maps that the eager model returns,
    NaN where a layer gave no number."""

    states: tuple[tuple[str, str], ...]
    error: float

    def __str__(self) -> str:
        kinds = sorted(dict.fromkeys(state for state, _ in self.states), reverse=True)
        reasons = dict.fromkeys(note for state, note in self.states if state != "verified")
        reasons = dict.fromkeys(re.split(r" \(|; |: no ", reason)[0] for reason in reasons)
        text = ", ".join(kinds) + "".join(f": {reason}" for reason in reasons)
        return text if self.error < CLOSE else f"{text}, other maps"


def watched(model: nn.Module, *arguments: Any, backward: bool = True, **batch: Tensor) -> Reading:
    """One step in which every row is measured; a second one where the weights are found only after the first."""
    probe = Probe(model, rows=None, sequences=1000)
    reading = _step(probe, model, arguments, batch, backward)
    return _step(probe, model, arguments, batch, backward) if probe.due else reading


def _step(probe: Probe, model: nn.Module, arguments: Any, batch: Mapping[str, Tensor], backward: bool) -> Reading:
    probe.arm(look=True)
    try:
        with nullcontext() if backward else torch.no_grad():
            out = model(*arguments, **batch)
        if backward:
            _loss(out).backward()
    finally:
        probe.disarm()
    return probe.finish()


def _loss(out: Any) -> Tensor:
    if isinstance(out, Tensor):
        return out.square().mean()
    loss: Tensor | None = getattr(out, "loss", None)
    return out[0].square().mean() if loss is None else loss


def result(reading: Reading, maps: Mapping[str, Tensor] | None = None) -> Result:
    states = tuple((layer.state, layer.note) for layer in reading.layers)
    names = [metric.name for metric in METRICS]
    errors = [0.0]
    for name, layer_maps in (maps or {}).items():
        values = reading.values[:, reading.measured.index(name), : layer_maps.shape[1]]
        for metric, expected in zip(("entropy", "sink_mass"), of_maps(layer_maps), strict=True):
            found = values[names.index(metric)]
            both_unknown = np.isnan(found) & np.isnan(expected)
            errors.append(float(np.where(both_unknown, 0.0, np.abs(found - expected)).max()))
    return Result(states, float(np.max(errors)))


def _runs(model: nn.Module, batch: Mapping[str, Tensor]) -> bool:
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            model(**batch)
    except (ValueError, IndexError):
        return False
    return True


@cache
def family(name: str) -> dict[str, Result | str]:
    """One family of Hugging Face transformers: implementation -> result, or why there is none."""
    batch = zoo.inputs(name)
    found: dict[str, Result | str] = {}
    maps: dict[str, Tensor] = {}
    with flash_kernels():
        for implementation in zoo.IMPLEMENTATIONS:
            try:
                model = zoo.build(name, implementation)
                # flex_attention has no backward pass on CPUs.
                reading = watched(model, **batch, backward=implementation != "flex_attention")
            except zoo.NotOffered:
                found[implementation] = "not offered"
            except (ValueError, IndexError) as error:
                if _runs(model, batch):  # unwatched
                    raise
                found[implementation] = f"does not run on CPUs ({type(error).__name__})"
            else:
                maps = maps or returned(model, batch, reading.measured)  # the first one is eager
                found[implementation] = result(reading, maps)
    return found


def others() -> Iterator[tuple[str, Callable[[], nn.Module], tuple[Any, ...]]]:
    """Name, builder and inputs of the models that are not of Hugging Face transformers."""
    for name in zoo_others.TIMM:
        for fused in (True, False):
            yield (
                f"timm {name}, {'fused' if fused else 'by hand'}",
                partial(zoo_others.timm, name, fused),
                (zoo_others.images(),),
            )
    for name in zoo_others.X_TRANSFORMERS:
        yield f"x-transformers, {name}", partial(zoo_others.x_transformer, name), (zoo_others.ids(),)
    yield from zoo_own.models()


@cache
def other(name: str) -> Result:
    build, inputs = next((build, inputs) for label, build, inputs in others() if label == name)
    flex = "flex_attention" in name
    return result(watched(build(), *inputs, backward=not flex))


def tables() -> str:
    lines = ["| family | " + " | ".join(zoo.IMPLEMENTATIONS) + " |", "|---" * (len(zoo.IMPLEMENTATIONS) + 1) + "|"]
    for name in zoo.FAMILIES:
        lines.append(f"| {name} | " + " | ".join(str(cell) for cell in family(name).values()) + " |")
    lines += ["", "| model | result |", "|---|---|"]
    lines += [f"| {name} | {other(name)} |" for name, _, _ in others()]
    return "\n".join(lines)


def filled(page: str) -> str:
    """The page with its tables as the code makes them."""
    return re.sub(r"(?<=<!-- tables -->\n).*?(?=\n<!-- end -->)", lambda _: tables(), page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/families.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.write:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(tables())


if __name__ == "__main__":
    main()
