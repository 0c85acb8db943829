"""The analysis of a step's time, on steps with known limits."""

import time

import pytest
import torch
from torch import nn

from castwise.errors import NonFiniteError, WorkloadError
from castwise.lab.timing.limits import operator_class, product_of, profile_steps
from castwise.lab.workloads.workload import Workload

CPU = torch.device("cpu")


def workload(width=13, sleep_s=0.0, batches=10**6, scale=1.0, model=None):
    def stream(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(batches):
            time.sleep(sleep_s)
            yield torch.randn(16, 32, generator=generator)

    return Workload(
        "test",
        model or (lambda: nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 1))),
        lambda params: torch.optim.SGD(params, 1e-3),
        stream,
        lambda m, batch: m(batch).square().mean() * scale,
    )


@pytest.mark.parametrize(
    ("name", "shapes", "product"),
    [
        ("aten::mm", [[8, 13], [13, 5]], "matmul"),
        ("aten::addmm", [[5], [8, 13], [13, 5], [], []], "matmul"),
        ("aten::addmm", [[8, 5], [8, 13], [13, 5]], "matmul"),
        ("aten::bmm", [[2, 8, 13], [2, 13, 5]], "matmul"),
        ("aten::mkldnn_convolution", [[2, 3, 8, 8], [64, 3, 3, 3], [64]], "convolution"),
        ("aten::mkldnn_convolution", [[2, 8, 9, 9], [12, 4, 3, 3], []], "convolution"),
        ("aten::convolution_backward", [[2, 64, 8, 8], [2, 3, 8, 8], [64, 3, 3, 3]], "convolution"),
        ("aten::mkldnn_convolution", [[2, 24, 8, 8], [24, 1, 3, 3]], "depthwise"),
        ("aten::mkldnn_convolution", [[2, 1, 8, 8], [24, 1, 3, 3]], "convolution"),
        ("aten::add", [[8, 8], [8, 8]], ""),
    ],
)  # fmt: skip
def test_products_from_shapes(name, shapes, product):
    assert product_of(name, shapes) == product


@pytest.mark.parametrize(
    ("name", "shapes", "kind"),
    [
        ("aten::addmm", [[5], [8, 13], [13, 5]], "matrix"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", [[2, 4, 8, 8]], "matrix"),
        ("aten::mkldnn_convolution", [[2, 24, 8, 8], [24, 1, 3, 3]], "depthwise"),
        ("aten::_foreach_add_", [], "optimizer"),
        ("aten::_fused_adamw_", [], "optimizer"),
        ("aten::native_layer_norm", [[8, 8]], "other"),
    ],
)
def test_classes_of_operators(name, shapes, kind):
    assert operator_class(name, shapes) == kind


def test_a_profile_sees_the_products_of_forward_and_backward():
    state = torch.get_rng_state()
    profile = profile_steps(workload(), CPU, steps=3)
    products = {operator.product for operator in profile.operators if operator.product}
    assert "matmul" in products
    assert sum(operator.share for operator in profile.operators) == pytest.approx(1.0)
    assert 0.0 < profile.outside_share < 1.0
    assert profile.launches >= 6
    assert profile.busy_share is None
    assert torch.equal(torch.get_rng_state(), state)


def test_a_loader_that_sleeps_is_seen():
    assert profile_steps(workload(sleep_s=0.1), CPU, steps=3).data_s.q1_s >= 0.1


def test_batches_that_end_and_losses_that_are_not_finite_are_told():
    with pytest.raises(WorkloadError, match="batches\\(seed\\) ended"):
        profile_steps(workload(batches=3), CPU)
    with pytest.raises(NonFiniteError):
        profile_steps(workload(scale=float("nan")), CPU)


def test_nothing_goes_to_standard_error(capfd):
    profile_steps(workload(), CPU, steps=3)
    assert capfd.readouterr().err == ""
