"""Makes `import torchvision` work beside a torch without CUDA; timm and transformers import it.

torchvision on PyPI is built against CUDA: beside a CPU build of torch its own operators do not load, and its import
fails because it describes two of them. No model here calls them: to be declared is enough.
"""

from __future__ import annotations

import torch

_OPERATORS = ("nms", "qnms")

try:
    import torchvision as torchvision
except RuntimeError:
    for _name in _OPERATORS:
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision as torchvision
