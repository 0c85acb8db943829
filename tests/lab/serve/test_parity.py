"""``output_parity`` fails models that lose digits, passes sound ones, and refuses what it cannot judge in one sentence."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import castwise
from castwise.errors import DeviceError, PlanError, WorkloadError
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
    assert "infinite or NaN values where fp32's are finite" in found.reason
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
