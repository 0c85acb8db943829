"""Plans in trainers of others."""
