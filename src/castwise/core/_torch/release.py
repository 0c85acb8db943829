"""The release of torch, for what differs between releases and cannot be tried."""

import torch

RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))
