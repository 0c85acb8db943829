"""A script modelled on Colossal-AI's masked autoencoder: loss inside the model, checkpoints per epoch, resuming."""

import colossalai
import torch
from colossalai.context import Config
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.nn.lr_scheduler import CosineAnnealingLR
from colossalai.utils import get_dataloader
from colossalai.utils.checkpointing import load_checkpoint, save_checkpoint
from colossalai.utils.cuda import get_current_device
from synthetic import SIZE, images
from torch import nn

LOGGER = get_dist_logger()
PATCH, WIDTH = 4, 32
COUNT = (SIZE // PATCH) ** 2


def patches(imgs):
    """Return the patches ``[n, 9, 48]`` of images ``[n, 3, 12, 12]``."""
    return nn.functional.unfold(imgs, PATCH, stride=PATCH).transpose(1, 2)


class MaskedAutoencoder(nn.Module):
    """A model that sees some patches and predicts the others."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3 * PATCH * PATCH, WIDTH)
        self.position = nn.Parameter(torch.randn(1, COUNT, WIDTH) / 8, requires_grad=False)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.predict = nn.Linear(WIDTH, 3 * PATCH * PATCH)

    def forward(self, imgs, mask_ratio=0.75):
        """Return the loss on the hidden patches, the predictions, and the mask of hidden patches."""
        target = patches(imgs)
        rows, count, _ = target.shape
        order = torch.rand(rows, count, device=imgs.device).argsort(1)
        mask = (order >= int(count * (1 - mask_ratio))).to(target.dtype)
        seen = self.embed(target) + self.position
        kept = order.argsort(1)[:, : int(count * (1 - mask_ratio))].unsqueeze(-1).expand(-1, -1, WIDTH)
        encoded = self.encoder(seen.gather(1, kept))
        full = (self.mask_token + self.position).expand(rows, -1, -1).to(encoded.dtype)
        pred = self.predict(self.decoder(full.scatter(1, kept, encoded)))
        loss = ((pred - target) ** 2).mean(-1)
        return (loss * mask).sum() / mask.sum(), pred, mask


def optimizer_of(model, learning_rate, weight_decay):
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": decayed, "weight_decay": weight_decay}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def init_engine(config: Config):
    model = MaskedAutoencoder()
    optimizer = optimizer_of(model, config.LEARNING_RATE, config.WEIGHT_DECAY)
    train_dataloader = get_dataloader(
        dataset=images(256, seed=1),
        shuffle=True,
        batch_size=config.BATCH_SIZE,
        pin_memory=True,
        drop_last=True,
    )
    return colossalai.initialize(model, optimizer, nn.CrossEntropyLoss(), train_dataloader)[:2]


def main(config_path):
    colossalai.launch_from_torch(config_path)
    config = gpc.config
    engine, train_dataloader = init_engine(config)
    lr_scheduler = CosineAnnealingLR(engine.optimizer, total_steps=config.NUM_EPOCHS * len(train_dataloader))

    start_epoch = 0
    if config.RESUME:
        start_epoch = 1 + load_checkpoint(config.RESUME_DIR, engine.model, None, None, strict=False)
        LOGGER.info(f"Resume from checkpoint {config.RESUME_DIR}, start epoch {start_epoch}")
    for epoch in range(start_epoch, config.NUM_EPOCHS):
        engine.train()
        total = 0.0
        for img, _ in train_dataloader:
            img = img.to(get_current_device())
            engine.zero_grad()
            loss, _, _ = engine.model(img, mask_ratio=config.MASK_RATIO)
            engine.backward(loss)
            engine.step()
            lr_scheduler.step()
            total += loss.item()
        LOGGER.info(f"epoch {epoch}, loss {total / len(train_dataloader):.5f}")
        if epoch % config.CHECKPOINT_INTERVAL == 0 or epoch + 1 == config.NUM_EPOCHS:
            save_checkpoint(config.OUTPUT_DIR / f"checkpoint-{epoch}.pth", epoch, engine.model, None, None)


if __name__ == "__main__":
    main(colossalai.get_default_parser().parse_args().config)
