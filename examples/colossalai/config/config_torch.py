"""Torch's AMP: operators in fp16 according to torch.autocast's lists, and a loss scale."""

from colossalai.amp import AMP_TYPE

NUM_EPOCHS = 4
BATCH_SIZE = 64

fp16 = dict(mode=AMP_TYPE.TORCH)
clip_grad_norm = 1.0
