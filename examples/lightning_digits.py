"""Trains on scikit-learn's handwritten digits with Lightning and DDP, observed by a callback.

The digits are real images that come with scikit-learn; nothing is downloaded. The callback attaches to the
model as DDP wrapped it, on every rank, and hands the first rank's numbers and histograms to the TensorBoard
logger that Lightning writes to anyway. At the end there are the accuracy, the merge of both ranks, and how
many rows each rank has: one forward in three was measured, Lightning's validation among them, without
gradients.

    python examples/lightning_digits.py --output-dir /tmp/digits
    tensorboard --logdir /tmp/digits/logger
"""

import argparse
import os

import lightning.pytorch as lightning
import polars as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F  # noqa: N812  the name that everybody knows it by
from torch.utils.data import DataLoader, TensorDataset, random_split

from torchinstruments import (
    CompositeSink,
    EveryNForwardsSampler,
    MetricLoggerSink,
    Observer,
    TensorBoardSink,
    inject_observer,
    merge_run,
    open_run,
)

Batch = tuple[torch.Tensor, torch.Tensor]


class Digits(lightning.LightningModule):
    """A small convolutional network: (batch, 1, 8, 8) -> logits of ten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
        )

    def training_step(self, batch: Batch) -> torch.Tensor:  # pyrefly: ignore[bad-override]
        """Returns the loss of a batch."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Batch) -> None:  # pyrefly: ignore[bad-override]
        """Logs the share of digits that are recognised."""
        accuracy = (self.net(batch[0]).argmax(1) == batch[1]).float().mean()
        self.log("validation_accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Observe(lightning.Callback):
    """Observes the model while it is fitted.

    Args:
        output_dir: Folder or URL for the telemetry.
        logger: Takes the numbers and histograms of the first rank.
    """

    def __init__(self, output_dir: str, logger: TensorBoardLogger) -> None:
        self.output_dir = output_dir
        self.sink = CompositeSink(MetricLoggerSink(logger), TensorBoardSink(logger))
        self.observer: Observer | None = None

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:  # noqa: ARG002
        """Attaches to what DDP made of the model; by now the process group exists."""
        assert trainer.strategy.model is not None
        self.observer = inject_observer(
            trainer.strategy.model,
            output_dir=self.output_dir,
            sampler=EveryNForwardsSampler(3),  # training and validation; all ranks run the same forwards
            sink=self.sink if trainer.is_global_zero else None,
        )

    def teardown(self, *_args: object, **_keywords: object) -> None:
        """Detaches, also where training failed."""
        if self.observer is not None:
            self.observer.close()


def main() -> None:
    """Trains on two ranks of this machine, and merges what they measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output-dir", default=os.environ.get("OUTPUT_DIR", "runs/digits"))
    parser.add_argument("--epochs", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    options = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(
        torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
    )
    training, validation = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))
    logger = TensorBoardLogger(options.output_dir, name="logger")
    observe = Observe(options.output_dir, logger)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=options.ranks,
        strategy="ddp",
        max_epochs=options.epochs,
        logger=logger,
        log_every_n_steps=10,
        callbacks=[observe],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), DataLoader(training, 30, shuffle=True), DataLoader(validation, 64))
    trainer.strategy.barrier()  # every rank has closed its files
    if trainer.is_global_zero and observe.observer is not None:
        print(f"validation accuracy {float(trainer.callback_metrics['validation_accuracy']):.3f}")
        print(merge_run(observe.observer.url))
        history = open_run(observe.observer.url).history().filter(metric="mean")
        print(history.group_by("rank", "mode", "signal", "grad_sync").agg(pl.len()).sort(pl.all()).collect())


if __name__ == "__main__":
    main()
