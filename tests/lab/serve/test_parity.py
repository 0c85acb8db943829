"""``output_parity`` fails models that lose digits, passes sound ones, and refuses what it cannot judge in one sentence."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import castwise
from castwise.errors import DeviceError, PlanError, WorkloadError
from castwise.lab.serve import outputs
from castwise.lab.serve.comparison import OutputTest
from tests.here import DEVICE

WIDTH = 32


class Offset(nn.Module):
    """Adds and subtracts an offset, in fp32 or in the format of the data."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.wide = wide

    def forward(self, x: Tensor) -> Tensor:
        y = x.float() if self.wide else x
        return ((y + 1000.0) - 1000.0).to(x.dtype)


def model(wide: bool = True, out: int = 10) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(16, WIDTH), nn.GELU(), Offset(wide), nn.Linear(WIDTH, out))
    return nn.Sequential(*layers).eval()


def batches(seed: int = 0, size: int = 32) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(size, 16, generator=generator, device="cpu").to(DEVICE)


def check(module: nn.Module, plan: str = "bf16-mixed", **how: Any) -> castwise.OutputParity:
    return castwise.output_parity(module, plan, batches, **({"count": 8} | how))


@pytest.mark.parametrize("plan", ["bf16-mixed", "bf16-true", "fp16-mixed", "fp16-true"])
def test_a_sound_model_passes_and_a_planted_offset_fails(plan: str) -> None:
    sound = check(model(), plan)
    assert sound, sound.reason
    assert (sound.batches, sound.samples, sound.longest) == (8, 256, None)
    assert 0.5 < sound.value < 3.0
    failed = check(model(wide=False), plan)
    assert failed.verdict == "fail"
    assert failed.low > 40.0
    assert failed.outputs[0].name == "output"


def test_fp32_is_fp32() -> None:
    found = check(model(wide=False), "fp32")
    assert (found.verdict, found.value, found.outputs[0].error) == ("pass", 0.0, 0.0)


def test_a_region_in_fp32_cures_it() -> None:
    assert check(model(wide=False), "bf16-mixed+regions.2=fp32").verdict == "pass"


def test_a_model_that_arrives_in_bf16() -> None:
    found = check(model().bfloat16(), "bf16-mixed")
    assert found.verdict == "pass"
    assert 0.3 < found.value < 3.0


def test_blame_names_the_place() -> None:
    test = OutputTest(model(wide=False), lambda m, b: m(b), batches(), torch.device(DEVICE))
    test.reference(2)
    blamed = test.blame(castwise.Plan.preset("bf16-mixed"))
    assert blamed[0][0] == "2"
    assert blamed[0][1] > 0.9
    assert sum(share for _, share in blamed) == pytest.approx(1.0)
    assert test.blame(castwise.Plan.preset("fp32")) == []


def test_the_model_and_random_numbers_stay_as_they_were() -> None:
    module = model(wide=False).train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    with pytest.warns(UserWarning, match="training mode.*dropout draws and BatchNorm.*evaluation mode"):
        check(module)
    assert module.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or m._forward_pre_hooks for m in module.modules())


class Overflows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.layer(x)
        return {"logits": y, "power": (y * 300.0) * (y * 300.0)}


def test_overflow_is_named() -> None:
    assert check(Overflows().eval(), "bf16-mixed").verdict == "pass"
    found = check(Overflows().eval(), "fp16-mixed")
    assert found.verdict == "fail"
    assert "power has" in found.reason
    assert "values that are NaN, or infinite where fp32's are finite" in found.reason
    assert found.worst.by == "finite"
    assert {each.name: each.verdict for each in found.outputs} == {"logits": "pass", "power": "fail"}
    assert check(Overflows().eval(), "fp16-mixed", outputs="logits").verdict == "pass"


class Scores(nn.Module):
    """Scores around a large constant, which a low format does not tell apart."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.layer, self.wide = nn.Linear(16, 1), wide

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).squeeze(-1)
        return (y.float() if self.wide else y) + 400.0


def test_ranks_of_scores() -> None:
    good, bad = (check(Scores(wide).eval()).outputs[0] for wide in (True, False))
    assert good.kind == bad.kind == "scores"
    assert good.verdict == "pass"
    assert good.rank is not None
    assert good.rank > 0.999
    assert bad.verdict == "fail"
    assert bad.rank is not None
    assert bad.rank < 0.9


class Bins(nn.Module):
    """The bin of a number, near a large offset or not."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.layer, self.offset = nn.Linear(16, 4), offset

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) + self.offset).round().long()


def test_integers() -> None:
    sound, planted = (check(Bins(offset).eval()).outputs[0] for offset in (0.0, 1001.0))
    assert sound.kind == "integers"
    assert sound.verdict == "pass"
    assert planted.verdict == "fail"
    assert planted.changed is not None
    assert planted.changed > 0.3


def test_a_user_names_the_kind() -> None:
    assert check(model(), kind="values").outputs[0].kind == "values"
    assert check(model(), kind={"out*": "values"}).outputs[0].unexplained is None
    with pytest.raises(PlanError, match="'ranks' is none of logits, scores, values, integers"):
        check(model(), kind="ranks")


def test_inputs_that_the_format_cannot_hold_fail() -> None:
    module = model()
    first = module[0]
    assert isinstance(first, nn.Linear)
    with torch.no_grad():
        first.bias -= 2000.0 * first.weight.sum(1)
    found = castwise.output_parity(
        module, "bf16-mixed", [x + 2000.0 for x, _ in zip(batches(), range(8), strict=False)]
    )
    assert found.verdict == "fail"
    assert found.outputs[0].coarse
    assert "too coarse for the model or its inputs" in found.reason


def test_metrics() -> None:
    data = next(batches(7, 512))

    def evaluate(module: nn.Module) -> dict[str, float]:
        logits = module(data)
        return {"first": float((logits.argmax(1) == 0).float().mean()), "mean": float(logits.mean())}

    good = check(model(), evaluate=evaluate)
    assert good.verdict == "pass"
    assert [metric.explained for metric in good.metrics] == [True, True]
    assert all(metric.noise > 0.0 for metric in good.metrics[1:])
    bad = check(model(wide=False), evaluate=evaluate, line=1e9)
    metrics = {metric.name: metric for metric in bad.metrics}
    assert metrics["first"].fp32 == good.metrics[0].fp32
    worse = check(model(wide=False), evaluate=evaluate, outputs="output", kind="values", count=2, line=4.0)
    assert not all(metric.explained for metric in worse.metrics)


def test_a_metric_alone_fails() -> None:
    """The metric shows what no output does."""
    found = check(model(), evaluate=lambda m: {"lost": 11.0 if low(m) else 1.0})
    assert found.verdict == "fail"
    assert found.reason == "lost is 11, and 1 in fp32, which rounding changes by 0"


def low(module: nn.Module) -> bool:
    """Return whether a model stores weights low."""
    return any(p.dtype is not torch.float32 for p in module.parameters())


class Sequences(nn.Module):
    """Positions are counted in the format of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.table, self.head = (
            nn.Embedding(20, WIDTH),
            nn.Embedding(512, WIDTH),
            nn.Linear(WIDTH, 20),
        )
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.layer(self.tokens(tokens))
        at = torch.ones(x.shape[:2], dtype=x.dtype, device=x.device).cumsum(1, dtype=x.dtype)
        return self.head(x + self.table(at.long() - 1))


@pytest.mark.parametrize(("length", "verdict"), [(128, "pass"), (512, "fail")])
def test_only_long_sequences_show_it(length: int, verdict: str) -> None:
    torch.manual_seed(0)
    module = Sequences().eval()
    given = [torch.randint(20, (2, length)) for _ in range(4)]
    found = castwise.output_parity(module, "bf16-mixed", given)
    assert (found.verdict, found.batches) == (verdict, 4)


def test_the_record_and_the_table() -> None:
    found = check(model(wide=False))
    record = json.loads(found.to_json())
    assert record["kind"] == "output-parity"
    assert record["plan"] == "bf16-mixed"
    assert record["outputs"][0]["verdict"] == "fail"
    console = Console(file=io.StringIO(), width=100)
    console.print(found.table())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "bf16-mixed fails: " in text
    assert "unexplained" in text
    assert "8 batches, 256 samples." in text


# --- what cannot be judged ----------------------------------------------------------------------------------


class Random(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(16, 4), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.layer(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda y: y + torch.rand_like(y),
            "output is random: it differs when the same batch runs again in fp32",
        ),
        (lambda y: y.argmax(1) + torch.randint(9, (len(y),)), "output is random"),
        (
            lambda y: y[: int(torch.randint(1, 30, ()))],
            "output has another shape when the same batch runs again",
        ),
        (lambda _: "text", "what the model returns has no tensors; return the model's outputs"),
        (lambda y: y * float("nan"), "output is NaN in fp32; its data is finite"),
    ],
)
def test_what_cannot_be_judged(make: Callable[[Tensor], Any], message: str) -> None:
    module = Random(make).eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(WorkloadError, match=message) as caught:
        check(module)
    assert str(caught.value).startswith("output_parity: ")
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


class Counts(nn.Module):
    """Changes one of its buffers, or its input, at each call."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer, self.what = nn.Linear(16, 4), what
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) + self.calls
        (self.calls if self.what == "buffer" else x).add_(1)
        return y


@pytest.mark.parametrize(
    ("what", "said"), [("buffer", "its buffer calls"), ("input", "tensor 0 of its batch")]
)
def test_what_a_call_changes_is_not_called_random(what: str, said: str) -> None:
    with pytest.raises(
        WorkloadError, match=f"output differs when .* in fp32, since a call of the model changes {said}; give"
    ):
        check(Counts(what).eval())


def test_wrong_arguments() -> None:
    with pytest.raises(WorkloadError, match="has output, none of them scores"):
        check(model(), outputs="scores")
    with pytest.raises(PlanError, match=r"output_parity\(line=0\): needs a number above 0"):
        check(model(), line=0)
    with pytest.raises(PlanError, match=r"output_parity\(count=1\): needs a whole number >= 2"):
        check(model(), count=1)
    with pytest.raises(WorkloadError, match=r"model is str; give the torch\.nn\.Module itself"):
        castwise.output_parity("model", "bf16-mixed", batches)  # type: ignore[arg-type]
    with pytest.raises(DeviceError):
        check(model(), device="mtia")


def test_a_prepared_model_is_no_reference() -> None:
    module = castwise.Amp("bf16-mixed", device=DEVICE).prepare(model(), inference=True)
    with pytest.raises(WorkloadError, match="the model is prepared under a plan"):
        check(module)


def test_batches_that_end_early() -> None:
    given = [next(batches(seed)) for seed in range(3)]
    assert castwise.output_parity(model(), "bf16-mixed", given).batches == 3
    with pytest.raises(WorkloadError, match="batches has 3 different batches; needs at least 8"):
        castwise.output_parity(model(), "bf16-mixed", given, count=8)
    with pytest.raises(WorkloadError, match="batches has 1 different batch; needs at least 2"):
        castwise.output_parity(model(), "bf16-mixed", given[:1])
    test = OutputTest(model(), lambda m, b: m(b), iter(given), torch.device(DEVICE), call_name="tune")
    with pytest.raises(WorkloadError, match="tune: the batches ended after 3 of 8"):
        test.reference(8)


def test_outputs_that_are_not_the_same_for_each_batch() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.layer(x)
            return {"logits": y} | ({"more": y + 1} if float(x[0, 0]) > 0 else {})

    with pytest.raises(WorkloadError, match=r"the outputs of one batch are logits.*, and of another logits"):
        check(Sometimes().eval())


def test_a_model_that_fails_under_the_plan_only() -> None:
    class Wants(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            if y.dtype is not torch.float32:
                raise TypeError("only fp32")
            return y

    with pytest.raises(WorkloadError, match="runs in fp32, but fails under bf16-mixed: TypeError: only fp32"):
        check(Wants().eval())


def test_no_warning_for_a_model_in_evaluation_mode() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(model())


# --- nothing passes that could not have failed -----------------------------------------------------------------


class Answers(nn.Module):
    """Returns ``answer(h, low)`` of the outputs ``h`` of a small network, where ``low`` says that it ran in a low format."""

    def __init__(self, answer: Callable[[Tensor, bool], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.answer = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)), answer

    def forward(self, x: Tensor) -> Any:
        h = self.layers(x)
        return self.answer(h.float(), h.dtype is not torch.float32)


def audio(h: Tensor) -> Tensor:
    return (h.tanh() * 32767).to(torch.int16)


def half(h: Tensor, value: float) -> Tensor:
    """Return ``h`` with every other column replaced."""
    return torch.where(torch.arange(16, device=h.device) % 2 == 0, h, torch.full_like(h, value))


SOUND: dict[str, Callable[[Tensor, bool], Any]] = {
    "a spectrum": lambda h, low: torch.fft.rfft(h),
    "audio": lambda h, low: audio(h),
    "a mask as fp16 writes it": lambda h, low: half(h, -65504.0 if low else -torch.inf),
    "an output that is always empty": lambda h, low: {"a": h, "b": h[:0]},
    "an output of masks alone": lambda h, low: {"a": h, "b": torch.full_like(h, -torch.inf)},
    "a sparse output": lambda h, low: h.to_sparse(),
    "an output with two names": lambda h, low: {"a": h, "b": h, "c": h.float()},
    "a sum that is always 1": lambda h, low: {"a": h, "b": h.softmax(-1).sum(-1)},
    "a mask of -1e9": lambda h, low: half(h, -1e9),
    "a mask of -1e4": lambda h, low: half(h, -1e4),
    "a constant in the format": lambda h, low: (
        h,
        torch.full((64,), 0.37).to(torch.bfloat16 if low else torch.float32),
    ),
    "rare positives": lambda h, low: h > 0.5,
    "boxes, of which rounding may change the number": lambda h, low: h[h[:, 0] > 0.0],
    "ids in a list": lambda h, low: {"a": h, "ids": h.argmax(-1).tolist()},
    "an array": lambda h, low: h.detach().cpu().numpy(),
}
WRONG: dict[str, Callable[[Tensor, bool], Any]] = {
    "a spectrum of zeros": lambda h, low: torch.fft.rfft(h * (not low)),
    "a complex output of NaN": lambda h, low: torch.complex(h, half(h, torch.nan) if low else h),
    "silence": lambda h, low: audio(h * (not low)),
    "noise": lambda h, low: audio(h + 5.0 * torch.randn_like(h) * low),
    "rare positives that are lost": lambda h, low: (h > 0.5) & (not low),
    "a one-hot of another class": lambda h, low: nn.functional.one_hot((h.argmax(-1) + low) % 1000, 1000),
    "a dimension more": lambda h, low: h[:, None] if low else h,
    "a flat mask": lambda h, low: (h > 0).reshape(-1) if low else h > 0,
    "a mask of -1e9 that is lost": lambda h, low: half(h, 0.0 if low else -1e9),
    "another constant": lambda h, low: (h, torch.full((64,), 0.40 if low else 0.37)),
    "other ids in a list": lambda h, low: {"a": h, "ids": [0] * 32 if low else h.argmax(-1).tolist()},
    "another shape than that of zeros": lambda h, low: torch.zeros(8, 7 if low else 5),
    "an output that is gone": lambda h, low: {"a": h} if low else {"a": h, "b": torch.zeros(8, 2, 2)},
    "an output more": lambda h, low: {"a": h, "b": h + 1.0} if low else {"a": h},
    "another shape of an output with infinities": lambda h, low: half(h, torch.inf)[: 5 if low else 8],
    "NaN for infinity": lambda h, low: half(h, torch.nan if low else torch.inf),
    "a mask that is lost": lambda h, low: half(h, 1000.0 if low else -torch.inf),
    "another sign": lambda h, low: half(h, torch.inf if low else -torch.inf),
    "zero for 1e30": lambda h, low: half(h, 0.0 if low else 1e30),
    "another array": lambda h, low: {"a": h, "b": h.detach().cpu().numpy() * (2.0 if low else 1.0)},
}


@pytest.mark.cpu  # the simulated device has neither complex nor sparse tensors
@pytest.mark.parametrize("kind", [None, "values"])
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_fails_whatever_it_is(name: str, kind: str | None) -> None:
    found = castwise.output_parity(Answers(WRONG[name]).eval(), "bf16-mixed", batches, count=8, kind=kind)
    assert found.verdict == "fail", found.reason


@pytest.mark.cpu
@pytest.mark.parametrize("plan", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", SOUND)
def test_what_is_right_does_not_fail(name: str, plan: str) -> None:
    found = check(Answers(SOUND[name]).eval(), plan)
    assert found.verdict == "pass" or (found.verdict == "undecided" and "boxes" in name), found.reason


def test_a_large_output_is_sampled_and_its_shape_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "MOST_ELEMENTS", 100)
    assert check(Answers(lambda h, low: h).eval()).verdict == "pass"
    assert check(Answers(lambda h, low: torch.zeros(1000 + low, 1)).eval()).verdict == "fail"


def test_integers_that_rounding_alone_changes_by_much_are_undecided() -> None:
    parity = Answers(lambda h, low: h[:, :4] * 0 > 1 if low else (h[:, :4] * 1e5).long() % 2 == 0)
    found = check(parity.eval())
    assert found.verdict == "undecided"
    assert found.needed is None
    assert "nothing can be said about them; compare the numbers from which they are made" in found.reason


def test_a_whole_output_that_is_lost_fails_under_any_line() -> None:
    lost = Answers(lambda h, low: h * (not low) + 1e-30)
    assert check(lost.eval(), kind="values", line=500.0).verdict == "fail"


@pytest.mark.parametrize("answer", [lambda h, low: h[:0], lambda h, low: torch.full_like(h, torch.inf)])
def test_nothing_to_compare_is_refused(answer: Callable[[Tensor, bool], Any]) -> None:
    with pytest.raises(
        WorkloadError, match=r"output: empty or infinite in all 8 batches.*nothing to compare"
    ):
        check(Answers(answer).eval())


def test_what_cannot_be_read_is_named() -> None:
    found = check(Answers(lambda h, low: {"t": h, "d": torch.distributions.Normal(h, 1.0)}).eval())
    assert found.note == "Not compared: d (Normal)."


@pytest.mark.parametrize("draw", [torch.inf, torch.nan])
def test_a_metric_that_rounding_makes_infinite_excuses_nothing(draw: float) -> None:
    first: list[Tensor] = []

    def evaluate(module: nn.Module) -> dict[str, float]:
        weight = next(module.parameters())
        if weight.dtype is torch.bfloat16:
            return {"psnr": 12.0}
        first.append(weight.detach().clone())
        return {"psnr": 80.0 if torch.equal(weight, first[0]) else draw}

    found = check(model(), evaluate=evaluate)
    assert (found.verdict, found.metrics[0].unknown) == ("undecided", True)
    assert "nothing can be said about it" in found.reason


def test_a_metric_that_rounding_moves_over_its_whole_range_is_undecided() -> None:
    def evaluate(module: nn.Module) -> dict[str, float]:
        weight = next(module.parameters())
        broken = weight.dtype is torch.bfloat16
        return {"accuracy": 0.0 if broken else 0.5 + 0.5 * float(torch.sin(1e6 * weight.double().sum()))}

    assert check(model(), evaluate=evaluate).verdict == "undecided"


@pytest.mark.parametrize("value", [0.995, np.array([0.995]), np.float64(0.995), torch.tensor([0.995])])
def test_half_a_per_cent_of_a_metric_passes(value: Any) -> None:
    def evaluate(module: nn.Module) -> dict[str, Any]:
        return {"accuracy": 1.0 if next(module.parameters()).dtype is torch.float32 else value}

    assert check(model(), evaluate=evaluate).verdict == "pass"


def test_a_metric_that_is_missing_under_the_plan_fails_and_so_does_one_more() -> None:
    def evaluate(module: nn.Module) -> dict[str, float]:
        return {"a" if next(module.parameters()).dtype is torch.float32 else "b": 1.0}

    found = check(model(), evaluate=evaluate)
    assert found.verdict == "fail"
    assert [(metric.name, metric.explained) for metric in found.metrics] == [("a", False), ("b", False)]


@pytest.mark.parametrize("value", [None, 0.5, [0.5], {}, {"a": "x"}, {"a": torch.ones(3)}])
def test_metrics_that_are_no_numbers_are_refused(value: Any) -> None:
    with pytest.raises(
        WorkloadError, match=r"output_parity: evaluate returned .*; return a mapping from the names"
    ):
        check(model(), evaluate=lambda _: value)


@pytest.mark.parametrize("plan", ["fp32", "bf16-mixed", "bf16-true"])
def test_a_model_and_batches_in_bf16_are_compared_with_fp32(plan: str) -> None:
    low = [next(batches(seed)).bfloat16() for seed in range(8)]
    assert castwise.output_parity(model().bfloat16(), plan, low).verdict == "pass"


@pytest.mark.cpu
def test_a_scripted_part_is_compared() -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit, from torch 2.14
        part = torch.jit.script(nn.Linear(16, 8))
    assert check(nn.Sequential(part, nn.Linear(8, 4)).eval(), "bf16-true").verdict == "pass"
