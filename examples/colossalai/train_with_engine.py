"""Colossal-AI's tutorial for AMP, with its engine.

torchrun --nproc-per-node 2 train_with_engine.py --config config/config_torch.py
"""

import castwise.compat

castwise.compat.install()  # the only new line: castwise now stands in for colossalai

import colossalai
import torch
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.nn.lr_scheduler import LinearWarmupLR
from colossalai.utils import get_current_device, get_dataloader
from vit import ViT, digits


def main() -> None:
    # initialize distributed setting
    parser = colossalai.get_default_parser()
    args = parser.parse_args()

    # launch from torch
    colossalai.launch_from_torch(config=args.config)

    # get logger
    logger = get_dist_logger()
    logger.info("initialized distributed environment", ranks=[0])

    # build model
    model = ViT(drop_rate=0.1)

    # build dataloader
    train_dataloader = get_dataloader(
        dataset=digits(train=True), shuffle=True, batch_size=gpc.config.BATCH_SIZE, pin_memory=True
    )

    # build optimizer
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)

    # build loss
    criterion = torch.nn.CrossEntropyLoss()

    # lr_scheduler, by step
    steps = gpc.config.NUM_EPOCHS * len(train_dataloader)
    lr_scheduler = LinearWarmupLR(optimizer, warmup_steps=5, total_steps=steps)

    engine, train_dataloader, _, _ = colossalai.initialize(
        model, optimizer, criterion, train_dataloader, verbose=False
    )
    logger.info("initialized colossalai components", ranks=[0])

    engine.train()
    for epoch in range(gpc.config.NUM_EPOCHS):
        for img, label in train_dataloader:
            img = img.to(get_current_device())
            label = label.to(get_current_device())
            engine.zero_grad()
            output = engine(img)
            loss = engine.criterion(output, label)
            engine.backward(loss)
            engine.step()
            lr_scheduler.step()
        logger.info(f"epoch: {epoch}, loss: {loss.item():.4f}", ranks=[0])


if __name__ == "__main__":
    main()
