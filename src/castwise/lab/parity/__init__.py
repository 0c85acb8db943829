"""Are a plan's gradients as good as fp32's? The gradient parity test, and what else numerics decide."""
