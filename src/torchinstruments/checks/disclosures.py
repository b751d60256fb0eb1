"""What a session saw of its model: facts that no finding repeats."""

from collections.abc import Mapping

import torch
from torch import nn

from torchinstruments.checks.inventory import Inventory

__all__ = ["of_model"]

_MAX_LISTED = 20


def of_model(model: nn.Module | Mapping[str, torch.Tensor], inventory: Inventory) -> dict[str, object]:
    """Returns which parameters need no gradient and which modules are in evaluation mode, as plain values."""
    parameters = inventory.parameters
    still = [entry.name for entry in parameters if not entry.tensor.requires_grad]
    is_module = isinstance(model, nn.Module)
    in_eval = [name for name, module in model.named_modules() if not module.training] if is_module else []
    return {
        "membership": {
            "num_parameters": len(parameters),
            "num_requires_grad_false": len(still),
            "requires_grad_false": still[:_MAX_LISTED],
        },
        "train_eval": {
            "model_training": model.training if is_module else None,
            "num_eval_mode_modules": len(in_eval),
            "eval_mode_modules": in_eval[:_MAX_LISTED],
        },
    }
