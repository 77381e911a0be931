"""What run.json says of a run, as text: whatever a damaged or foreign file holds, each fact is one short line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attnwatch.monitor.outputs.log import one_line
from attnwatch.monitor.run import CHECKPOINTS, THINNED
from attnwatch.reports.charts import copyable
from attnwatch.reports.known import proofs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from attnwatch.monitor.run import Run
    from attnwatch.monitor.sample import Coverage

UNKNOWN = "unknown"
LONGEST, LONGEST_RULE = 200, 2000
"""Characters of a fact, and of a part of a rule."""
MOST = 200
"""Facts of one kind."""


class Facts(NamedTuple):
    """Name -> value. about: the model and where it comes from. seen: what its layers are, as they were covered."""

    about: dict[str, str]
    seen: dict[str, str]
    options: dict[str, str]
    versions: dict[str, str]


def facts(run: Run) -> Facts:
    header = run.header
    about = {"model": text(header.get("model", UNKNOWN)), "parameters": _count(header.get("parameters"))}
    about |= {"created": text(header.get("created", UNKNOWN)), "git revision": git(header.get("git"))}
    if run.exception:
        about["ended"] = f"by an exception: {text(run.exception)}"
    if from_checkpoints(run):
        about["source"] = _source(header.get("checkpoints"))
    covered, proved = run.coverage, proofs(run).values()
    lost = [proof.until for proof in proved if proof.until is not None]
    since = f" (not proved any more in {len(lost)} of {len(proved)} layers, from step {min(lost):,} on)" if lost else ""
    seen = {
        "layers": str(len(covered) or len(run.layers)),
        "heads": _distinct(layer.heads for layer in covered if layer.heads),
        "key heads": _distinct(layer.kv_heads for layer in covered if layer.kv_heads),
        "head size": _distinct(layer.head_dim for layer in covered if layer.head_dim),
        "QK-norm": _distinct(proof.layer.qk_norm or "none" for proof in proved) + since,
        "computed in": _distinct(layer.dtype for layer in covered if layer.dtype),
    }
    versions = {"attnwatch": text(header.get("attnwatch", UNKNOWN))} | _table(header.get("versions"))
    return Facts(about, seen, _table(header.get("options")), versions)


def git(found: object) -> str:
    """The revision of the trainer's code, and whether files of it had been changed."""
    if not isinstance(found, Mapping) or not isinstance(found.get("revision"), str):
        return "not recorded"
    return text(found["revision"]) + (", with changes that were not committed" if found.get("dirty") is True else "")


class Cost(NamedTuple):
    """samples, seconds: of all that were taken, also of those that were thinned out. share: of the time from the first
    to the last one, in which the first itself was taken no more; NaN while unknown."""

    samples: int
    seconds: float
    share: float


def cost(run: Run) -> Cost:
    samples, seconds = len(run.steps), float(np.nansum(run.seconds))
    match run.header.get(THINNED):
        case {"samples": int(before), "seconds": float(all_of_them)} if math.isfinite(all_of_them):
            samples, seconds = before, all_of_them
    timed = len(run.times) > 1 and not from_checkpoints(run)  # those have the times of their files
    lasted = float(run.times[-1] - run.times[0]) if timed else 0.0
    return Cost(samples, seconds, (seconds - float(np.nansum(run.seconds[:1]))) / lasted if lasted > 0 else math.nan)


def from_checkpoints(run: Run) -> bool:
    """Whether the run was read from saved weights: nothing is known of its activations."""
    return bool(run.header.get("source") == CHECKPOINTS)


def state(run: Run, layer: Coverage) -> str:
    """What to call how surely a layer is seen: in saved weights it was found, and nothing was verified by running."""
    return "placed" if layer.state == "verified" and from_checkpoints(run) else layer.state


def _source(checkpoints: object) -> str:
    """What was read, and whether its steps are training steps."""
    known = [each for each in checkpoints if isinstance(each, Mapping)] if isinstance(checkpoints, list) else []
    said = "saved weights, read without running the model"
    if known:
        said += f": {len(known)} checkpoint{'s' if len(known) > 1 else ''}, the last one {text(known[-1].get('path'))}"
    if any(each.get("step_from") == "order" for each in known):
        said += "; steps are their places in that list, no training steps"
    return said


def names(runs: Sequence[Run]) -> list[str]:
    """What to call each run: the name of its directory, with as many of those above it as tell it from the others."""
    parts = [run.path.absolute().parts for run in runs]
    for count in range(1, max((len(each) for each in parts), default=0) + 1):
        found = ["/".join(each[-count:]).replace("//", "/") for each in parts]
        if len(set(found)) == len(set(parts)):
            break
    return found


def rules(run: Run) -> list[dict[str, str]]:
    """The rules in force as text, each with name, severity and when; other keys where they say something."""
    kept = ({key: each for key, each in rule.items() if key not in ("summary", "advice")} for rule in run.rules[:MOST])
    least = {"name": "", "severity": "", "when": ""}
    return [least | {key: text(each, LONGEST_RULE) for key, each in rule.items() if each is not None} for rule in kept]


def text(value: object, longest: int = LONGEST) -> str:
    """A value on one line."""
    if isinstance(value, float):
        return copyable(value) or "NaN"
    line = one_line(" ".join(str(value).split()))
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _table(found: object) -> dict[str, str]:
    if not isinstance(found, Mapping):
        return {}
    return {text(name): text(value) for name, value in list(found.items())[:MOST]}


def _count(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and abs(value) < 1 << 62 else UNKNOWN


def _distinct(values: Iterable[object]) -> str:
    found = sorted({text(value) for value in values})
    return ", ".join(found[:8]) + (", ..." if len(found) > 8 else "") if found else UNKNOWN
