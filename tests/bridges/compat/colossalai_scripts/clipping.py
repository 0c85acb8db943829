"""A script modelled on Colossal-AI's gradient clipping example; it prints the update after each iteration."""

import colossalai
import torch
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.nn.lr_scheduler import CosineAnnealingLR
from colossalai.utils import get_dataloader
from colossalai.utils.cuda import get_current_device
from synthetic import ResNet, images


def main():
    colossalai.launch_from_torch(config="./config.py")
    logger = get_dist_logger()
    model = ResNet()
    train_dataloader = get_dataloader(
        dataset=images(256, seed=1),
        shuffle=True,
        batch_size=gpc.config.BATCH_SIZE,
        num_workers=gpc.config.WORKERS,
        pin_memory=True,
    )
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=gpc.config.RATE)
    lr_scheduler = CosineAnnealingLR(optimizer, total_steps=gpc.config.NUM_EPOCHS)
    engine, train_dataloader, _, _ = colossalai.initialize(model, optimizer, criterion, train_dataloader)

    engine.train()
    for idx, (img, label) in enumerate(train_dataloader):
        img, label = img.to(get_current_device()), label.to(get_current_device())
        before = torch.cat([p.detach().float().flatten() for p in model.parameters()])
        engine.zero_grad()
        output = engine(img)
        train_loss = engine.criterion(output, label)
        engine.backward(train_loss)
        if gpc.config.BY_HAND:
            torch.nn.utils.clip_grad_norm_(engine.model.parameters(), gpc.config.BY_HAND)
        engine.step()
        after = torch.cat([p.detach().float().flatten() for p in model.parameters()])
        rate = lr_scheduler.get_last_lr()[0]
        logger.info(f"iteration {idx}, loss: {train_loss:.5f}, update: {(after - before).norm() / rate:.5f}")
        lr_scheduler.step()
        if idx == 3:
            break


if __name__ == "__main__":
    main()
