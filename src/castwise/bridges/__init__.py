"""To the code of others: drop-ins, scripts, trainers; on public names alone."""
