"""Colossal-AI's tutorial for AMP, with its trainer.

torchrun --nproc-per-node 2 train_with_trainer.py --config config/config_naive.py
"""

import castwise.compat

castwise.compat.install()  # the only new line: castwise now stands in for colossalai

import colossalai
import torch
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.nn.lr_scheduler import LinearWarmupLR
from colossalai.nn.metric import Accuracy
from colossalai.trainer import Trainer, hooks
from colossalai.utils import MultiTimer, get_dataloader
from vit import ViT, digits


def main() -> None:
    # initialize distributed setting
    parser = colossalai.get_default_parser()
    args = parser.parse_args()

    # launch from torch
    colossalai.launch_from_torch(config=args.config)

    # get logger
    logger = get_dist_logger()

    # build model
    model = ViT(drop_rate=0.1)

    # build dataloaders
    train_dataloader = get_dataloader(
        dataset=digits(train=True), shuffle=True, batch_size=gpc.config.BATCH_SIZE, pin_memory=True
    )
    test_dataloader = get_dataloader(dataset=digits(train=False), batch_size=gpc.config.BATCH_SIZE)

    # build optimizer
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)

    # build loss
    criterion = torch.nn.CrossEntropyLoss()

    # lr_scheduler, by epoch
    lr_scheduler = LinearWarmupLR(optimizer, warmup_steps=1, total_steps=gpc.config.NUM_EPOCHS)

    engine, train_dataloader, test_dataloader, _ = colossalai.initialize(
        model, optimizer, criterion, train_dataloader, test_dataloader, verbose=False
    )

    # build trainer
    timer = MultiTimer()
    trainer = Trainer(engine=engine, timer=timer, logger=logger)

    # build hooks
    hook_list = [
        hooks.LossHook(),
        hooks.AccuracyHook(Accuracy()),
        hooks.LRSchedulerHook(lr_scheduler, by_epoch=True),
        hooks.LogMetricByEpochHook(logger),
        hooks.LogTimingByEpochHook(timer, logger),
        # comment out if you need these
        # hooks.SaveCheckpointHook(interval=1, checkpoint_dir="./ckpt"),
        # hooks.TensorboardHook(log_dir="./tb_logs", ranks=[0]),
    ]

    # start training
    trainer.fit(
        train_dataloader=train_dataloader,
        epochs=gpc.config.NUM_EPOCHS,
        test_dataloader=test_dataloader,
        test_interval=1,
        hooks=hook_list,
        display_progress=True,
    )


if __name__ == "__main__":
    main()
