"""The gradient parity test, whether a plan's gradients are as good as fp32's, and other tests of a plan's numerics."""
