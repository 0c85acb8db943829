"""A script modelled on Colossal-AI's SimCLR example: two views, a loss of two outputs, accumulation, a custom hook."""

import colossalai
import torch
from colossalai.context.parallel_mode import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.engine.schedule import NonPipelineSchedule
from colossalai.logging import get_dist_logger
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.registry import LOSSES
from colossalai.trainer import Trainer, hooks
from colossalai.utils import MultiTimer, get_current_device, get_dataloader
from synthetic import ResNet, TwoViews
from torch import nn
from torch.nn import functional


class SimCLR(nn.Module):
    """A backbone and a projection head."""

    def __init__(self):
        super().__init__()
        self.backbone = ResNet(num_classes=0)
        width = self.backbone.output_dim
        projector = nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, 16))
        self.encoder = nn.Sequential(self.backbone, projector)

    def forward(self, x1, x2):
        return self.encoder(x1), self.encoder(x2)


@LOSSES.register_module
class Contrast(nn.Module):
    """A contrastive loss: the nearest image in the batch should be the other view."""

    def forward(self, z1, z2, label):
        views = functional.normalize(torch.cat([z1, z2]), dim=1)
        likeness = (views @ views.T / 0.5).float()
        likeness = likeness.masked_fill(torch.eye(len(views), dtype=torch.bool, device=views.device), -1e4)
        partner = torch.arange(len(views), device=views.device).roll(len(z1))
        return functional.cross_entropy(likeness, partner)


class TotalBatchsizeHook(hooks.BaseHook):
    """A hook that logs the number of images per step."""

    def __init__(self, priority=2):
        super().__init__(priority)
        self.logger = get_dist_logger()

    def before_train(self, trainer):
        size = (
            gpc.config.BATCH_SIZE * gpc.config.gradient_accumulation * gpc.get_world_size(ParallelMode.DATA)
        )
        self.logger.info(f"Total batch size = {size}", ranks=[0])


def main():
    colossalai.launch_from_torch(config="./config.py")
    logger = get_dist_logger()
    model = SimCLR().to(get_current_device())
    train_dataloader = get_dataloader(
        dataset=TwoViews(256), shuffle=True, batch_size=gpc.config.BATCH_SIZE, pin_memory=True
    )
    test_dataloader = get_dataloader(
        dataset=TwoViews(64), add_sampler=False, batch_size=gpc.config.BATCH_SIZE, pin_memory=True
    )
    criterion = LOSSES.get_module("Contrast")()
    optimizer = colossalai.nn.FusedSGD(
        model.parameters(),
        lr=gpc.config.LEARNING_RATE,
        weight_decay=gpc.config.WEIGHT_DECAY,
        momentum=gpc.config.MOMENTUM,
    )
    lr_scheduler = CosineAnnealingWarmupLR(optimizer, warmup_steps=1, total_steps=gpc.config.NUM_EPOCHS)
    engine, train_dataloader, test_dataloader, _ = colossalai.initialize(
        model, optimizer, criterion, train_dataloader, test_dataloader
    )
    assert isinstance(engine.schedule, NonPipelineSchedule)
    trainer = Trainer(engine=engine, logger=logger, timer=MultiTimer())
    hook_list = [
        hooks.LossHook(),
        hooks.LogMetricByEpochHook(logger),
        hooks.LRSchedulerHook(lr_scheduler, by_epoch=True),
        TotalBatchsizeHook(),
        hooks.SaveCheckpointHook(interval=1, checkpoint_dir=f"./ckpt/{gpc.config.LOG_NAME}"),
        hooks.TensorboardHook(log_dir=f"./tb_logs/{gpc.config.LOG_NAME}", ranks=[0]),
    ]
    trainer.fit(
        train_dataloader=train_dataloader,
        test_dataloader=test_dataloader,
        epochs=gpc.config.NUM_EPOCHS,
        hooks=hook_list,
        display_progress=True,
        test_interval=1,
    )
    if gpc.get_global_rank() == 0:
        torch.save({"model": engine.model.state_dict()}, "./pretrained.pt")


if __name__ == "__main__":
    main()
