"""Colossal-AI's parts around the AMP modes: configuration, hooks, schedulers, import lines, coverage."""

from __future__ import annotations

import importlib
import logging
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from castwise.bridges import compat
from castwise.bridges.compat import colossalai
from castwise.bridges.compat.colossalai.amp import AMP_TYPE, convert_to_amp
from castwise.bridges.compat.colossalai.context import Config, ConfigException
from castwise.bridges.compat.colossalai.core import global_context as gpc
from castwise.bridges.compat.colossalai.engine import Engine
from castwise.bridges.compat.colossalai.engine.gradient_accumulation import accumulate_gradient
from castwise.bridges.compat.colossalai.logging import get_dist_logger
from castwise.bridges.compat.colossalai.nn.lr_scheduler import LinearWarmupLR
from castwise.bridges.compat.colossalai.trainer import Trainer, hooks
from castwise.bridges.compat.colossalai.utils import MultiTimer, get_current_device
from castwise.bridges.compat.coverage import covered
from castwise.errors import PlanError, StateError
from tests.fresh import run_python

LOSS = nn.functional.mse_loss


# --- configuration ----------------------------------------------------------------------------------------------


def test_a_configuration_is_a_python_file(tmp_path: Path) -> None:
    """The file has arbitrary and nested names and the original import line, which needs no Colossal-AI."""
    path = tmp_path / "config.py"
    path.write_text(
        textwrap.dedent("""
            import os
            from colossalai.amp import AMP_TYPE

            BATCH_SIZE = 4 * 8
            fp16 = dict(mode=AMP_TYPE.NAIVE, hysteresis=2)
            parallel = dict(pipeline=2, tensor=dict(size=2, mode="1d"))
        """)
    )
    before = set(sys.modules)
    config = Config.from_file(path)
    assert set(config) == {"BATCH_SIZE", "fp16", "parallel"}
    assert config.BATCH_SIZE == config["BATCH_SIZE"] == 32
    assert config.fp16.mode is AMP_TYPE.NAIVE
    assert config.parallel.tensor.mode == "1d"
    assert "colossalai" not in set(sys.modules) - before
    config.update({"more": {"of": 1}})
    assert config.more.of == 1


def test_what_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigException, match="no such file; give the path of a Python file"):
        Config.from_file(tmp_path / "config.py")
    (tmp_path / "config.yaml").write_text("a: 1")
    with pytest.raises(ConfigException, match=r"not a .py file"):
        Config.from_file(tmp_path / "config.yaml")
    with pytest.raises(ConfigException, match=r"pass --config PATH to the script"):
        gpc.load_config(None)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match=r"gpc.config has no 'NUM_EPOCH'; it has NUM_EPOCHS"):
        Config({"NUM_EPOCHS": 3}).NUM_EPOCH  # noqa: B018 - the access is the test


def test_the_parser_has_the_originals_arguments() -> None:
    args = colossalai.get_default_parser().parse_args([
        "--config",
        "c.py",
        "--host",
        "h",
        "--port",
        "1",
        "--world_size",
        "2",
        "--rank",
        "1",
        "--local_rank",
        "0",
    ])
    assert vars(args) == {
        "config": "c.py", "host": "h", "port": 1, "world_size": 2, "rank": 1, "local_rank": 0, "backend": "nccl"
    }  # fmt: skip


def test_launching_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        StateError,
        match=r"launch_from_torch: the environment variable RANK is not set; start the script with torchrun",
    ):
        colossalai.launch_from_torch({})
    with pytest.raises(StateError, match="environment variable SLURM_PROCID is not set"):
        colossalai.launch_from_slurm({}, "h", 1)
    with pytest.raises(StateError, match="environment variable OMPI_COMM_WORLD_RANK is not set"):
        colossalai.launch_from_openmpi({}, "h", 1)
    layer = nn.Linear(1, 1)
    with pytest.raises(StateError, match=r"call colossalai.launch or launch_from_torch first"):
        colossalai.initialize(layer, torch.optim.SGD(layer.parameters(), 1.0))


# --- schedulers and accumulation --------------------------------------------------------------------------------


@pytest.mark.parametrize(("total", "warmup"), [(10, 0), (10, 3), (4, 4), (3, 5)])
def test_the_rate_follows_the_formula_and_stays_at_zero(total: int, warmup: int) -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (0.8, 0.1)]
    optimizer = torch.optim.SGD(groups)
    scheduler = LinearWarmupLR(optimizer, total_steps=total, warmup_steps=warmup)
    for step in range(total + 5):
        if step < warmup:
            factor = (step + 1) / (warmup + 1)
        elif step < total:
            factor = (total - step) / (total - warmup)
        else:
            factor = 0.0
        assert scheduler.get_last_lr() == pytest.approx([0.8 * factor, 0.1 * factor]), step
        optimizer.step()
        scheduler.step()
    again = LinearWarmupLR(optimizer, total_steps=total, warmup_steps=warmup)
    again.load_state_dict(scheduler.state_dict())
    assert again.last_epoch == total + 5


def test_a_rate_that_cannot_be() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    with pytest.raises(PlanError, match="needs total_steps >= 1 and warmup_steps >= 0"):
        LinearWarmupLR(optimizer, total_steps=0)


def test_accumulation_gates_steps_rates_and_the_last_batches() -> None:
    model = nn.Linear(2, 1, bias=False)
    inner = torch.optim.SGD(model.parameters(), 1.0)
    model, optimizer, _ = convert_to_amp(model, inner, None, AMP_TYPE.APEX, {"enabled": False})
    rates = torch.optim.lr_scheduler.StepLR(inner, 1, 0.5)
    outer, loader, handlers, scheduler = accumulate_gradient(
        model, optimizer, [torch.full((1, 2), float(i)) for i in range(7)], 3, (), rates
    )
    assert len(loader) == 6
    assert handlers == []
    seen = []
    for x in loader:
        outer.zero_grad()
        outer.backward(model(x).sum())
        before = model.weight.detach().clone()
        outer.step()
        scheduler.step()
        seen.append((before - model.weight.detach())[0, 0].item())
    # the mean of 0, 1, 2 at learning rate 1, then of 3, 4, 5 at 1/2
    assert seen == pytest.approx([0, 0, 1.0, 0, 0, 2.0])
    with pytest.raises(PlanError, match="gradient_accumulation=0 is not allowed"):
        accumulate_gradient(model, optimizer, None, 0)
    optimizer.amp.close()


# --- trainer and hooks ------------------------------------------------------------------------------------------


class Recorder(hooks.BaseHook):
    """A hook that records its calls."""

    def __init__(self, name: str, priority: int, record: list[str]) -> None:
        super().__init__(priority)
        self.name, self.record = name, record


def _tell(moment: str) -> Any:
    def called(self: Recorder, trainer: Any, *output: Any) -> None:
        self.record.append(f"{self.name} {moment}" if self.name != "a" else moment)

    return called


MOMENTS = [name for name in vars(hooks.BaseHook) if name.startswith(("before_", "after_"))]
for _moment in MOMENTS:
    setattr(Recorder, _moment, _tell(_moment))


def data(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 8, 4, generator=generator)
    return [(part, part.sum(1, keepdim=True)) for part in x]


@pytest.fixture
def engine() -> Iterator[Engine]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1).to(get_current_device())
    inner = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, criterion = convert_to_amp(
        model, inner, LOSS, AMP_TYPE.NAIVE, {"initial_scale": 16, "clip_grad_norm": 1.0}
    )
    yield Engine(model, optimizer, criterion)
    optimizer.amp.close()


def test_hooks_are_called_in_their_order(engine: Engine) -> None:
    record: list[str] = []
    trainer = Trainer(engine)
    trainer.fit(data(2), epochs=1, test_dataloader=data(1), hooks=[Recorder("a", 1, record)])
    assert record == [
        "after_hook_is_attached", "before_train", "before_train_epoch", "before_train_iter", "after_train_iter",
        "before_train_iter", "after_train_iter", "after_train_epoch", "before_test", "before_test_epoch",
        "before_test_iter", "after_test_iter", "after_test_epoch", "after_test", "after_train",
    ]  # fmt: skip
    assert set(record) == set(MOMENTS)


def test_lower_priorities_come_first_and_equal_ones_as_given(engine: Engine) -> None:
    record: list[str] = []
    given = [
        Recorder(name, priority, record) for name, priority in (("x", 10), ("y", 0), ("z", 10), ("w", 1))
    ]
    Trainer(engine).fit(data(1), epochs=0, hooks=given)
    assert [line.split()[0] for line in record if line.endswith("before_train")] == ["y", "w", "x", "z"]
    scheduler = LinearWarmupLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1), 3)
    defaults = {
        hooks.LossHook(): 0, hooks.AccuracyHook(len): 0, hooks.LRSchedulerHook(scheduler, True): 1,
        hooks.ThroughputHook(): 10, hooks.LogMetricByStepHook(): 10, hooks.LogMetricByEpochHook(None): 10,
        hooks.LogTimingByEpochHook(MultiTimer(), None): 10, hooks.LogMemoryByEpochHook(None): 10,
        hooks.SaveCheckpointHook(checkpoint_dir="x"): 10, hooks.LoadCheckpointHook("x"): 0,
    }  # fmt: skip
    assert all(hook.priority == priority for hook, priority in defaults.items())


class Lines(logging.Handler):
    """A handler that collects log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[list[str]]:
    handler = Lines()
    get_dist_logger()
    logger = logging.getLogger("colossalai")
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)


def test_a_training_with_all_hooks(engine: Engine, lines: list[str], tmp_path: Path) -> None:
    """Losses and learning rates are those of a loop by hand; a second trainer continues where the first ended."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger, timer = get_dist_logger(), MultiTimer()
    scheduler = LinearWarmupLR(engine.optimizer, total_steps=8)
    losses: list[float] = []

    class Losses(hooks.BaseHook):
        def after_train_iter(self, trainer: Any, output: Tensor, label: Tensor, loss: Tensor) -> None:
            assert output.shape == label.shape
            assert loss.item() == pytest.approx(LOSS(output.float(), label).item())
            losses.append(loss.item())

    rates = hooks.LRSchedulerHook(scheduler, by_epoch=False)
    board = hooks.TensorboardHook(str(tmp_path / "board"))
    trainer = Trainer(engine, timer, logger)
    trainer.fit(
        data(),
        epochs=2,
        test_dataloader=data(2),
        hooks=[
            hooks.LossHook(),
            hooks.AccuracyHook(lambda output, target: (output - target).abs().lt(10).all(1).sum()),
            hooks.ThroughputHook(ignored_steps=1, tflop_per_step=1e-9),
            hooks.LogMetricByEpochHook(logger),
            hooks.LogMetricByStepHook(),
            hooks.LogTimingByEpochHook(timer, logger, ignore_num_train_steps=1),
            hooks.LogMemoryByEpochHook(logger),
            hooks.SaveCheckpointHook(checkpoint_dir=str(tmp_path / "saved")),
            board,
            rates,
            Losses(20),
        ],
        display_progress=True,
    )
    assert len(losses) == 8
    assert sum(losses[4:]) < sum(losses[:4])
    metrics = trainer.states["metrics"]
    assert metrics["train"]["Loss"].get_accumulated_value() == pytest.approx(sum(losses[4:]) / 4)
    assert metrics["test"]["Accuracy"].get_accumulated_value() == 1.0
    assert metrics["train"]["LR"].get_last_step_value() == scheduler.get_last_lr()[0] == 0.0
    said = "\n".join(lines)
    assert f"[Epoch 0 / Train]: Loss = {sum(losses[:4]) / 4:.5g} | LR = " in said
    for text in (
        "Accuracy = 1",
        "Train-step: last = ",
        "Test-epoch: last = ",
        "#steps/epoch = 4",
        "MiB",
        "priority 1",
    ):
        assert text in said, text
    assert trainer.states["step_metrics"]["throughput"].endswith("TFLOP/s")
    board.writer.close()
    events = EventAccumulator(str(tmp_path / "board" / "global_rank_0")).Reload()
    assert [event.value for event in events.Scalars("Loss/train")] == pytest.approx(losses)

    weights = [p.detach().clone() for p in engine.model.parameters()]
    later = Trainer(engine)
    with torch.no_grad():
        for p in engine.model.parameters():
            p.zero_()
    later.fit(data(), epochs=2, hooks=[hooks.LoadCheckpointHook(str(tmp_path / "saved"))])
    assert later.cur_epoch == 2
    assert all(torch.equal(p, was) for p, was in zip(engine.model.parameters(), weights, strict=True))
    with pytest.raises(FileNotFoundError, match="no complete checkpoint there"):
        Trainer(engine).fit(data(), epochs=1, hooks=[hooks.LoadCheckpointHook(str(tmp_path / "none"))])


def test_a_training_ends_after_its_last_step(engine: Engine) -> None:
    trainer = Trainer(engine)
    trainer.fit(data(), epochs=5, max_steps=6)
    assert (trainer.cur_step, trainer.cur_epoch) == (6, 2)
    assert trainer.predict(data()[0][0]).shape == (8, 1)
    trainer.evaluate(data(), hooks=[hooks.LossHook()])
    assert trainer.states["metrics"]["test"]["Loss"].get_accumulated_value() > 0


def test_hooks_say_what_they_miss(engine: Engine) -> None:
    with pytest.raises(StateError, match=r"Trainer\(engine, timer=MultiTimer\(\)\)"):
        Trainer(engine).fit(data(), epochs=1, hooks=[hooks.ThroughputHook()])
    with pytest.raises(StateError, match="is not a hook; derive it from"):
        Trainer(engine).fit(data(), epochs=1, hooks=[print])  # type: ignore[list-item]
    with pytest.raises(StateError, match="return_output_label=True"):
        Trainer(engine).evaluate(data(), hooks=[hooks.AccuracyHook(len)], return_output_label=False)
    with pytest.raises(StateError, match="give checkpoint_dir"):
        hooks.SaveCheckpointHook()
    with pytest.raises(PlanError, match="allowed: pairs"):
        engine.execute_schedule(iter([torch.zeros(1)]))


def test_an_engine_is_the_loop_written_out(engine: Engine) -> None:
    twin = nn.Linear(4, 1)
    twin.load_state_dict(engine.model.state_dict())
    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    engine.train()
    for x, y in data():
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x.to(get_current_device())), y.to(get_current_device())))
        assert engine.step()[0]
        optimizer.zero_grad()
        LOSS(twin(x), y).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
    for a, b in zip(engine.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.float().cpu(), b, atol=2e-3, rtol=0)
    engine.eval()
    assert not engine.model.training
    assert not engine.uses_pipeline


# --- import lines and coverage ----------------------------------------------------------------------------------


def test_the_original_import_lines(tmp_path: Path) -> None:
    code = """
        import castwise, sys
        assert not any(name.startswith("castwise.bridges.compat") for name in sys.modules)
        import castwise.bridges.compat
        assert castwise.bridges.compat.install().count("colossalai") == 1
        castwise.bridges.compat.install()

        import colossalai
        from colossalai.amp import AMP_TYPE
        from colossalai.context import ParallelMode
        from colossalai.core import global_context as gpc
        from colossalai.engine.schedule import PipelineSchedule
        from colossalai.legacy.amp import AMP_TYPE as again
        from colossalai.logging import disable_existing_loggers, get_dist_logger
        from colossalai.nn.lr_scheduler import LinearWarmupLR
        from colossalai.nn.metric import Accuracy
        from colossalai.trainer import Trainer, hooks
        from colossalai.utils import MultiTimer, get_dataloader
        import castwise.bridges.compat.colossalai.amp as ours
        assert AMP_TYPE is again is ours.AMP_TYPE
        assert colossalai.nn.metric.Accuracy is Accuracy
        for line in ("import colossalai.zero", "from colossalai.nn import Linear", "from colossalai.utils import clip_grad_norm_fp32"):
            try:
                exec(line)
            except ImportError as error:
                print(error)
    """
    zero, linear, clip = run_python(textwrap.dedent(code), tmp_path).splitlines()
    assert "No module named 'colossalai.zero'" in zero
    assert "use zero = dict(level=3) in the configuration" in zero, zero
    assert "parallelize_module" in linear
    assert "engine.amp.clip_grad_norm_(optimizer, max_norm)" in clip


def test_a_real_package_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "colossalai.py").write_text("real = True")
    code = """
        import sys; sys.path.insert(0, ".")
        import castwise.bridges.compat
        assert "colossalai" not in castwise.bridges.compat.install()
        import colossalai
        print(colossalai.real)
    """
    assert run_python(textwrap.dedent(code), tmp_path) == "True\n"


def _resolve(name: str) -> Any:
    parts = name.split(".")
    value: Any = importlib.import_module("castwise.bridges.compat.colossalai")
    for depth, part in enumerate(parts[1:], 1):
        try:
            value = getattr(value, part)
        except AttributeError as error:
            try:
                value = importlib.import_module(
                    ".".join(["castwise.bridges.compat.colossalai", *parts[1 : depth + 1]])
                )
            except ModuleNotFoundError:
                raise error from None
    return value


@pytest.mark.parametrize(
    ("module", "advice"),
    [
        ("nn.optimizer.hybrid_adam", "import HybridAdam from colossalai.nn.optimizer"),
        ("legacy.nn.lr_scheduler.cosine", "CosineAnnealingWarmupLR from colossalai.nn.lr_scheduler"),
        ("testing.comparison", "torch.testing"),
        ("zero.sharded_optim", "zero = dict"),
    ],
)
def test_a_module_whose_names_are_elsewhere_says_where(module: str, advice: str) -> None:
    assert "colossalai" not in sys.modules
    compat.install("colossalai")
    try:
        with pytest.raises(ModuleNotFoundError, match=advice):
            importlib.import_module(f"colossalai.{module}")
    finally:
        compat.uninstall()


def test_the_coverage_says_what_there_is() -> None:
    rows = covered("colossalai")
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    for row in rows:
        if not row.name.startswith("colossalai.") or "(" in row.name or row.name == "colossalai.legacy":
            continue
        if row.status != "absent":
            assert _resolve(row.name) is not None, row.name
        else:
            with pytest.raises(AttributeError, match="Instead: "):
                _resolve(row.name)
    for mode in ("torch", "apex", "naive"):
        options = {
            name.split("(")[1].rstrip(")") for name in names if name.startswith(f"AMP_TYPE.{mode.upper()}(")
        }
        from castwise.bridges.compat.colossalai.plans import recipe_of
        from castwise.errors import UnknownNameError

        with pytest.raises(UnknownNameError) as caught:
            recipe_of(mode, {"?": 1})
        known = set(str(caught.value).split("Allowed: ")[1].rstrip(".").split(", "))
        assert options == known - {
            "dtype",
            "hysterisis",
            "init_scale" if mode == "naive" else "",
            "clip_grad",
        }, mode
