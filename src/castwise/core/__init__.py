"""Everything that a training run imports: plans, casting, the loss scale, fp32 masters, ranks, sessions, checkpoints."""
