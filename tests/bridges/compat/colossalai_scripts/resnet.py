"""A script modelled on Colossal-AI's ResNet example: a loop over the engine, or the trainer with --use_trainer."""

import colossalai
import torch
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.nn.lr_scheduler import CosineAnnealingLR
from colossalai.nn.metric import Accuracy
from colossalai.trainer import Trainer, hooks
from colossalai.utils import get_dataloader
from colossalai.utils.cuda import get_current_device
from colossalai.utils.timer import MultiTimer
from synthetic import ResNet, images


def main():
    parser = colossalai.get_default_parser()
    parser.add_argument("--use_trainer", action="store_true")
    args = parser.parse_args()
    colossalai.launch_from_torch(config="./config.py")
    logger = get_dist_logger()

    model = ResNet()
    train_dataloader = get_dataloader(
        dataset=images(256, seed=1), shuffle=True, batch_size=gpc.config.BATCH_SIZE, pin_memory=True
    )
    test_dataloader = get_dataloader(
        dataset=images(64, seed=2), add_sampler=False, batch_size=gpc.config.BATCH_SIZE, pin_memory=True
    )
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    lr_scheduler = CosineAnnealingLR(optimizer, total_steps=gpc.config.NUM_EPOCHS)
    engine, train_dataloader, test_dataloader, _ = colossalai.initialize(
        model, optimizer, criterion, train_dataloader, test_dataloader
    )

    if args.use_trainer:
        timer = MultiTimer()
        trainer = Trainer(engine=engine, timer=timer, logger=logger)
        hook_list = [
            hooks.LossHook(),
            hooks.LRSchedulerHook(lr_scheduler=lr_scheduler, by_epoch=True),
            hooks.AccuracyHook(accuracy_func=Accuracy()),
            hooks.LogMetricByEpochHook(logger),
            hooks.LogMemoryByEpochHook(logger),
            hooks.LogTimingByEpochHook(timer, logger),
        ]
        trainer.fit(
            train_dataloader=train_dataloader,
            epochs=gpc.config.NUM_EPOCHS,
            test_dataloader=test_dataloader,
            test_interval=1,
            hooks=hook_list,
            display_progress=True,
        )
        return

    for epoch in range(gpc.config.NUM_EPOCHS):
        engine.train()
        for img, label in train_dataloader:
            img, label = img.to(get_current_device()), label.to(get_current_device())
            engine.zero_grad()
            output = engine(img)
            train_loss = engine.criterion(output, label)
            engine.backward(train_loss)
            engine.step()
        lr_scheduler.step()

        engine.eval()
        correct, total = 0, 0
        for img, label in test_dataloader:
            img, label = img.to(get_current_device()), label.to(get_current_device())
            with torch.no_grad():
                output = engine(img)
                test_loss = engine.criterion(output, label)
            correct += torch.sum(torch.argmax(output, dim=-1) == label)
            total += img.size(0)
        logger.info(
            f"Epoch {epoch} - train loss: {train_loss:.5}, test loss: {test_loss:.5}, acc: {correct / total:.5}, "
            f"lr: {lr_scheduler.get_last_lr()[0]:.5g}",
            ranks=[0],
        )


if __name__ == "__main__":
    main()
