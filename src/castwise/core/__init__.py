"""What a training imports: plans, casting, the loss scale, masters, ranks, sessions, checkpoints. Knows nothing of measuring or pages."""
