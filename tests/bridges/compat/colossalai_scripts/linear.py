"""A script modelled on SimCLR's second one: a classifier on the frozen backbone that the first script trained."""

import colossalai
import torch
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.nn.metric import Accuracy
from colossalai.trainer import Trainer, hooks
from colossalai.utils import MultiTimer, get_dataloader
from synthetic import CLASSES, ResNet, images
from torch import nn


class LinearEval(nn.Module):
    """A frozen backbone and one linear layer."""

    def __init__(self):
        super().__init__()
        self.backbone = ResNet(num_classes=0)
        self.backbone.requires_grad_(False)
        self.fc = nn.Linear(self.backbone.output_dim, CLASSES)

    def forward(self, x):
        return self.fc(self.backbone(x))


def main():
    colossalai.launch_from_torch(config="./config.py")
    logger = get_dist_logger()
    model = LinearEval()
    train_dataloader = get_dataloader(
        dataset=images(256, seed=1), shuffle=True, batch_size=gpc.config.BATCH_SIZE
    )
    test_dataloader = get_dataloader(
        dataset=images(64, seed=2), add_sampler=False, batch_size=gpc.config.BATCH_SIZE
    )
    optimizer = colossalai.nn.FusedSGD(model.parameters(), lr=gpc.config.LEARNING_RATE, momentum=0.9)
    lr_scheduler = CosineAnnealingWarmupLR(optimizer, warmup_steps=1, total_steps=gpc.config.NUM_EPOCHS)
    engine, train_dataloader, test_dataloader, _ = colossalai.initialize(
        model, optimizer, nn.CrossEntropyLoss(), train_dataloader, test_dataloader
    )
    engine.model.load_state_dict(torch.load("./pretrained.pt")["model"], strict=False)
    trainer = Trainer(engine=engine, logger=logger, timer=MultiTimer())
    hook_list = [
        hooks.LossHook(),
        hooks.AccuracyHook(accuracy_func=Accuracy()),
        hooks.LogMetricByEpochHook(logger),
        hooks.LRSchedulerHook(lr_scheduler, by_epoch=True),
    ]
    trainer.fit(
        train_dataloader=train_dataloader,
        test_dataloader=test_dataloader,
        epochs=gpc.config.NUM_EPOCHS,
        hooks=hook_list,
        display_progress=True,
        test_interval=1,
    )


if __name__ == "__main__":
    main()
