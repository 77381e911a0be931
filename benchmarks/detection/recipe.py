"""`Recipe`: one training run, complete. Whoever has it can repeat the run bit for bit on the same machine."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from itertools import pairwise

Knots = tuple[tuple[int, float], ...]

DIVERGES, COLLAPSES, OVERFLOWS, SINKS_LOST, UNIFORM = "diverges", "collapses", "overflows", "sinks lost", "uniform"
SPIKES, HEALTHY = "spikes", "healthy"
COLLAPSE = (DIVERGES, COLLAPSES, OVERFLOWS)
"""Attention grows sparse and low-rank, its logits without bound."""
OTHER = (SINKS_LOST, UNIFORM)
"""The failures that look otherwise: heads lose what they had learned to look at."""
SOUND = (HEALTHY, SPIKES)
"""Nothing is wrong with the attention, whatever the loss does: every alert about it is a false one."""

CODE = 1
"""Raise it when data, models, training or a default change what a recipe means: every stored run is made again."""


@dataclass(frozen=True)
class Recipe:
    """What is trained on what and how, and what is meant to come of it (truth.py checks that it did).

    label: one of the names above. reference: name of a healthy recipe on the same task, whose final loss says what
    this one could have reached; "" where none is needed.
    data: a source of data.py or tasks.py; before > 0: that many unwatched steps on before_data at before_rate come
    first.
    norm: "", "rms", "layer", "l2" (per head) or "rms_across" (all heads together), on queries and keys.
    call: how attention is computed: "sdpa", "scores" (matmul, softmax), "half" (the same in float16), "mha"
    (nn.MultiheadAttention) or "qwen3" (transformers). mlp: width of the feed-forward layers over `width`, 0 for none.
    window: keys a query may see, 0 for all. start: how weights begin, see models.py.
    position: "learned", "rope" (Su et al. 2021, arXiv:2104.09864) or "alibi" (Press et al. 2021, arXiv:2108.12409).
    kv_heads: heads of keys and values, 0 for as many as of queries. shared: the output matrix is the embedding.
    rate: learning rate by step, linear between the knots. qk_rate, mlp_rate: factors on it for W_q and W_k, for the
    feed-forward layers. clip: largest gradient norm, 0 for none. decay: weight decay.
    every, rows: as in `attnwatch.watch`. fresh: made and run after the rules were fixed.
    """

    name: str
    label: str
    rate: Knots
    steps: int
    reference: str = ""
    data: str = "text"
    length: int = 32
    batch: int = 16
    layers: int = 12
    width: int = 64
    heads: int = 4
    mlp: int = 0
    norm: str = ""
    call: str = "sdpa"
    window: int = 0
    residual: bool = True
    start: str = ""
    position: str = "learned"
    kv_heads: int = 0
    shared: bool = False
    optimizer: str = "adam"
    qk_rate: float = 1.0
    mlp_rate: float = 1.0
    clip: float = 0.0
    decay: float = 0.0
    seed: int = 0
    before: int = 0
    before_data: str = "text"
    before_rate: float = 3e-3
    every: int = 5
    rows: int | None = 64
    fresh: bool = False

    @property
    def folder(self) -> str:
        """Name of its run directory: changes with anything that changes the run. What is as usual is left out, so that
        a new choice leaves the runs there are in place."""
        apart = ("label", "reference", "fresh")
        known = [(f, getattr(self, f.name)) for f in fields(self) if f.name not in apart]
        run = {f.name: value for f, value in known if value != f.default}
        return f"{self.name}-{hashlib.sha256(json.dumps([CODE, run]).encode()).hexdigest()[:8]}"

    @property
    def abrupt(self) -> bool:
        """Whether its rate is raised many times over from one step to the next: nothing can then precede the loss."""
        return any(b == a + 1 and new > 5 * old > 0 for (a, old), (b, new) in pairwise(self.rate) if a > 0)

    @property
    def part(self) -> str:
        """Part of the recipes it belongs to; tuning or report by its name alone, so that no result can move it."""
        if self.fresh:
            return "held out"
        return ("tuning", "report")[hashlib.sha256(self.name.encode()).digest()[0] % 2]
