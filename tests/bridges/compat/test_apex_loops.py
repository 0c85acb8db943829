"""Scripts written after Apex's public documentation, compared with loops written by hand."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from castwise.bridges.compat.apex import amp
from tests.bridges.compat.reference import (
    FROM_FP64,
    SAME_ARITHMETIC,
    Run,
    Scale,
    close,
    train_in,
    train_with_masters,
)

CPU_HALF = [torch.float16, torch.bfloat16]


def convnet() -> nn.Module:
    """Return a small model with convolutions, BatchNorm, a residual block, pooling and a classifier."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            return functional.relu(x + self.norm(self.conv(x)))

    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 5),
    )  # fmt: skip


def images(steps: int) -> list[tuple[Tensor, Tensor, float]]:
    """Return batches with a factor on each loss; two factors overflow fp16's gradients at any loss scale."""
    draw = torch.Generator().manual_seed(1)
    factors = {1: 1e6, 4: 1e7}
    return [
        (torch.randn(8, 3, 8, 8, generator=draw), torch.randint(5, (8,), generator=draw), factors.get(i, 1.0))
        for i in range(steps)
    ]


def classify(run: Any, batch: tuple[Tensor, Tensor, float]) -> Tensor:
    inputs, targets, factor = batch
    return functional.cross_entropy(run(inputs), targets) * factor


def imagenet(level: str, batches: list[Any], capsys: Any = None, **options: Any) -> tuple[Run, nn.Module]:
    """Train in the loop of Apex's ImageNet example."""
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
    criterion = nn.CrossEntropyLoss()
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=1, **options)
    scales, skips = [], []
    for inputs, targets, factor in batches:
        output = model(inputs)
        loss = criterion(output, targets) * factor
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        scales.append(amp.state_dict()["loss_scaler0"]["loss_scale"])
        skips.append(optimizer._amp_stash.already_patched)
        optimizer.step()
        scheduler.step()
    weights = [p.detach().clone() for p in amp.master_params(optimizer)]
    return Run(weights, scales, skips), model


@pytest.mark.parametrize("low", CPU_HALF)
def test_imagenet_o2_does_what_a_loop_by_hand_does(
    low: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
    batches = images(8)
    got, model = imagenet("O2", batches, cast_model_type=low)
    want = train_with_masters(convnet(), low, batches, classify, 0.1, 0.9)
    assert (got.scales, got.skips) == (want.scales, want.skips)
    assert got.skips == [low is torch.float16 and i in (1, 4) for i in range(8)]
    close(got.weights, want.weights, SAME_ARITHMETIC)
    assert {p.dtype for p in model.parameters()} == {low, torch.float32}
    assert model[1].weight.dtype is model[1].running_mean.dtype is torch.float32
    printed = capsys.readouterr().out.splitlines()
    assert printed.count(
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0"
    ) == any(got.skips)
    assert printed.count(
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 16384.0"
    ) == any(got.skips)


@pytest.mark.parametrize("low", CPU_HALF)
def test_imagenet_o1_stays_near_fp64(low: torch.dtype) -> None:
    batches = images(8)
    got, model = imagenet("O1", batches, patch_torch_functions_type=low)
    assert got.skips == [low is torch.float16 and i in (1, 4) for i in range(8)]
    scale = Scale()
    for skip in got.skips:
        scale.move(skip)
    assert got.scales == scale.history
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    if low is torch.bfloat16:
        batches = [(x, y, 1.0) for x, y, _ in batches]
        got, _ = imagenet("O1", batches, patch_torch_functions_type=low)
    want = train_in(
        torch.float64,
        convnet(),
        batches,
        classify,
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        got.skips,
    )
    close(got.weights, want, 10 * FROM_FP64[low])  # eight steps with momentum amplify the rounding


def test_o0_is_fp32_training_bit_for_bit() -> None:
    batches = images(3)
    got, _ = imagenet("O0", batches)
    want = train_in(
        torch.float32,
        convnet(),
        batches,
        classify,
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        [False] * 3,
    )
    assert all(torch.equal(a, b) for a, b in zip(got.weights, want, strict=True))
    assert got.scales == [1.0] * 3


def test_o3_stores_everything_low_and_scales_nothing() -> None:
    got, model = imagenet("O3", [(x, y, 1.0) for x, y, _ in images(4)])
    assert got.scales == [1.0] * 4
    assert {t.dtype for t in (*model.parameters(), *model.buffers())} == {torch.float16, torch.int64}
    assert {p.dtype for p in got.weights} == {torch.float16}


# --- several models, losses and optimizers ------------------------------------------------------------------


def gan_parts() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    maker = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6), nn.Tanh())
    return critic, maker


def gan(level: str | None, steps: int, spoil: dict[int, int]) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Train in the loop of Apex's DCGAN example; with ``level=None``, in fp64 without amp.

    ``spoil`` maps a step to the index of the loss, out of three, that gets an infinite gradient.
    """
    critic, maker = gan_parts()
    if level is None:
        critic.double(), maker.double()
    one = next(critic.parameters()).dtype
    update_d = torch.optim.Adam(critic.parameters(), 2e-3, betas=(0.5, 0.999))
    update_g = torch.optim.Adam(maker.parameters(), 2e-3, betas=(0.5, 0.999))
    if level is not None:
        [critic, maker], [update_d, update_g] = amp.initialize(
            [critic, maker], [update_d, update_g], opt_level=level, num_losses=3, verbosity=0
        )
    criterion = nn.BCEWithLogitsLoss()
    draw = torch.Generator().manual_seed(2)
    states: list[dict[str, Any]] = []

    def backward(loss: Tensor, optimizer: Any, which: int, step: int) -> None:
        if level is None:
            loss.backward()
            return
        if spoil.get(step) == which:
            loss = loss * float("inf")
        with amp.scale_loss(loss, optimizer, loss_id=which) as scaled:
            scaled.backward()

    for step in range(steps):
        real = torch.randn(8, 6, generator=draw).to(one)
        noise = torch.randn(8, 3, generator=draw).to(one)
        spoiled = spoil.get(step)
        critic.zero_grad()
        backward(criterion(critic(real), torch.ones(8, 1, dtype=one)), update_d, 0, step)
        fake = maker(noise)
        backward(criterion(critic(fake.detach()), torch.zeros(8, 1, dtype=one)), update_d, 1, step)
        if level is not None or spoiled not in (0, 1):
            update_d.step()
        maker.zero_grad()
        backward(criterion(critic(fake), torch.ones(8, 1, dtype=one)), update_g, 2, step)
        if level is not None or spoiled != 2:
            update_g.step()
        states.append(amp.state_dict() if level is not None else {})
    weights = [p.detach().clone() for update in (update_d, update_g) for p in amp.master_params(update)]
    return weights, states


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_dcgan_skips_what_overflowed_and_no_more(level: str) -> None:
    spoil = {2: 1, 4: 2}
    want, _ = gan(None, 7, spoil)
    got, states = gan(level, 7, spoil)
    scales = [[entry["loss_scale"] for entry in state.values()] for state in states]
    assert scales[1] == [2.0**16] * 3
    assert scales[2] == scales[3] == [2.0**16, 2.0**15, 2.0**16]
    assert scales[4] == scales[6] == [2.0**16, 2.0**15, 2.0**15]
    assert [entry["unskipped"] for entry in states[6].values()] == [7, 4, 2]
    close(got, want, 10 * FROM_FP64[torch.float16])  # Adam amplifies errors of small gradients


# --- accumulation -------------------------------------------------------------------------------------------


def accumulate(level: str, delay: bool, batches: list[Any], every: int) -> list[Tensor]:
    model = convnet().eval()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for i, (inputs, targets, _) in enumerate(batches):
        loss = functional.cross_entropy(model(inputs), targets) / every
        last = (i + 1) % every == 0
        with amp.scale_loss(loss, optimizer, delay_unscale=delay and not last) as scaled_loss:
            scaled_loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    expected = 0 if level == "O0" else len(batches) // every if delay else len(batches)
    assert amp.state_dict()["loss_scaler0"]["unskipped"] == expected  # passes with delay_unscale do not count
    return [p.detach().clone() for p in amp.master_params(optimizer)]


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("delay", [False, True])
def test_accumulated_gradients_are_those_of_one_large_batch(level: str, delay: bool) -> None:
    batches = images(6)
    got = accumulate(level, delay, batches, 3)
    model = convnet().eval().double()
    update = torch.optim.SGD(model.parameters(), 0.05)
    for part in (batches[:3], batches[3:]):
        update.zero_grad()
        inputs, targets = torch.cat([x for x, _, _ in part]), torch.cat([y for _, y, _ in part])
        functional.cross_entropy(model(inputs.double()), targets).backward()
        update.step()
    close(got, list(model.parameters()), FROM_FP64[torch.float32 if level == "O0" else torch.float16])


def test_an_overflow_in_one_micro_batch_skips_the_step() -> None:
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    for factor in (float("inf"), 1.0):
        with amp.scale_loss(model(torch.ones(1, 2)).sum() * factor, optimizer) as scaled:
            scaled.backward()
    optimizer.step()
    assert torch.equal(model.weight, before)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**15, "unskipped": 1}


# --- checkpoint and resume ----------------------------------------------------------------------------------


def trainer(level: str) -> tuple[nn.Module, Any]:
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0)


def steps(model: nn.Module, optimizer: Any, batches: list[Any]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        with amp.scale_loss(classify(model, batch), optimizer) as scaled:
            scaled.backward()
        optimizer.step()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_resumed_training_is_the_same_bit_for_bit(level: str) -> None:
    batches = [(x, y, f if level != "O3" else 1.0) for x, y, f in images(8)]
    model, optimizer = trainer(level)
    steps(model, optimizer, batches[:5])
    file = io.BytesIO()
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
    assert torch.float16 not in {t.dtype for t in checkpoint["model"].values()}
    torch.save(checkpoint, file)
    steps(model, optimizer, batches[5:])
    want, scales = [p.detach().clone() for p in amp.master_params(optimizer)], amp.state_dict()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model, optimizer = trainer(level)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    amp.load_state_dict(saved["amp"])
    steps(model, optimizer, batches[5:])
    assert amp.state_dict() == scales
    for mine, theirs in zip(amp.master_params(optimizer), want, strict=True):
        assert torch.equal(mine, theirs)
    if level == "O2":
        assert {s["momentum_buffer"].dtype for s in optimizer.state.values()} == {torch.float32}


def test_o2_weights_loaded_after_initialize_reach_the_masters() -> None:
    model, optimizer = trainer("O2")
    other = convnet()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.37)
    model.load_state_dict(other.state_dict())
    for master, p in zip(amp.master_params(optimizer), other.parameters(), strict=True):
        assert torch.equal(master, p)


# --- a language model ---------------------------------------------------------------------------------------


class LanguageModel(nn.Module):
    """The model of PyTorch's word_language_model example: embedding, two recurrent layers without dropout, decoder."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.encoder = nn.Embedding(11, 8)
        self.rnn = kind(8, 8, 2)
        self.decoder = nn.Linear(8, 11)

    def forward(self, tokens: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        out, hidden = self.rnn(self.encoder(tokens), hidden)
        return self.decoder(out), hidden


def repackage(hidden: Any) -> Any:
    return hidden.detach() if isinstance(hidden, Tensor) else tuple(h.detach() for h in hidden)


def language(kind: type[nn.RNNBase], level: str | None, max_norm: float = 0.25) -> list[Tensor]:
    torch.manual_seed(0)
    model: nn.Module = LanguageModel(kind)
    if level is None:
        model.double()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    if level is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    draw = torch.Generator().manual_seed(3)
    text = torch.randint(11, (25, 4), generator=draw)
    dtype = torch.float64 if level is None else torch.float32
    zeros = torch.zeros(2, 4, 8, dtype=dtype)
    hidden: Any = (zeros, zeros) if kind is nn.LSTM else zeros
    for start in range(0, 20, 5):
        optimizer.zero_grad()
        hidden = repackage(hidden)
        out, hidden = model(text[start : start + 5], hidden)
        loss = functional.cross_entropy(out.flatten(0, 1), text[start + 1 : start + 6].flatten())
        if level is None:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        else:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)
        optimizer.step()
    return [p.detach().clone() for p in amp.master_params(optimizer)]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_language_model_with_clipping_stays_near_fp64(kind: type[nn.RNNBase], level: str) -> None:
    close(language(kind, level), language(kind, None), 5 * FROM_FP64[torch.float16])


def test_clipping_by_the_model_s_own_parameters_clips_what_is_applied() -> None:
    """In Apex's O2 this clipped the fp16 copies of gradients and had no effect."""
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    (master,) = amp.master_params(optimizer)
    before = master.detach().clone()
    with amp.scale_loss(model(torch.ones(2, 4)).mean(), optimizer) as scaled:
        scaled.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.125)
    optimizer.step()
    assert float((master.detach() - before).norm()) == pytest.approx(0.125, rel=1e-3)


# --- the user's own functions -------------------------------------------------------------------------------


class Routing:
    """A namespace with functions to register."""

    @staticmethod
    def product(a: Tensor, b: Tensor) -> tuple[torch.dtype, torch.dtype, Tensor]:
        return a.dtype, b.dtype, a * b


class Kinds:
    def method(self, x: Tensor) -> torch.dtype:
        return x.dtype

    @classmethod
    def of_class(cls, x: Tensor) -> torch.dtype:
        return x.dtype

    @staticmethod
    def static(x: Tensor) -> torch.dtype:
        return x.dtype


class Inherits(Kinds):
    pass


@pytest.mark.parametrize("owner", [Kinds, Inherits])
@pytest.mark.parametrize("name", ["method", "of_class", "static"])
def test_methods_of_every_kind_can_be_registered_where_they_are_and_where_they_are_inherited(
    owner: type[Kinds], name: str
) -> None:
    before = dict(vars(owner))
    amp.register_half_function(owner, name)
    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    assert getattr(owner(), name)(torch.ones(2)) is torch.float16
    if name != "method":
        assert getattr(owner, name)(torch.ones(2)) is torch.float16
    amp._amp_state.handle._deactivate()
    assert getattr(owner(), name)(torch.ones(2)) is torch.float32
    assert dict(vars(owner)) == before


def test_registered_functions_are_cast_until_the_handle_is_deactivated() -> None:
    plain = Routing.product
    a, b = torch.ones(2), torch.ones(2).half()
    for register, dtypes in (
        (amp.register_half_function, {torch.float16}),
        (amp.register_float_function, {torch.float32}),
        (amp.register_promote_function, {torch.float32}),
    ):
        from castwise.bridges.compat.apex.amp import functions

        functions._registered.clear()
        register(Routing, "product")
        assert Routing.product is plain
        amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
        assert set(Routing.product(a, b)[:2]) == dtypes
        with amp.disable_casts():
            assert Routing.product(a, b)[:2] == (torch.float32, torch.float16)
        amp._amp_state.handle._deactivate()
        assert Routing.product is plain
        functions._registered.clear()
    with pytest.raises(ValueError, match=r"No function named missing in module <class .*Routing'>\."):
        amp.register_half_function(Routing, "missing")


def test_decorators_cast_arguments_and_leave_the_casts_on_inside() -> None:
    @amp.half_function
    def attention(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        scores = q @ k.T
        return scores, functional.softmax(scores, -1)

    @amp.float_function
    def energy(x: list[Tensor]) -> tuple[torch.dtype, torch.dtype]:
        return x[0].dtype, (x[0] @ x[0].T).dtype

    x = torch.randn(4, 4)
    assert [t.dtype for t in attention(x, x)] == [torch.float32] * 2
    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    assert [t.dtype for t in attention(x, x)] == [torch.float16, torch.float32]
    assert energy([x.half()]) == (torch.float32, torch.float16)


def test_o1_covers_the_loss_and_ends_with_the_handle() -> None:
    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    handle, x = amp._amp_state.handle, torch.randn(4, 4)
    assert handle.is_active()
    assert (x @ x).dtype is torch.float16
    with amp.disable_casts():
        assert not handle.is_active()
    with pytest.raises(KeyError), amp.disable_casts():
        raise KeyError
    assert handle.is_active()  # after an exception Apex left casts disabled
    handle._deactivate()
    assert (x @ x).dtype is torch.float32
    assert amp._amp_state.handle is None


def test_copies_of_models_train_on_their_own() -> None:
    """An average of weights is a deep copy; in Apex the copy kept the original's forward."""
    model, optimizer = trainer("O2")
    average = copy.deepcopy(model)
    steps(model, optimizer, images(1))
    x = images(1)[0][0]
    model.eval(), average.eval()
    assert not torch.equal(model(x), average(x))
    assert average(x).dtype is torch.float32


def critic(level: str | None) -> list[Tensor]:
    """Train in the loop of WGAN-GP: a penalty on gradients that are computed outside of ``scale_loss``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Softplus(), nn.Linear(32, 1))
    dtype = torch.float64 if level is None else torch.float32
    model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    if level is not None:
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    draw = torch.Generator().manual_seed(1)
    for _ in range(5):
        real, fake = (torch.randn(16, 6, generator=draw).to(dtype) for _ in range(2))
        mixed = ((real + fake) / 2).requires_grad_()
        out = model(mixed)
        (slope,) = torch.autograd.grad(out, mixed, torch.ones_like(out), create_graph=True)
        loss = model(fake).mean() - model(real).mean() + 10 * ((slope.norm(2, dim=1) - 1) ** 2).mean()
        optimizer.zero_grad()
        if level is None:
            loss.backward()
        else:
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        optimizer.step()
    return [p.detach() for p in amp.master_params(optimizer)]


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_gradient_penalty_stays_near_fp64(level: str) -> None:
    close(critic(level), critic(None), 5 * FROM_FP64[torch.float32 if level == "O0" else torch.float16])


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_compiled_model_trains_as_in_eager_mode(level: str) -> None:
    def losses(compiled: bool) -> list[float]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        found = []
        for step in range(3):
            x = torch.full((4, 8), step / 4)
            loss = functional.mse_loss(run(x), torch.ones(4, 4))
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            found.append(float(loss.detach()))
        return found

    want = losses(False)
    torch._dynamo.reset()
    assert losses(True) == want
