"""A test that fails when a change to the model makes plan.json unsafe for it.

    python -m pytest examples/test_plan.py

The model, its loss and its batches are those of the training script next to this file. plan.json is the committed
output of `castwise tune`.
"""

from pathlib import Path

import torch
from fsdp2_titan import Transformer, batch, loss_of

PLAN = Path(__file__).with_name("plan.json")


def test_the_plan_fits_the_model(assert_precision_safe):
    assert_precision_safe(
        Transformer(),
        loss_of,
        [batch(number) for number in range(32)],
        PLAN,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        accumulate=4,  # as in training: two microbatches on each of two processes
    )
