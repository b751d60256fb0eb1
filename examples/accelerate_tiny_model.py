"""Trains a tiny transformer with Hugging Face Accelerate: gradient accumulation and clipping, no download.

Accelerate wraps model, optimizer and data loader. Telemetry takes its two lines as ever: attach to what
``prepare`` returned. The optimizer inside Accelerate's is found by itself, so that the calls of ``step``
which Accelerate holds back while gradients accumulate are no attempts: the table of steps has four
micro-batches in each attempt, and two in the last one. Beside the observer a `ChecksSession` raises before
a gradient is written that is not finite, and says at the end what it saw.

    python examples/accelerate_tiny_model.py
    torchrun --standalone --nproc-per-node=2 examples/accelerate_tiny_model.py
"""

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn import functional as F  # noqa: N812  the name that everybody knows it by
from torch.utils.data import DataLoader, TensorDataset

from ddp_language_model import CharacterModel, standard_library_text
from torchinstruments import AlwaysSampler, inject_observer, merge_run, open_run, remove_observer
from torchinstruments.checks import ChecksSession

CONTEXT = 16


def train(options: argparse.Namespace, accelerator: Accelerator) -> str:
    """Trains for one epoch of ``--batches`` batches a process, and returns where the telemetry lies."""
    set_seed(0)
    model = CharacterModel(CONTEXT, width=32, num_blocks=2, num_heads=2)
    texts = options.batches * options.batch_size * accelerator.num_processes
    characters = standard_library_text(texts * (CONTEXT + 1)).long().reshape(texts, CONTEXT + 1)
    model, optimizer, batches = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3),
        DataLoader(TensorDataset(characters), batch_size=options.batch_size),
    )

    observer = inject_observer(model, output_dir=options.output_dir, sampler=AlwaysSampler())  # line one
    session = ChecksSession(model, optimizer)
    session.register_nonfinite_grad_check()
    session.register_update_ratio_check()
    loss = torch.zeros(())
    try:
        with session:
            for (batch,) in batches:
                with accelerator.accumulate(model):
                    logits = model(batch[:, :-1])
                    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
    finally:
        remove_observer(model)  # line two
    accelerator.print(f"loss {loss.item():.3f} in the last batch")
    accelerator.print(session.report())
    return observer.url


def main() -> None:
    """Trains, and lets the main process print what the ledger of steps has."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output-dir", default=os.environ.get("OUTPUT_DIR", "runs/accelerate"))
    parser.add_argument("--batches", type=int, default=10, help="of each process (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="texts a batch (default: %(default)s)")
    parser.add_argument("--accumulate", type=int, default=4, help="batches a step (default: %(default)s)")
    options = parser.parse_args()

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.accumulate)
    url = train(options, accelerator)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        steps = (
            open_run(url)
            .steps()
            .select("rank", "attempt", "micro_batches", "last_micro_batch_sync", "outcome")
        )
        print(steps.sort("rank", "attempt").collect())
        print(merge_run(url))
    accelerator.end_training()


if __name__ == "__main__":
    main()
