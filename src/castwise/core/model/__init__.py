"""A plan and a model: where each part computes and is stored, the borders between them, and why dtypes met."""
