"""A small model in the forms in which people compile one, and a training of it."""

import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

FORMS = ("whole", "in_place", "blocks", "blocks_in_place", "forwards")
"""As `compile_as` knows them."""


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 4) -> the same."""
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Two blocks and a head.

    Args:
        checkpointed: Whether the blocks are computed again in the backward.
    """

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)
        self.checkpointed = checkpointed

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 4) -> (batch, 2)."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


INSIDE = ("blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down")
"""Leaves of the blocks of a `Net`."""


def counting(backend: str = "aot_eager") -> CompileCounterWithBackend:
    """Returns a backend that counts graphs; this one builds backwards ahead of time."""
    return CompileCounterWithBackend(backend)


def compile_as(form: str, model: Net, backend: CompileCounterWithBackend) -> nn.Module:
    """Returns what a program calls that compiled a model in one of the `FORMS`.

    A block, and a model whose blocks are not checkpointed, compile without a break.
    """
    if form == "whole":
        compiled = torch.compile(model, backend=backend, fullgraph=not model.checkpointed)
        assert isinstance(compiled, nn.Module)
        return compiled
    if form == "in_place":
        model.compile(backend=backend, fullgraph=not model.checkpointed)
    for index, block in enumerate(model.blocks):
        if form == "blocks":
            compiled = torch.compile(block, backend=backend, fullgraph=True)
            assert isinstance(compiled, nn.Module)
            model.blocks[index] = compiled
        elif form == "blocks_in_place":
            block.compile(backend=backend, fullgraph=True)
        elif form == "forwards":
            vars(block)["forward"] = torch.compile(block.forward, backend=backend, fullgraph=True)
    return model


def train(model: nn.Module, num_steps: int = 6) -> list[torch.Tensor]:
    """Returns outputs, gradients and parameters of each step, and the state of the generator."""
    torch.manual_seed(11)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[torch.Tensor] = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        output = model(torch.randn(3, 4))
        output.square().mean().backward()
        seen.append(output.detach().clone())
        seen.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
        optimizer.step()
        seen.extend(p.detach().clone() for p in model.parameters())
    seen.append(torch.get_rng_state())
    return seen


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Returns whether two trainings are the same bit for bit."""
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def stance() -> str:
    """Returns what torch does with compiled code now."""
    return torch._dynamo.eval_frame._stance.stance
