"""Naive AMP: everything in fp16 with fp32 masters, and a loss scale that falls only at the second overflow."""

from colossalai.amp import AMP_TYPE

NUM_EPOCHS = 4
BATCH_SIZE = 64

fp16 = dict(mode=AMP_TYPE.NAIVE, initial_scale=2**16, hysteresis=2)
clip_grad_norm = 1.0
