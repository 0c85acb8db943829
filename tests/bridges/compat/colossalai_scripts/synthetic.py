"""Small models, and synthetic images: a fixed pattern per class plus noise."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

SIZE, CLASSES = 12, 4


def images(count, seed):
    """Return a dataset of images ``[3, 12, 12]`` and their classes."""
    patterns = torch.randn(CLASSES, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(count) % CLASSES
    noise = torch.randn(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(patterns[labels] + 0.3 * noise, labels)


class TwoViews(Dataset):
    """A dataset of pairs of images of one class, with the class."""

    def __init__(self, count):
        self.first, self.second = images(count, seed=1), images(count, seed=2)

    def __len__(self):
        return len(self.first)

    def __getitem__(self, index):
        (image, label), (other, _) = self.first[index], self.second[index]
        return (image, other), label


class Block(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, width):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x):
        out = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(x + self.bn2(self.conv2(out)))


class ResNet(nn.Module):
    """A ResNet of two blocks."""

    def __init__(self, num_classes=CLASSES, width=8):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.output_dim = 9 * width
        self.fc = nn.Linear(self.output_dim, num_classes) if num_classes else nn.Identity()

    def forward(self, x):
        x = self.blocks(functional.relu(self.bn(self.conv(x))))
        return self.fc(functional.avg_pool2d(x, 2).flatten(1))
