"""Parsing of layouts, coordinates of ranks, and shares of a batch; no process is started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.here import DEVICE
from tests.soak import each_value
from torch import nn

from castwise.commands.jobs.layout import Coordinate, Layout, check_microbatches, check_splits, slice_batch
from castwise.commands.jobs.layouts import check_workload
from castwise.commands.jobs.train import train
from castwise.core.casting.trees import map_tensors
from castwise.errors import PlanError, WorkloadError
from castwise.lab.workloads.workload import Pipeline, Workload, find_workload

# --- text -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("single", Layout()),
        ("dp2", Layout(dp=2)),
        ("fsdp16", Layout(fsdp=16)),
        ("tp2", Layout(tp=2)),
        ("pp3", Layout(pp=3)),
        ("dp2xtp2xpp2", Layout(dp=2, tp=2, pp=2)),
        ("dp2xfsdp4", Layout(dp=2, fsdp=4)),
    ],
)
def test_text_and_back(text: str, layout: Layout) -> None:
    assert Layout.parse(text) == layout
    assert str(layout) == text


def test_order_and_ones_are_of_no_account() -> None:
    assert Layout.parse("pp2xtp3xdp1") == Layout.parse("tp3xpp2")
    assert str(Layout.parse("dp1")) == "single"


@pytest.mark.parametrize("text", ["", "dp", "2dp", "dp0", "dp-1", "dp2 x tp2", "ddp2", "dp2xx", "dp2,tp2", "DP2", "dp02"])  # fmt: skip
def test_other_text_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(PlanError) as caught:
        Layout.parse(text)
    said = str(caught.value)
    assert said.startswith(f"layout {text!r}: ")
    assert "Allowed: single, dp2, fsdp2, tp2, pp2 and products of them such as dp2xtp2" in said
    assert "--layout dp2" in said


def test_a_part_twice_is_refused_with_the_product() -> None:
    with pytest.raises(PlanError, match=r"tp is given twice; write tp6 instead"):
        Layout.parse("tp2xdp2xtp3")


@pytest.mark.parametrize("value", [0, -2, 1.5, None])
def test_sizes_are_whole_numbers(value: object) -> None:
    with pytest.raises(PlanError, match=r"Layout\(tp=.*\): needs a whole number >= 1"):
        Layout(tp=value)  # type: ignore[arg-type]


def test_the_number_of_processes_has_to_fit() -> None:
    Layout.parse("dp2xtp2").check(4)
    with pytest.raises(PlanError, match="needs 4 processes, but 2 were started") as caught:
        Layout.parse("dp2xtp2").check(2)
    assert "torchrun --nproc-per-node 4 -m castwise train ... --layout dp2xtp2" in str(caught.value)
    with pytest.raises(PlanError, match=r"needs 1 process, but 2 were started; use castwise train"):
        Layout().check(2)


def test_one_process_that_was_asked_to_be_two_says_how(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"layout pp2: needs 2 processes, but 1 was started; use torchrun"):
        train("gpt", "fp32", steps=1, out=tmp_path / "x", layout="pp2")
    assert not (tmp_path / "x").exists()


# --- ranks ------------------------------------------------------------------------------------------------------


def test_places_are_those_of_the_mesh() -> None:
    layout = Layout(dp=2, fsdp=3, tp=2, pp=2)
    assert list(layout.mesh_dims().items()) == [("pp", 2), ("dp", 2), ("fsdp", 3), ("tp", 2)]
    grid = torch.arange(layout.world_size).reshape(*layout.mesh_dims().values())
    for rank in range(layout.world_size):
        pp, dp, fsdp, tp = (grid == rank).nonzero()[0].tolist()
        assert layout.place(rank) == Coordinate(pp=pp, dp=dp, fsdp=fsdp, tp=tp)
        assert layout.slice_of(rank) == 3 * dp + fsdp
    assert layout.data_ranks == 6


@pytest.mark.parametrize(
    ("text", "dims", "shards"),
    [
        ("dp2", {"dp": 2}, False),
        ("fsdp2", {"fsdp": 2}, True),
        ("tp2xpp2", {"pp": 2, "tp": 2}, False),
        ("dp2xtp2", {"dp": 2, "fsdp": 1, "tp": 2}, True),
        ("dp2xpp2", {"pp": 2, "dp": 2, "fsdp": 1}, True),
        ("single", {}, False),
    ],
)
def test_replicas_of_cut_models_are_shards_of_one(text: str, dims: dict[str, int], shards: bool) -> None:
    layout = Layout.parse(text)
    assert layout.mesh_dims() == dims
    assert layout.shards == shards


# --- shares of a batch ------------------------------------------------------------------------------------------


def test_shares_are_equal_and_together_the_batch() -> None:
    batch = {"x": torch.arange(12).reshape(6, 2), "more": (torch.arange(3.0), torch.tensor(7.0)), "name": "a"}
    parts = [slice_batch(batch, index, 3, Layout(dp=3)) for index in range(3)]
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert [part["more"][0].tolist() for part in parts] == [[0.0], [1.0], [2.0]]
    assert all(part["more"][1] is batch["more"][1] and part["name"] == "a" for part in parts)
    assert slice_batch(batch, 0, 1, Layout()) is batch


def test_a_batch_that_cannot_be_shared_out_names_shape_and_ranks() -> None:
    with pytest.raises(WorkloadError) as caught:
        slice_batch([torch.ones(4, 1), torch.ones(5, 3)], 0, 2, Layout(fsdp=2))
    assert "layout fsdp2: a tensor of shape [5, 3]" in str(caught.value)
    assert "among 2 data-parallel ranks; make its first dimension (5) a multiple of 2" in str(caught.value)


def test_microbatches_have_to_be_equal() -> None:
    check_splits((torch.ones(8, 3), {"y": torch.ones(4)}, [torch.tensor(1.0), None]), 4, Layout(pp=2))
    with pytest.raises(WorkloadError, match=r"shape \[6\].* into 4 equal microbatches; use --microbatches 3"):
        check_splits((torch.ones(8), [torch.ones(6)]), 4, Layout(pp=2))


@pytest.mark.parametrize(
    ("microbatches", "schedule", "words"),
    [
        (0, "gpipe", "needs a whole number >= 1"),
        (2, "1f1b", "1f1b needs at least 3 microbatches, one per stage; or use --schedule gpipe"),
        (7, "interleaved", "interleaved needs a multiple of 3"),
    ],
)
def test_schedules_say_what_they_need(microbatches: int, schedule: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        check_microbatches(microbatches, schedule, Layout(pp=3))
    check_microbatches(6, schedule, Layout(pp=3))


@pytest.mark.parametrize("option", [{"microbatches": 2}, {"schedule": "gpipe"}])
def test_options_of_a_pipeline_are_for_pipelines(
    tiny: str, tmp_path: Path, option: dict[str, object]
) -> None:
    with pytest.raises(PlanError, match=r"for pipelines, and layout single has none; leave .* out"):
        train(f"{tiny}:mlp", "fp32", steps=1, out=tmp_path, **option)  # type: ignore[arg-type]


# --- requirements on the workload ---------------------------------------------------------------------------------


def test_a_workload_without_the_field_is_told_what_to_write() -> None:
    mlp = find_workload("sine")
    with pytest.raises(WorkloadError, match=r"field 'shards' is not set; give Workload\(\.\.\., shards="):
        check_workload(mlp, Layout(tp=2))
    with pytest.raises(
        WorkloadError, match=r"'pipeline' is not set; give Workload\(\.\.\., pipeline=Pipeline"
    ):
        check_workload(mlp, Layout(pp=2))
    check_workload(mlp, Layout(fsdp=2))


# --- stages -------------------------------------------------------------------------------------------------------


@each_value()
@pytest.mark.parametrize(
    "spec", ["gpt?layers=5&width=16&context=8&batch=2", "digits?model=vit&width=8&batch=2"]
)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_stages_one_after_the_other_are_the_model(spec: str, count: int) -> None:
    from castwise.commands.jobs.stages import split

    workload = find_workload(spec)
    torch.manual_seed(0)
    model = workload.model()
    batch = map_tensors(lambda t: t.to(DEVICE), next(workload.batches(0)))
    assert workload.pipeline is not None
    stages = split(workload, model, count)
    assert len(stages) == count
    (x,) = workload.pipeline.inputs(batch)
    for stage in stages:
        assert next(stage.parameters(), None) is not None
        x = stage(x)
    loss = workload.pipeline.loss(x, workload.pipeline.target(batch))
    assert torch.equal(loss, workload.loss(model, batch))
    keys = {key for stage in stages for key in stage.state_dict()}
    assert keys == model.state_dict().keys()


def test_more_stages_than_blocks_are_refused() -> None:
    from castwise.commands.jobs.stages import split

    workload = find_workload("gpt?layers=2&width=16")
    with pytest.raises(
        WorkloadError, match=r"a model of 2 blocks cannot be cut into 3 stages; use more layers"
    ):
        split(workload, workload.model(), 3)


def _pipelined(tiny: str, split: object) -> Workload:
    pipeline = Pipeline(split, lambda b: b[:1], lambda b: b[1], nn.functional.mse_loss)  # type: ignore[arg-type]
    return replace(find_workload(f"{tiny}:mlp"), pipeline=pipeline)


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (lambda model, _: [model], r"returned \[Sequential\]; it must return 2 modules"),
        (lambda model, _: [model[:2], None], r"returned \[Sequential, NoneType\]"),
        (lambda model, _: [model[:2], nn.Sequential(model[3])], r"stage 1 has '0.weight', which the model does not have under this name"),
        (lambda model, _: [model[:1], model[1:3]], r"no stage has 3.weight, 3.bias; each parameter and buffer"),
        (lambda model, _: [model[:1], 1 / 0], r"pipeline.split\(model, stages\) failed: ZeroDivisionError"),
    ],
)  # fmt: skip
def test_stages_that_are_not_the_model_are_refused(tiny: str, split: object, words: str) -> None:
    from castwise.commands.jobs.stages import split as checked

    workload = _pipelined(tiny, split)
    with pytest.raises(WorkloadError, match=words):
        checked(workload, workload.model(), 2)


def test_heads_that_cannot_be_shared_out_are_named() -> None:
    attention = find_workload("gpt?layers=1&width=48&heads=3").model().blocks[0].attention
    attention.qkv = nn.Linear(48, 72)  # half of the layer, as with tensor parallelism of size 2
    with pytest.raises(WorkloadError, match=r"3 heads cannot be cut into equal pieces"):
        attention(torch.ones(1, 2, 48))
