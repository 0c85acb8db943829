"""Plans in the trainers of others."""
