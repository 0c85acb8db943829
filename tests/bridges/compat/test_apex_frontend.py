"""``initialize``: arguments, results, output and errors; state dicts; inputs and outputs of a cast model."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import pickle
import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from castwise.bridges.compat.apex import amp, parallel
from castwise.errors import LossScaleError
from tests.soak import each_value

LEVELS = {
    "O0": (torch.float32, False, None, False, 1.0),
    "O1": (None, True, None, None, "dynamic"),
    "O2": (torch.float16, False, True, True, "dynamic"),
    "O3": (torch.float16, False, False, False, 1.0),
}


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    return model, torch.optim.SGD(model.parameters(), 0.1)


def init(level: str = "O2", **options: Any) -> tuple[nn.Module, Any]:
    return amp.initialize(*parts(), opt_level=level, verbosity=0, **options)


# --- options ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_levels_have_apex_s_defaults_and_say_so(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    amp.initialize(*parts(), opt_level=level)
    names = (
        "cast_model_type",
        "patch_torch_functions",
        "keep_batchnorm_fp32",
        "master_weights",
        "loss_scale",
    )
    assert tuple(getattr(amp._amp_state.opt_properties, name) for name in names) == LEVELS[level]
    printed = capsys.readouterr().out
    assert printed.startswith(f"Selected optimization level {level}:  ")
    options = "".join(
        f"{name:22} : {value}\n"
        for name, value in zip(("enabled", "opt_level", *names), (True, level, *LEVELS[level]), strict=True)
    )
    assert f"Defaults for this optimization level are:\n{options}" in printed
    assert "Processing user overrides (additional kwargs that are not None)...\n" in printed
    assert f"After processing overrides, optimization options are:\n{options}" in printed
    assert printed.endswith(options)


def test_a_second_call_says_that_the_first_one_s_casts_end(capsys: pytest.CaptureFixture[str]) -> None:
    init("O1")
    assert capsys.readouterr().out == ""
    amp.initialize(nn.Linear(2, 2), opt_level="O2")
    assert amp._amp_state.handle is None
    assert capsys.readouterr().out.startswith("amp.initialize was called again: the casts")


def test_verbosity_0_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    init("O2")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("level", "options", "wanted"),
    [
        ("O2", {"keep_batchnorm_fp32": "False"}, {"keep_batchnorm_fp32": False}),
        ("O3", {"keep_batchnorm_fp32": "True"}, {"keep_batchnorm_fp32": True}),
        ("O2", {"loss_scale": "128.0"}, {"loss_scale": 128.0}),
        (
            "O3",
            {"loss_scale": "dynamic", "master_weights": True},
            {"loss_scale": "dynamic", "master_weights": True},
        ),
        ("O2", {"cast_model_type": torch.bfloat16}, {"cast_model_type": torch.bfloat16}),
        ("O2", {"cast_model_type": False}, {"cast_model_type": False}),
        ("O2", {"master_weights": False}, {"master_weights": False}),
        (
            "O1",
            {"patch_torch_functions": False, "loss_scale": 2},
            {"patch_torch_functions": False, "loss_scale": 2.0},
        ),
        ("O1", {"cast_model_type": torch.float32}, {"cast_model_type": torch.float32}),
    ],
)
def test_overrides_do_what_they_say(level: str, options: dict[str, Any], wanted: dict[str, Any]) -> None:
    model, optimizer = init(level, **options)
    properties = amp._amp_state.opt_properties
    assert {name: getattr(properties, name) for name in wanted} == wanted
    low = properties.cast_model_type or torch.float32
    norm = torch.float32 if properties.keep_batchnorm_fp32 else low
    assert (model[0].weight.dtype, model[1].weight.dtype, model[1].running_mean.dtype) == (low, norm, norm)
    stored = torch.float32 if properties.master_weights else low
    assert next(iter(amp.master_params(optimizer))).dtype is stored
    assert amp._amp_state.loss_scalers[0].dynamic == (properties.loss_scale == "dynamic")
    assert (amp._amp_state.handle is not None) == bool(properties.patch_torch_functions)
    loss = model(torch.randn(4, 4)).sum() / 64
    with amp.scale_loss(loss, optimizer) as scaled:
        scale = 2.0**16 if properties.loss_scale == "dynamic" else properties.loss_scale
        assert torch.equal(scaled.detach(), loss.detach().float() * scale)
        scaled.backward()
    optimizer.step()


def test_batch_norm_without_weights_is_stored_low() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(4))
    amp.initialize(model, opt_level="O2", verbosity=0)
    assert model[1].running_mean.dtype is torch.float16
    assert model[2].running_mean.dtype is torch.float32
    assert model(torch.randn(4, 4)).dtype is torch.float32


@each_value()
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    ("models_listed", "optimizers"), list(itertools.product([False, True], ["one", "list", None]))
)
def test_lists_come_back_as_lists(level: str, models_listed: bool, optimizers: str | None) -> None:
    model, optimizer = parts()
    models: Any = [model] if models_listed else model
    given: Any = {"one": optimizer, "list": [optimizer], None: None}[optimizers]
    result = amp.initialize(models, given, opt_level=level, verbosity=0)
    if optimizers is None:
        assert result is models
    else:
        assert result[0] is models
        assert result[1] is given


def test_disabled_amp_does_nothing() -> None:
    model, optimizer = parts()
    result = amp.initialize(model, optimizer, enabled=False, opt_level="O2")
    assert result[0] is model
    assert result[1] is optimizer
    assert model[0].weight.dtype is torch.float32
    loss = model(torch.randn(4, 4)).sum()
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
        scaled.backward()
    optimizer.step()
    state = amp.state_dict()
    assert state == {}
    amp.load_state_dict(state)
    with amp.disable_casts():
        pass


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "options", "words"),
    [
        ("02", {}, "Unexpected optimization level 02. Options are 'O0', 'O1', 'O2', 'O3'.  Note that in `O0`, `O1`, etc., "
         "the prefix O is the letter O, not the number zero."),
        ("O1", {"master_weights": True}, "It doesn't make sense to use master_weights with O1."),
        ("O1", {"keep_batchnorm_fp32": True}, "With opt_level O1, batchnorm functions are automatically patched"),
        ("O1", {"cast_model_type": torch.float16}, "O1 inserts casts around Torch functions rather than model weights"),
        ("O2", {"patch_torch_functions": True}, "patch_torch_functions=True should only be set by selecting opt_level='O1'"),
        ("O2", {"cast_model_type": torch.int8}, "cast_model_type was torch.int8; allowed: torch.float16"),
        ("O1", {"patch_torch_functions_type": torch.int8}, "patch_torch_functions_type was torch.int8; allowed:"),
    ],
)  # fmt: skip
def test_contradictions_are_runtime_errors(level: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(words)):
        init(level, **options)


class Emptied:
    """A namespace whose registered function is then deleted."""


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, AttributeError),
        ({"patch_torch_functions_type": torch.float32}, RuntimeError),
        ({"num_losses": "2"}, TypeError),
    ],
)
def test_a_call_that_fails_leaves_nothing_and_can_be_made_again(
    options: dict[str, Any], error: type[Exception]
) -> None:
    model, optimizer = parts()
    before = torch.matmul, torch.Tensor.__iadd__, optimizer.step, dict(model._forward_hooks)
    amp.register_float_function(torch, "matmul")
    Emptied.function = len  # type: ignore[attr-defined]
    amp.register_float_function(Emptied, "function")
    if not options:
        del Emptied.function  # type: ignore[attr-defined]
    with pytest.raises(error):
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0, **options)
    assert before == (torch.matmul, torch.Tensor.__iadd__, optimizer.step, dict(model._forward_hooks))
    assert amp._amp_state.handle is None
    assert not torch.is_autocast_enabled("cpu")
    Emptied.function = len  # type: ignore[attr-defined]
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    with amp.scale_loss(model(torch.ones(2, 4)).float().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def test_hard_override_prints_instead(capsys: pytest.CaptureFixture[str]) -> None:
    amp._amp_state.hard_override = True
    init("O1", keep_batchnorm_fp32=True)
    assert capsys.readouterr().out.startswith("Warning:  With opt_level O1, batchnorm functions")


@pytest.mark.parametrize("level", LEVELS)
def test_models_that_cannot_be_taken(level: str) -> None:
    model, optimizer = parts()
    with pytest.raises(
        RuntimeError, match=r"Incoming model is an instance of torch.nn.parallel.DataParallel\. "
    ):
        amp.initialize(nn.DataParallel(model), optimizer, opt_level=level, verbosity=0)
    half = nn.Linear(2, 2).half()
    with pytest.raises(
        RuntimeError, match=r"Found param weight with type torch.HalfTensor, expected torch.FloatTensor"
    ):
        amp.initialize(half, opt_level=level, verbosity=0)
    buffered = nn.BatchNorm1d(2)
    buffered.running_mean = buffered.running_mean.half()
    with pytest.raises(RuntimeError, match=r"Found buffer running_mean with type torch\.HalfTensor"):
        amp.initialize(buffered, opt_level=level, verbosity=0)
    amp._amp_state.allow_incoming_model_not_fp32 = True
    amp.initialize(half, opt_level=level, verbosity=0)


@pytest.mark.parametrize("level", LEVELS)
def test_containers_and_optimizers_that_cannot_be_taken(level: str) -> None:
    model, optimizer = parts()
    with pytest.raises(
        TypeError, match="optimizers must be either a single optimizer or a list of optimizers"
    ):
        amp.initialize(model, (optimizer,), opt_level=level, verbosity=0)
    with pytest.raises(TypeError, match="models must be either a single model or a list of models"):
        amp.initialize((model,), optimizer, opt_level=level, verbosity=0)
    with pytest.raises(RuntimeError, match=r"should only be passed through amp\.initialize once"):
        amp.initialize(model, [optimizer, optimizer], opt_level=level, verbosity=0)
    double = nn.Linear(2, 2).double()
    with pytest.raises(
        TypeError, match=r"Optimizer's parameters must be either .*Received torch.DoubleTensor"
    ):
        amp.initialize(model, torch.optim.SGD(double.parameters(), 0.1), opt_level=level, verbosity=0)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    with pytest.raises(RuntimeError, match=r"should only be passed through amp\.initialize once"):
        amp.initialize(nn.Linear(2, 2), optimizer, opt_level=level, verbosity=0)


def test_scale_loss_says_what_is_missing() -> None:
    model, optimizer = parts()
    loss = model(torch.randn(4, 4)).sum()
    with (
        pytest.raises(RuntimeError, match="internal Amp state has not been initialized"),
        amp.scale_loss(loss, optimizer),
    ):
        pass
    model, optimizer = init("O1", num_losses=2)
    with pytest.raises(IndexError), amp.scale_loss(loss, optimizer, loss_id=2):
        pass
    other = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(RuntimeError, match=r"did not come from amp\.initialize"), amp.scale_loss(loss, other):
        pass


# --- loss scales --------------------------------------------------------------------------------------------


def run_passes(optimizer: Any, parameter: Tensor, factors: list[float], **options: Any) -> list[float]:
    """Run backward passes with the given gradients; return the loss scale after each."""
    scales = []
    for factor in factors:
        with amp.scale_loss((parameter * factor).sum(), optimizer, **options) as scaled:
            scaled.backward()
        scales.append(amp._amp_state.loss_scalers[0].loss_scale())
    return scales


def lone(**options: Any) -> tuple[nn.Linear, Any]:
    model = nn.Linear(1, 1, bias=False)
    return amp.initialize(
        model, torch.optim.SGD(model.parameters(), 1.0), opt_level="O0", verbosity=0, **options
    )


def test_the_scale_grows_after_2000_passes_and_not_above_its_ceiling() -> None:
    model, optimizer = lone(loss_scale="dynamic", max_loss_scale=2.0**17)
    scaler = amp._amp_state.loss_scalers[0]
    assert scaler.loss_scale() == 2.0**16
    for expected in (2.0**17, 2.0**17):
        scaler._unskipped = 1998
        assert run_passes(optimizer, model.weight, [1.0])[-1] == scaler._loss_scale
        assert run_passes(optimizer, model.weight, [1.0]) == [expected]
        assert scaler._unskipped == 0
    assert lone(loss_scale="dynamic", max_loss_scale=2.0**10)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**10


def test_the_floor_holds_and_without_one_the_scale_never_reaches_zero() -> None:
    inf = float("inf")
    model, optimizer = lone(loss_scale="dynamic", min_loss_scale=2.0**14)
    assert run_passes(optimizer, model.weight, [inf] * 30)[:4] == [2.0**15, 2.0**14, 2.0**14, 2.0**14]
    model, optimizer = lone(loss_scale="dynamic")
    with pytest.raises(LossScaleError, match="a smaller scale would not help"):
        run_passes(optimizer, model.weight, [inf] * 2000)
    assert amp._amp_state.loss_scalers[0].loss_scale() == torch.finfo(torch.float32).tiny


def test_a_static_scale_never_skips() -> None:
    model, optimizer = lone(loss_scale=128.0)
    run_passes(optimizer, model.weight, [float("inf")])
    optimizer.step()
    assert not bool(torch.isfinite(model.weight).all())
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 128.0, "unskipped": 1}


def test_a_skipped_step_is_skipped_once(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = lone(loss_scale="dynamic")
    amp._amp_state.verbosity = 1
    before = model.weight.detach().clone()
    for factor, moved in ((float("nan"), 0.0), (0.5, 0.5)):
        optimizer.zero_grad()
        run_passes(optimizer, model.weight, [factor])
        optimizer.step()
        assert float((before - model.weight.detach()).sum()) == pytest.approx(moved)
    assert (
        capsys.readouterr().out
        == "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0\n"
    )


def test_schedulers_do_not_complain_of_a_skipped_first_step() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    before = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    after = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    run_passes(optimizer, model.weight, [float("inf")])
    optimizer.step()
    before.step()
    after.step()


@pytest.mark.parametrize("container", [list, tuple])
def test_several_optimizers_count_each_gradient_once(container: Any) -> None:
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    shared = nn.Parameter(torch.ones(1))
    optimizers: Any = [torch.optim.SGD([m.weight, shared], 1.0) for m in models]
    models, optimizers = amp.initialize(models, optimizers, opt_level="O0", loss_scale="dynamic", verbosity=0)
    for _ in range(2):
        loss = sum((m.weight * 0.25).sum() for m in models) + (shared * 0.125).sum()
        with amp.scale_loss(loss, container(optimizers)) as scaled:
            scaled.backward()
    assert [float(m.weight.grad) for m in models] == [0.5, 0.5]
    assert float(shared.grad) == 0.25


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_an_interrupted_pass_keeps_earlier_gradients(level: str) -> None:
    model, optimizer = init(level, loss_scale="dynamic")
    parameter = next(iter(amp.master_params(optimizer)))
    for p in amp.master_params(optimizer):
        p.grad = torch.ones_like(p)
    with pytest.raises(KeyError), amp.scale_loss(model(torch.randn(4, 4)).sum(), optimizer):
        raise KeyError
    assert torch.equal(parameter.grad, torch.ones_like(parameter))


def test_o2_takes_what_torch_s_optimizers_take() -> None:
    """Each of these calls failed in Apex."""
    model, optimizer = init("O2")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    optimizer.zero_grad(set_to_none=False)
    head = nn.Linear(4, 2)
    optimizer.add_param_group({"params": head.parameters()})
    with amp.scale_loss(head(model(torch.randn(4, 4))).mean(), optimizer) as scaled:
        scaled.backward()
    before = head.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(head.weight, before)


# --- state dicts --------------------------------------------------------------------------------------------

# The amp.state_dict() of NVIDIA/apex at e13873de after 12 passes with num_losses=3, written by torch.save.
FROM_APEX = collections.OrderedDict([
    ("loss_scaler0", {"loss_scale": 65536.0, "unskipped": 12}),
    ("loss_scaler1", {"loss_scale": 32768.0, "unskipped": 7}),
    ("loss_scaler2", {"loss_scale": 8192.0, "unskipped": 0}),
])  # fmt: skip


def test_states_of_real_apex_load() -> None:
    init("O1", num_losses=3)
    amp.load_state_dict(FROM_APEX)
    assert amp.state_dict() == FROM_APEX
    assert list(amp.state_dict()) == list(FROM_APEX)
    written = collections.OrderedDict(epoch=3)
    assert amp.state_dict(written) is written


@pytest.mark.parametrize("here", [1, 2, 4])
def test_states_with_another_number_of_scales_load_as_far_as_they_go(
    here: int, capsys: pytest.CaptureFixture[str]
) -> None:
    init("O1", num_losses=here)
    amp.load_state_dict(FROM_APEX)
    printed = capsys.readouterr().out
    assert f"Warning: state_dict contains 3 entries, while {here} loss_scalers are used\n" in printed
    assert (f"Skipping loss_scaler[{here}], since num_losses was set to {here}\n" in printed) == (here < 3)
    loaded = list(amp.state_dict().values())
    assert loaded[:3] == list(FROM_APEX.values())[:here]
    assert loaded[3:] == [{"loss_scale": 65536.0, "unskipped": 0}] * max(0, here - 3)


def test_foreign_keys_are_refused() -> None:
    init("O1")
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "scale"\. '):
        amp.load_state_dict({"scale": 1.0})


def test_o2_states_of_a_model_hold_the_masters_values() -> None:
    """Apex rounded them to half, so resumed training lost precision."""
    model, optimizer = init("O2")
    with torch.no_grad():
        for master in amp.master_params(optimizer):
            master.copy_(torch.full_like(master, 1 / 3))
    optimizer._master_params_to_model_params()
    state = model.state_dict()
    assert {t.dtype for t in state.values()} == {torch.float32, torch.int64}
    assert torch.equal(state["0.weight"], torch.full((4, 4), 1 / 3))
    assert torch.equal(model[0].weight, torch.full((4, 4), 1 / 3).half())
    assert {t.dtype for t in model[0].state_dict().values()} == {torch.float32}


def test_extra_state_passes_through() -> None:
    class Counting(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"calls": 3}

        def set_extra_state(self, state: Any) -> None:
            assert state == {"calls": 3}

    model = Counting(2, 2)
    amp.initialize(model, opt_level="O2", verbosity=0)
    model.load_state_dict(model.state_dict())


# --- inputs and outputs -------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclasses.dataclass
class Record:
    value: Tensor
    name: str


class Batch:
    """A user's class with a ``to`` method."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def to(self, dtype: torch.dtype) -> Batch:
        return Batch(self.value.to(dtype))


class Echo(nn.Module):
    """A module that returns its arguments and records them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = [args, kwargs]
        return args[0] if len(args) == 1 else kwargs


@pytest.mark.parametrize(
    ("make", "tensors"),
    [
        (lambda t: t, lambda v: [v]),
        (lambda t: [t, {"a": t, "b": (t,)}], lambda v: [v[0], v[1]["a"], v[1]["b"][0]]),
        (lambda t: Pair(t, t), lambda v: [v.first, v.second]),
        (lambda t: Record(t, "x"), lambda v: [v.value]),
        (lambda t: Batch(t), lambda v: [v.value]),
        (lambda t: nn.utils.rnn.pack_sequence([t]), lambda v: [v.data]),
    ],
)
def test_inputs_and_outputs_of_any_kind_are_cast(make: Any, tensors: Any) -> None:
    model = Echo()
    amp.initialize(model, opt_level="O3", verbosity=0)
    value = make(torch.ones(2, 2))
    out = model(value)
    assert {t.dtype for t in tensors(model.seen[0][0])} == {torch.float16}
    assert {t.dtype for t in tensors(out)} == {torch.float32}
    assert type(out) is type(value)
    model(1, 2, name="x", mask=torch.ones(2, dtype=torch.bool), x=value)
    assert model.seen[0] == (1, 2)
    assert model.seen[1]["mask"].dtype is torch.bool
    assert {t.dtype for t in tensors(model.seen[1]["x"])} == {torch.float16}


@pytest.mark.parametrize("level", LEVELS)
def test_cast_model_outputs_decides_what_comes_out(level: str) -> None:
    model, _ = init(level, cast_model_outputs=torch.bfloat16)
    assert model(torch.randn(4, 4)).dtype is torch.bfloat16
    model, _ = init(level)
    outputs = {"O1": torch.float32}  # BatchNorm runs in the format of its input
    assert model(torch.randn(4, 4)).dtype is (
        torch.float16 if level == "O1" else outputs.get(level, torch.float32)
    )


@pytest.mark.parametrize("level", LEVELS)
def test_models_pickle(level: str) -> None:
    model, _ = init(level)
    data = pickle.dumps(model)
    assert b"castwise" not in data
    again = pickle.loads(data)
    assert {p.dtype for p in again.parameters()} == {torch.float32}
    if level != "O1":  # O1 also casts outside of models
        assert again(torch.randn(4, 4)).dtype is torch.float32


def test_replicas_of_data_parallel_run_their_own_weights() -> None:
    """In Apex's O2 all replicas used the weights of the first one."""
    model, _ = init("O2")
    model.eval()
    replica = model._replicate_for_data_parallel()
    replica._modules = dict(model._modules)
    replica._modules["0"] = nn.Linear(4, 4).half()
    x = torch.randn(4, 4)
    assert replica(x).dtype is torch.float32
    assert not torch.equal(replica(x), model(x))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_larc_can_be_initialised(level: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer: Any = parallel.LARC(torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.01))
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    before = [p.detach().clone() for p in amp.master_params(optimizer)]
    for factor, moves in ((float("inf"), False), (1.0, True)):
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.ones(1, 4)).mean() * factor, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        after = [p.detach() for p in amp.master_params(optimizer)]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) != moves
    assert torch.equal(model.weight.detach(), after[0].to(model.weight.dtype))
    assert optimizer.param_groups[0]["weight_decay"] == 0.01


@pytest.mark.parametrize(("level", "masters"), [("O2", 2), ("O3", 0)])
def test_the_stash_lists_parameters_by_what_they_are_stored_in(level: str, masters: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level=level, keep_batchnorm_fp32=True, verbosity=0)
    stash = optimizer._amp_stash
    assert [p is q for p, q in zip(stash.all_fp16_params, model[0].parameters(), strict=True)] == [True, True]
    assert [p.dtype for p in stash.all_fp32_from_fp16_params] == [torch.float32] * masters
    for listed in (stash.all_fp32_params, stash.all_fp32_from_fp32_params):
        assert [p is q for p, q in zip(listed, model[1].parameters(), strict=True)] == [True, True]
