"""Test whether a plan's gradients are as good as fp32's, and test a plan's numerics in other ways."""
