"""Apex's O2: weights in fp16 with fp32 masters, and a loss scale."""

from colossalai.amp import AMP_TYPE

NUM_EPOCHS = 4
BATCH_SIZE = 64

fp16 = dict(mode=AMP_TYPE.APEX, opt_level="O2")
clip_grad_norm = 1.0
