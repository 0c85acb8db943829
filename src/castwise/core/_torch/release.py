"""The release of torch, for what differs between releases and cannot be tried."""

import torch

RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))

COARSE_DRAWS = RELEASE < (2, 13)
"""Whether the uniform numbers that a CPU draws in a lower format are multiples of half its eps, as torch 2.11's are."""
