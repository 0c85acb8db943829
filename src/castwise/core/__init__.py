"""Everything that a training imports: plans, casting, the loss scale, masters, ranks, sessions, checkpoints."""
