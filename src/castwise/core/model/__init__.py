"""Apply a plan to a model: where each part computes and is stored, the borders between parts, and explanations of dtype errors."""
