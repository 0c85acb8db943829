"""Train a small network on scikit-learn's handwritten digits with Lightning's Trainer, under a castwise plan.

    python examples/lightning_digits.py --plan fp16-master --max-epochs 10

The only line for castwise is ``plugins=[CastwisePrecision(plan)]``; the rest is an ordinary Lightning script.
"""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from castwise.integrations.lightning import CastwisePrecision


class Digits(L.LightningDataModule):
    def __init__(self, batch_size=64):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        data = load_digits()
        images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
        whole = TensorDataset(images, torch.tensor(data.target))
        parts = random_split(whole, [1200, 297, 300], torch.Generator().manual_seed(0))
        self.train, self.val, self.held_out = parts

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.held_out, self.batch_size)


class Classifier(L.LightningModule):
    def __init__(self, width=32, lr=3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(8 * width, 10),
        )

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def evaluate(self, batch, stage):
        images, labels = batch
        logits = self(images)
        right = (logits.argmax(1) == labels).float().mean()
        self.log(f"{stage}_loss", F.cross_entropy(logits, labels), sync_dist=True)
        self.log(f"{stage}_accuracy", right, prog_bar=True, sync_dist=True)

    def validation_step(self, batch, batch_idx):
        self.evaluate(batch, "val")

    def test_step(self, batch, batch_idx):
        self.evaluate(batch, "test")

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--plan",
        default="bf16-mixed",
        help="a preset, a plan as one line of text, or the path of a plan.json",
    )
    parser.add_argument("--max-epochs", type=int, default=5)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    args = parser.parse_args()

    L.seed_everything(0)
    precision = CastwisePrecision(args.plan)
    trainer = L.Trainer(
        max_epochs=args.max_epochs,
        accelerator=args.accelerator,
        devices=args.devices,
        plugins=[precision],
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model, digits = Classifier(), Digits()
    trainer.fit(model, digits)
    (found,) = trainer.test(model, digits, verbose=False)
    skipped = precision.amp.skipped_steps
    trainer.print(f"accuracy {found['test_accuracy']:.3f} under {args.plan}; {skipped} steps skipped")


if __name__ == "__main__":
    main()
