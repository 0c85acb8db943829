"""Plans as values: every way to write a plan, and every error in one."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from castwise.core.plans.plan import PRESETS, LossScale, Plan, Region, as_plan
from castwise.core.plans.rules import BASES, RULES
from castwise.core.plans.text import matches_path
from castwise.errors import CastwiseError, PlanError, UnknownNameError
from tests.fresh import run_python
from tests.soak import examples

# --- random plans -------------------------------------------------------------------------------------------

numbers = st.floats(min_value=1e-30, max_value=1e30, allow_nan=False)


@st.composite
def loss_scales(draw: st.DrawFn) -> LossScale:
    init = draw(numbers)
    return LossScale(
        init=init,
        growth=draw(st.floats(min_value=1.0, max_value=1e30, exclude_min=True)),
        backoff=draw(st.floats(min_value=1e-30, max_value=1.0, exclude_max=True)),
        interval=draw(st.integers(1, 10**12)),
        hysteresis=draw(st.integers(1, 10**12)),
        floor=draw(st.none() | st.just(init) | st.just(init / 3)),
        ceiling=draw(st.none() | st.just(init) | st.just(init * 3)),
        dynamic=draw(st.booleans()),
    )


patterns = st.one_of(
    st.sampled_from([
        "encoder.layers.*.norm",
        "type:BatchNorm*",
        "layers.[0-3]",
        "head",
        "*",
        "type:type:x",
        "a-b",
    ]),
    st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1).filter(
        lambda text: text.removeprefix("type:") != ""
    ),
)
region_formats = st.sampled_from(["fp64", "fp32", "bf16", "fp16"])
regions = st.one_of(
    st.builds(Region, patterns, compute=region_formats, params=st.none() | region_formats),
    st.builds(Region, patterns, params=region_formats),
)
names = st.from_regex(r"([A-Za-z_][A-Za-z0-9_]*::)?[A-Za-z_][A-Za-z0-9_]*[A-Za-z0-9]", fullmatch=True)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def allowed(name: str) -> st.SearchStrategy[str]:
    (field,) = (f for f in dataclasses.fields(Plan) if f.name == name)
    return st.sampled_from(field.metadata["allowed"])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Draw any allowed plan; where two fields contradict each other, one is corrected."""
    fields: dict[str, Any] = {
        "compute": draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        "params": draw(allowed("params")),
        "regions": tuple(draw(st.lists(regions, max_size=3))),
        "ops": draw(
            st.dictionaries(
                names.filter(lambda op: op != "aten::"),
                # "unfused" exists for one operator only.
                st.sampled_from([rule for rule in RULES if rule != "unfused"]),
                max_size=3,
            )
        ),
        "loss_scale": draw(st.none() | loss_scales()),
        "provenance": draw(st.none() | st.dictionaries(st.text(), json_values, max_size=3)),
    }
    fields["ops"] = {op.removeprefix("aten::"): rule for op, rule in fields["ops"].items()}
    chosen = (
        "master",
        "rules",
        "fp32_matmul",
        "fp32_conv",
        "memory_format",
        "optimizer",
        "compile",
        "host_memory",
        "output",
    )
    for name in chosen:
        fields[name] = draw(allowed(name))
    low = {fields["compute"], *(region.compute for region in fields["regions"])} & {"bf16", "fp16"}
    stored = {region.params for region in fields["regions"]} | (
        {fields["compute"]} if fields["params"] == "compute" else set()
    )
    if not stored & {"bf16", "fp16"}:
        fields["master"] = "fp32"
    if not low:
        fields["ops"] = {}
    if (
        fields["rules"] == "none"
        and not fields["ops"]
        and not fields["regions"]
        and fields["params"] == "fp32"
    ):
        fields["rules"] = "cuda"
    return Plan(**fields)


@settings(max_examples=examples(40, 300), deadline=None)
@given(plans())
def test_the_line_reads_back(plan: Plan) -> None:
    line = str(plan)
    assert Plan.parse(line) == plan
    assert Plan.parse(f"  {line}\n") == plan
    assert as_plan(line) == plan
    assert re.fullmatch(r"[^\s,]+", line), "lines with a blank or a comma could not be put in a list"


@settings(max_examples=examples(40, 300), deadline=None)
@given(plans())
def test_json_round_trip(plan: Plan) -> None:
    back = Plan.from_json(plan.to_json())
    assert back == plan
    assert back.provenance == plan.provenance
    assert back.to_json() == plan.to_json()
    assert (hash(back), back.digest) == (hash(plan), plan.digest)


@settings(max_examples=examples(20, 100), deadline=None)
@given(plans(), plans())
def test_digests_are_equal_exactly_where_plans_are(a: Plan, b: Plan) -> None:
    assert (a.digest == b.digest) == (a == b)
    assert (str(a) == str(b)) == (a == b)
    assert dataclasses.replace(a, provenance={"note": 1}).digest == a.digest


@settings(max_examples=examples(20, 100), deadline=None)
@given(plans())
def test_copies_are_equal(plan: Plan) -> None:
    plan.digest  # noqa: B018 - cached: it must not spoil what follows
    for same in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan), dataclasses.replace(plan)):
        assert same == plan
        assert same.provenance == plan.provenance
        assert same.digest == plan.digest


@settings(max_examples=examples(20, 100), deadline=None)
@given(plans())
def test_summary_is_one_sentence_and_names_the_formats(plan: Plan) -> None:
    summary = plan.summary()
    assert plan.compute in summary
    assert "\n" not in summary
    assert summary.count("  ") == 0


# --- every field off its default ----------------------------------------------------------------------------

EVERY_FIELD = Plan(
    compute="fp16",
    params="compute",
    master="none",
    regions=(Region("type:BatchNorm*", params="fp32"), Region("encoder.layers.*.norm", "fp64", "bf16")),
    rules="cuda",
    ops=(("exp", "fp32"), ("layer_norm", "as_is"), ("mylib::op", "lower")),
    fp32_matmul="tf32",
    fp32_conv="bf16",
    memory_format="channels_last",
    optimizer="fused",
    compile="max-autotune-no-cudagraphs",
    host_memory="keep",
    output="as_is",
    loss_scale=LossScale(1024.0, 3.0, 0.25, 7, 2, 0.5, 2.0**20, False),
    provenance={"host": "abc", "speedup": [1.5, {"low": 1.4}], "tuned": True, "note": None},
)


def test_every_field_is_off_its_default() -> None:
    for value in (EVERY_FIELD, EVERY_FIELD.loss_scale, EVERY_FIELD.regions[1]):
        assert value is not None
        for field in dataclasses.fields(value):
            assert getattr(value, field.name) != field.default, field.name


def test_round_trips_with_every_field_off_its_default(tmp_path: Path) -> None:
    EVERY_FIELD.save(tmp_path / "plan.json")
    for back in (
        Plan.parse(str(EVERY_FIELD)),
        Plan.from_json(EVERY_FIELD.to_json()),
        Plan.load(tmp_path / "plan.json"),
        as_plan(str(tmp_path / "plan.json")),
        as_plan(tmp_path / "plan.json"),
    ):
        assert back == EVERY_FIELD
    assert Plan.load(tmp_path / "plan.json").provenance == EVERY_FIELD.provenance


def test_the_line_of_every_field() -> None:
    assert str(EVERY_FIELD) == (
        "fp16-true+regions.type:BatchNorm*=params:fp32+regions.encoder.layers.*.norm=compute:fp64/params:bf16"
        "+rules=cuda+ops.exp=fp32+ops.layer_norm=as_is+ops.mylib::op=lower+fp32_matmul=tf32+fp32_conv=bf16"
        "+memory_format=channels_last+optimizer=fused+compile=max-autotune-no-cudagraphs+host_memory=keep+output=as_is"
        "+loss_scale.init=1024+loss_scale.growth=3"
        "+loss_scale.backoff=0.25+loss_scale.interval=7+loss_scale.hysteresis=2+loss_scale.floor=0.5"
        "+loss_scale.ceiling=1048576+loss_scale.dynamic=false"
    )


def test_modes_of_compiling_are_torchs_own() -> None:
    from torch._inductor import list_mode_options

    for mode in list_mode_options().keys() - {"lite"}:  # "lite" optimizes only what is requested explicitly
        assert Plan.parse(f"bf16-mixed+compile={mode}").compile == mode
    with pytest.raises(
        PlanError, match=r"compile='fast' is not allowed.*as_given, default, reduce-overhead, max"
    ):
        Plan(compile="fast")


@pytest.mark.parametrize(("field", "value"), [("compile", "default"), ("host_memory", "keep")])
def test_a_plan_from_before_there_was_a_field_is_the_plan_that_it_was(field: str, value: str) -> None:
    old = {name: value for name, value in json.loads(Plan().to_json()).items() if name != field}
    assert Plan.from_json(json.dumps(old)) == Plan()
    assert Plan.from_json(json.dumps({**old, field: value})).digest != Plan().digest


def test_json_holds_exactly_the_fields() -> None:
    fields = [field.name for field in dataclasses.fields(Plan)]
    assert list(json.loads(EVERY_FIELD.to_json())) == ["version", *fields]


def test_digest_is_the_same_in_every_process(tmp_path: Path) -> None:
    several = [EVERY_FIELD, *PRESETS.values()]
    program = f"""
from castwise.core.plans.plan import Plan
print(hash("plan"))
for text in {[plan.to_json() for plan in several]!r}:
    print(Plan.from_json(text).digest)
"""
    hashed, *digests = run_python(program, tmp_path).split()
    assert int(hashed) != hash("plan")
    assert digests == [plan.digest for plan in several]


def test_digest_of_today_is_the_digest_of_tomorrow() -> None:
    """Recorded evidence names plans by digest. If this fails, old records no longer match their plans."""
    assert PRESETS["bf16-mixed"].digest == "7d9a870907a1caf2394ba5d1cde637b420e9866fee25d6c492d6127b1eefb2cc"


# --- presets ------------------------------------------------------------------------------------------------

MEANINGS = {
    # name: compute, stores low, keeps masters, autocasts, rules, scales the loss, regions
    "fp32": ("fp32", False, False, False, "native", False, 0),
    "tf32": ("fp32", False, False, False, "native", False, 0),
    "bf16-mixed": ("bf16", False, False, True, "native", False, 0),
    "fp16-mixed": ("fp16", False, False, True, "native", True, 0),
    "bf16-master": ("bf16", True, True, True, "native", False, 1),
    "fp16-master": ("fp16", True, True, True, "native", True, 1),
    "bf16-true": ("bf16", True, False, False, "none", False, 0),
    "fp16-true": ("fp16", True, False, False, "none", False, 0),
    "O0": ("fp32", False, False, False, "native", False, 0),
    "O1": ("fp16", False, False, True, "apex", True, 0),
    "O2": ("fp16", True, True, False, "none", True, 1),
    "O3": ("fp16", True, False, False, "none", False, 0),
    "naive": ("fp16", True, True, False, "none", True, 0),
}


def test_presets_mean_what_their_names_say() -> None:
    assert list(PRESETS) == list(MEANINGS)
    for name, meaning in MEANINGS.items():
        plan = Plan.preset(name)
        scales = plan.loss_scale is not None
        found = (plan.compute, plan.stores_low, plan.keeps_masters, plan.autocasts, plan.rules, scales)
        assert (*found, len(plan.regions)) == meaning, name
        assert (
            plan.compute_dtype
            == {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[meaning[0]]
        )
        assert plan.formats == {meaning[0]}
        assert (plan.output, plan.ops, plan.provenance) == ("fp32", (), None)


def test_presets_in_detail() -> None:
    assert (PRESETS["tf32"].fp32_matmul, PRESETS["tf32"].fp32_conv) == ("tf32", "tf32")
    assert (
        PRESETS["O2"].regions == PRESETS["bf16-master"].regions == (Region("type:_BatchNorm", params="fp32"),)
    )
    assert PRESETS["fp16-mixed"].loss_scale == PRESETS["fp16-master"].loss_scale == LossScale()
    assert PRESETS["O1"].loss_scale == PRESETS["O2"].loss_scale == LossScale(ceiling=2.0**24)
    assert PRESETS["naive"].loss_scale == LossScale(init=2.0**16, interval=1000, hysteresis=2)


@pytest.mark.parametrize("name", MEANINGS)
def test_a_plan_equal_to_a_preset_prints_as_its_name(name: str) -> None:
    plan = dataclasses.replace(PRESETS[name], provenance={"measured": "elsewhere"})
    assert str(plan) == {"O0": "fp32", "O3": "fp16-true"}.get(name, name)
    assert Plan.parse(name) == PRESETS[name]


def test_loss_scale_defaults_are_those_of_torch_but_for_the_floor() -> None:
    scaler = torch.amp.GradScaler("cpu")
    scale = LossScale()
    assert scale.init == scaler.get_scale()
    assert scale.growth == scaler.get_growth_factor()
    assert scale.backoff == scaler.get_backoff_factor()
    assert scale.interval == scaler.get_growth_interval()
    assert (scale.hysteresis, scale.ceiling, scale.dynamic) == (1, None, True)
    assert scale.floor == torch.finfo(torch.float16).smallest_normal


# --- one plan, several spellings ----------------------------------------------------------------------------


def test_lists_mappings_and_dtypes_are_brought_into_one_form() -> None:
    plan = Plan(
        compute="bf16",
        regions=(Region("a", "fp32"), Region("b", params="fp32")),
        ops=(("exp", "fp32"), ("sum", "lower")),
        loss_scale=LossScale(init=8.0),
    )
    spelled: Any = {
        "compute": torch.bfloat16,
        "regions": [{"pattern": "a", "compute": torch.float32}, Region("b", params="float32")],
        "ops": [["sum", "lower"], ["aten::exp", "fp32"], ("exp", "fp32")],
        "loss_scale": {"init": 8},
    }
    assert Plan(**spelled) == plan
    spelled |= {"regions": {"a": "fp32", "b": {"params": "fp32"}}, "ops": {"sum": "lower", "exp": "fp32"}}
    same = Plan(**spelled)
    assert (same, str(same), same.digest, hash(same)) == (plan, str(plan), plan.digest, hash(plan))
    assert type(same.regions) is type(same.ops) is tuple


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("bf16", Plan()),
        ("fp16+output=as_is", Plan(compute="fp16", loss_scale=LossScale(), output="as_is")),
        ("bf16-mixed+ops.exp=fp32", Plan(ops=(("exp", "fp32"),))),
        ("bf16-mixed+regions.head=fp32", Plan(regions=(Region("head", "fp32"),))),
        ("bf16-mixed+regions.head=compute:fp32", Plan(regions=(Region("head", "fp32"),))),
        ("bf16-mixed+regions.a%2Cb%20c%2B%3D=fp32", Plan(regions=(Region("a,b c+=", "fp32"),))),
        ("bf16-mixed+loss_scale=default", Plan(loss_scale=LossScale())),
        ("bf16-mixed+loss_scale.floor=none", Plan(loss_scale=LossScale(floor=None))),
        ("fp16-mixed+loss_scale=none", Plan(compute="fp16")),
        ("fp16-mixed+output=as_is+loss_scale=none", Plan(compute="fp16", output="as_is")),
        ("fp16-mixed+loss_scale.init=1e20", Plan(compute="fp16", loss_scale=LossScale(init=1e20))),
        ("fp32+compute=bf16", Plan()),
        ("fp32+compute=float16", Plan(compute="fp16")),
    ],
)
def test_lines_written_by_hand(text: str, plan: Plan) -> None:
    assert Plan.parse(text) == plan


def test_provenance_is_readable_frozen_and_no_part_of_the_decision() -> None:
    given: dict[str, Any] = {"device": {"name": "EPYC"}, "times_s": [1.0, 2.0]}
    plan = Plan(provenance=given)
    given["device"]["name"] = "changed"
    assert plan.provenance is not None
    assert plan.provenance["device"]["name"] == "EPYC"
    assert plan.provenance["times_s"] == (1.0, 2.0)
    assert repr(plan.provenance) == "{'device': {'name': 'EPYC'}, 'times_s': [1.0, 2.0]}"
    assert isinstance(hash(plan.provenance), int)
    with pytest.raises(TypeError):
        plan.provenance["device"] = 1  # type: ignore[index]
    assert (plan, plan.digest, hash(plan)) == (Plan(), Plan().digest, hash(Plan()))


def test_frozen() -> None:
    for value, field in ((Plan(), "compute"), (LossScale(), "init"), (Region("a", "fp32"), "pattern")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field, "fp16")
    with pytest.raises(TypeError):
        PRESETS["fp32"] = Plan()  # type: ignore[index]


def test_region_says_what_it_matches() -> None:
    by_type, by_path = Region("type:BatchNorm*", params="fp32"), Region("encoder.*", "fp32")
    assert (by_type.is_type, by_type.glob) == (True, "BatchNorm*")
    assert (by_path.is_type, by_path.glob) == (False, "encoder.*")


def test_what_regions_add_to_a_plan() -> None:
    plan = Plan(compute="fp32", regions=(Region("a", "bf16", "bf16"), Region("b", "fp64")))
    assert plan.formats == {"fp32", "bf16", "fp64"}
    assert (plan.stores_low, plan.keeps_masters, plan.autocasts) == (False, True, False)
    assert not dataclasses.replace(plan, master="none").keeps_masters


def test_ops_without_a_base_table_autocast() -> None:
    assert Plan(rules="none", ops=(("mm", "lower"),)).autocasts


def test_summaries() -> None:
    assert PRESETS["fp32"].summary() == "computes in fp32 and stores parameters in fp32"
    assert PRESETS["fp16-master"].summary() == (
        "autocasts to fp16 by torch.autocast's rules, stores parameters in fp16 with fp32 masters, has other "
        "formats for 1 region and scales the loss from 65536"
    )


# --- getting it wrong ---------------------------------------------------------------------------------------


def sentence(error: pytest.ExceptionInfo[PlanError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert text.endswith(".")
    assert isinstance(error.value, CastwiseError)
    assert isinstance(error.value, ValueError)
    return text


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"compute": "bf61"}, "Plan: compute='bf61' is not allowed (did you mean 'bf16'"),
        ({"compute": "fp64"}, "Plan: compute='fp64' is not allowed"),
        ({"compute": "tf32"}, "Allowed: fp32, bf16, fp16."),
        ({"compute": torch.float8_e4m3fn}, "Plan: compute='fp8_e4m3' is not allowed"),
        ({"compute": torch.int8}, "Plan: compute=torch.int8 is not allowed"),
        ({"compute": None}, "Plan: compute=None is not allowed"),
        ({"compute": []}, "Plan: compute=[] is not allowed"),
        ({"params": "bf16"}, "Plan: params='bf16' is not allowed. Allowed: fp32, compute."),
        ({"master": None}, "Plan: master=None is not allowed (did you mean 'none'?). Allowed: fp32, none."),
        ({"rules": "nativ"}, "Plan: rules='nativ' is not allowed (did you mean 'native'?)"),
        ({"fp32_matmul": "fp32"}, "Allowed: as_is, ieee, tf32, bf16."),
        ({"fp32_conv": 1}, "Plan: fp32_conv=1 is not allowed"),
        ({"memory_format": torch.channels_last}, "Allowed: as_is, channels_last."),
        ({"optimizer": "fusd"}, "did you mean 'fused'"),
        ({"output": "bf16"}, "Allowed: fp32, as_is."),
        ({"regions": "a"}, "Plan: regions='a' is not allowed. Allowed: a sequence of Region"),
        ({"regions": [("a", "fp32")]}, "Plan: a region ('a', 'fp32') is not a mapping"),
        ({"regions": [{"compute": "fp32"}]}, "Plan: a region {'compute': 'fp32'} has no pattern"),
        (
            {"regions": [{"pattern": "a", "comptue": "fp32"}]},
            "has no field 'comptue' (did you mean 'compute'?)",
        ),
        ({"regions": {"a": "fp31"}}, "Region('a'): compute='fp31' is not allowed"),
        ({"ops": "exp"}, "Plan: ops='exp' is not allowed"),
        (
            {"ops": ["exp"]},
            "Plan: ops has 'exp', which is not allowed. Allowed: pairs such as ('exp', 'fp32').",
        ),
        ({"ops": [("exp", 1)]}, "Plan: ops has ('exp', 1)"),
        ({"ops": [("exp", "fp32"), ("aten::exp", "lower")]}, "gives 'exp' two rules, 'fp32' and 'lower'"),
        ({"ops": {"exp": "fp31"}}, "ops=('exp', 'fp31'): no such rule 'fp31'"),
        ({"ops": {"exp_": "fp32"}}, "Set the rule for 'exp' and call that instead"),
        ({"ops": {"torch.exp": "fp32"}}, "'torch.exp' is not an operator name"),
        ({"loss_scale": 128.0}, "Plan: loss_scale 128.0 is not a mapping"),
        ({"loss_scale": {"initial": 1}}, "Plan: loss_scale has no field 'initial' (did you mean 'init'"),
        ({"provenance": "me"}, "Plan: provenance='me' is not allowed"),
        ({"provenance": {"t": float("nan")}}, "Plan: provenance.t=nan cannot be written as JSON"),
        ({"provenance": {"t": [1, {2}]}}, "Plan: provenance.t[1]={2} cannot be written as JSON"),
        ({"provenance": {"a": {1: 2}}}, "Plan: provenance.a has the key 1, which cannot be a key in JSON"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_the_choice(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as error:
        Plan(**fields)
    text = sentence(error)
    assert said in text
    assert re.search(r"Allowed|Add it|Keep one", text), "the next step"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"master": "none"},
            "no parameter is stored low, so there is no fp32 copy to leave out. Use master='fp32'",
        ),
        ({"master": "none", "params": "compute", "compute": "fp32"}, "no parameter is stored low"),
        (
            {"compute": "fp32", "ops": {"exp": "fp32"}},
            "a plan that computes only in fp32 casts no operators",
        ),
        ({"rules": "none"}, "nothing would run in bf16. Use rules native, cuda or apex"),
    ],
)
def test_contradictions_are_refused_with_the_way_out(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as error:
        Plan(**fields)
    assert said in sentence(error)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"init": 0}, "LossScale(init=0) is not allowed. Allowed: a finite number > 0."),
        ({"init": float("inf")}, "LossScale(init=inf)"),
        ({"init": 10**400}, "is not allowed. Allowed: a finite number > 0."),
        ({"init": "1"}, "LossScale(init='1')"),
        ({"init": True}, "LossScale(init=True)"),
        ({"init": None}, "LossScale(init=None)"),
        ({"growth": 1}, "Allowed: a finite number > 1."),
        ({"backoff": 1.0}, "Allowed: a number > 0 and < 1."),
        ({"interval": 0}, "Allowed: a whole number of steps >= 1 and < 2**63."),
        ({"interval": 2**63}, "LossScale(interval=9223372036854775808)"),
        ({"interval": 2.5}, "LossScale(interval=2.5)"),
        ({"hysteresis": True}, "LossScale(hysteresis=True)"),
        (
            {"init": 2.0, "floor": 4.0},
            "LossScale(floor=4.0) is not allowed. Allowed: None, or a number > 0 and at most",
        ),
        ({"floor": float("nan")}, "LossScale(floor=nan)"),
        ({"ceiling": 1}, "Allowed: None, or a finite number of at least init=65536.0."),
        ({"dynamic": 1}, "LossScale(dynamic=1) is not allowed. Allowed: True, False."),
    ],
)
def test_a_wrong_loss_scale(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as error:
        LossScale(**fields)
    assert said in sentence(error)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"pattern": ""}, "Region(''): the pattern is empty"),
        ({"pattern": "type:"}, "Region('type:'): the pattern is empty"),
        ({"pattern": 3, "compute": "fp32"}, "Region(3): the pattern is not text"),
        (
            {"pattern": "a"},
            "Region('a'): neither compute nor params is given. Give at least one of them as one of",
        ),
        ({"pattern": "a", "compute": "tf32"}, "Region('a'): compute='tf32' is not allowed"),
        ({"pattern": "a", "params": "compute"}, "Region('a'): params='compute' is not allowed"),
    ],
)
def test_a_wrong_region(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as error:
        Region(**fields)
    assert said in sentence(error)


def test_unknown_preset() -> None:
    with pytest.raises(UnknownNameError) as error:
        Plan.preset("bf16-mixd")
    text = sentence(error)
    assert text.startswith("Plan.preset('bf16-mixd'): no such preset (did you mean 'bf16-mixed'")
    assert all(name in text for name in PRESETS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bf61", "no such preset"),
        ("", "no such preset"),
        ("bf16-mixed+", "'' is not of the form field=value"),
        ("bf16-mixed+output", "'output' is not of the form field=value"),
        ("bf16-mixed+output=", "'output=' is not of the form field=value"),
        ("bf16-mixed+outptu=as_is", "no field 'outptu' (did you mean 'output'"),
        ("bf16-mixed+provenance=x", "no field 'provenance'"),
        ("bf16-mixed+output.x=as_is", "no field 'output.x'"),
        ("bf16-mixed+output=fp31", "output='fp31' is not allowed"),
        ("bf16-mixed+ops=exp", "'ops=exp' is not allowed. Allowed: ops.OPERATOR=VALUE"),
        ("bf16-mixed+regions.a=x:fp32", "has no field 'x'"),
        ("bf16-mixed+regions.a=fp31", "Region('a'): compute='fp31' is not allowed"),
        ("bf16-mixed+loss_scale=128", "'loss_scale=128' is not allowed"),
        ("bf16-mixed+loss_scale.init=lots", "LossScale(init='lots') is not allowed"),
        ("bf16-mixed+loss_scale.inti=1", "has no field 'inti' (did you mean 'init'"),
    ],
)
def test_a_malformed_line(text: str, said: str) -> None:
    with pytest.raises(PlanError) as error:
        Plan.parse(text)
    assert said in sentence(error)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"compute": "bf16",\n "params" "fp32"}', "not JSON at line 2, column 11: Expecting ':' delimiter"),
        ("", "not JSON at line 1, column 1"),
        ("[]", "a plan [] is not a mapping. Allowed: one with the keys compute, params"),
        ('{"comptue": "bf16"}', "a plan has no field 'comptue' (did you mean 'compute' or 'compile'?)"),
        ('{"compute": 16}', "Plan: compute=16 is not allowed"),
        ('{"loss_scale": {"interval": "often"}}', "LossScale(interval='often') is not allowed"),
        ('{"provenance": {"loss": NaN}}', "Plan: provenance.loss=nan cannot be written as JSON"),
    ],
)
def test_a_malformed_file_is_named_with_the_place_and_the_way_out(
    tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    for read in (Plan.load, as_plan):
        with pytest.raises(PlanError) as error:
            read(path)
        assert sentence(error).startswith(f"Plan.load({str(path)!r}): {said}")
    with pytest.raises(PlanError) as error:
        Plan.from_json(text)
    assert sentence(error).startswith(f"Plan.from_json: {said}")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as error:
        Plan.load(tmp_path / "none.json")
    assert "cannot read it: No such file or directory. Give the path" in sentence(error)
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match=r"cannot read it: it is not UTF-8 text"):
        Plan.load(tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"Is a directory"):
        Plan.load(tmp_path)


# --- as_plan ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("bf16", "bf16-mixed"),
        ("fp16", "fp16-mixed"),
        ("fp32", "fp32"),
        ("tf32", "tf32"),
        ("float16", "fp16-mixed"),
        ("O2", "O2"),
        (torch.bfloat16, "bf16-mixed"),
        (torch.float16, "fp16-mixed"),
        (torch.float32, "fp32"),
        (PRESETS["naive"], "naive"),
    ],
)
def test_as_plan(value: Any, name: str) -> None:
    assert as_plan(value) is PRESETS[name] or as_plan(value) == PRESETS[name]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("bf16-mixd", "no such preset"),
        ("no_such.json", "Plan.load('no_such.json'): cannot read it"),
        ("dir/plan", "Plan.load('dir/plan'): cannot read it"),
        (torch.float64, "as_plan(torch.float64): no plan computes in this format. Allowed: torch.float32"),
        (torch.int8, "as_plan(torch.int8): no plan computes in this format"),
        (None, "as_plan(None): NoneType is not a plan"),
        (16, "as_plan(16): int is not a plan"),
    ],
)
def test_as_plan_refuses_what_names_no_plan(value: Any, said: str) -> None:
    with pytest.raises(PlanError) as error:
        as_plan(value)
    assert said in sentence(error)


def test_a_preset_name_wins_over_a_file_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Plan(output="as_is").save("fp32")
    Plan(output="as_is").save("my-plan")
    assert as_plan("fp32") == PRESETS["fp32"]
    assert as_plan("my-plan") == Plan(output="as_is")


def test_bases_in_the_plan_are_those_of_the_rules() -> None:
    (field,) = (f for f in dataclasses.fields(Plan) if f.name == "rules")
    assert field.metadata["allowed"] == BASES


@pytest.mark.parametrize("value", ["bf16/fp32", "params:fp32/params:bf16", "fp32/compute:fp32"])
def test_a_region_on_the_line_says_each_format_once(value: str) -> None:
    with pytest.raises(PlanError, match="sets one thing twice"):
        Plan.parse(f"bf16-mixed+regions.head={value}")


# --- what an adversary writes -------------------------------------------------------------------------------

DEEP = "[" * 100_000 + "]" * 100_000
LONG = "9" * 5_000


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (DEEP, "JSON nested more than 50 levels deep"),
        ('{"regions": ' * 60 + "1" + "}" * 60, "nested more than"),
        ('{"provenance": ' + DEEP + "}", "nested more than"),
        ('{"provenance": {"a": ' + "[" * 49 + "]" * 49 + "}}", "nested more than"),
        ('{"loss_scale": {"interval": ' + LONG + "}}", "a number with too many digits"),
        ('{"loss_scale": {"interval": 1' + "0" * 4_000 + "}}", "a whole number of steps >= 1 and < 2**63"),
        ('{"loss_scale": {"init": 1e999999}}', "LossScale(init=inf) is not allowed"),
        ('{"provenance": {"n": 1' + "0" * 4_000 + "}}", "of up to 1,000 digits"),
        ('{"compute": "bf16", "compute": "fp16"}', "it gives the key 'compute' twice"),
        ('{"regions": [{"pattern": "a", "pattern": "b", "compute": "fp32"}]}', "the key 'pattern' twice"),
        ('{"compute": "\\x"}', "not JSON at line 1"),
        ('{"compute": "bf\x0016"}', "not JSON at line 1"),
        ('{"compute": "bf\\u000016"}', r"compute='bf\x0016' is not allowed"),
        ('{"compute": "\\ud800"}', r"compute='\ud800' is not allowed"),
        ('{"compute": "' + "x" * 1_000_000 + '"}', "Plan: compute='xxx"),
        ('{"' + "x" * 1_000_000 + '": 1}', "a plan has no field 'xxx"),
        ('{"regions": ' + json.dumps(["a"] * 100_000) + "}", "a region 'a' is not a mapping"),
        ('{"regions": {"a": {"compute": {"b": [[[[[[1]]]]]]}}}}', "Region('a'): compute={'b': [[[[...]]]]}"),
        ("null", "a plan None is not a mapping"),
        ("\ufeff{}", "not JSON at line 1"),
    ],
    ids=range(20),
)
def test_json_of_an_adversary_is_refused_in_one_short_sentence(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    for read in (lambda: Plan.from_json(text), lambda: Plan.load(tmp_path / "plan.json")):
        with pytest.raises(PlanError) as error:
            read()
        assert said in sentence(error)
        assert len(str(error.value)) < 1_500


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "bf16-mixed+regions.%zz=fp32",
            "'regions.%zz=fp32' has a percent sign that does not begin an escaped UTF-8 character",
        ),
        ("bf16-mixed+regions.a%=fp32", "has a percent sign"),
        ("bf16-mixed+regions.%ff=fp32", "has a percent sign"),
        ("bf16-mixed\0", "no such preset"),
        ("x" * 10_000_000, "no such preset"),
        ("bf16-mixed+" + "x" * 10_000_000, "is not of the form field=value"),
        ("bf16-mixed+" + "x" * 10_000_000 + "=1", "no field 'xxx"),
        ("bf16-mixed" + "+" * 1_000_000, "'' is not of the form field=value"),
        ("bf16-mixed" + "+regions.a=fp32" * 20_000 + "+x=1", "no field 'x'"),
        (f"fp16-mixed+loss_scale.interval={LONG}", "LossScale(interval=inf) is not allowed"),
        (f"fp16-mixed+loss_scale.init={LONG}", "LossScale(init=inf) is not allowed"),
        (f"fp16-mixed+loss_scale.interval={LONG[:4000]}", "LossScale(interval=a number of 13,288 bits)"),
        (f"fp16-mixed+output={'x' * 100_000}", "Plan: output='xxx"),
    ],
    ids=range(13),
)
def test_a_line_of_an_adversary_is_refused_in_one_short_sentence(text: str, said: str) -> None:
    with pytest.raises(PlanError) as error:
        Plan.parse(text)
    assert said in sentence(error)
    assert len(str(error.value)) < 1_500


@pytest.mark.timeout(20)
def test_values_of_an_adversary_are_refused_in_one_short_sentence() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    number = 10**5_000
    for fields in (
        {"provenance": {"a": deep}},
        {"provenance": {"a": number}},
        {"provenance": deep},
        {"regions": deep},
        {"regions": number},
        {"ops": deep},
        {"ops": number},
        {"compute": deep},
        {"output": number},
        {"loss_scale": deep},
        {"loss_scale": {"interval": number}},
        {"loss_scale": {"init": deep}},
    ):
        with pytest.raises(PlanError) as error:
            Plan(**fields)
        assert len(sentence(error)) < 1_500
    level: Any = {"a": 1}
    for _ in range(48):
        level = {"a": level}
    assert Plan.from_json(Plan(provenance=level).to_json()).provenance == Plan(provenance=level).provenance
    with pytest.raises(PlanError, match="provenance is nested more than 49 levels deep"):
        Plan(provenance={"a": level})
    for call in (as_plan, Plan.preset, Plan.parse, Plan.from_json):
        with pytest.raises(PlanError) as error:
            call(number)
        assert len(sentence(error)) < 1_500


@pytest.mark.timeout(20)
def test_a_path_or_a_file_of_an_adversary(tmp_path: Path) -> None:
    for path, why in (("a\0.json", "null byte"), ("\ud800.json", "surrogates not allowed")):
        for read in (Plan.load, as_plan):
            with pytest.raises(PlanError, match=why) as error:
                read(path)
            sentence(error)
    huge = tmp_path / "plan.json"
    with huge.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(PlanError, match="it has more than 16,777,216 bytes"):
        Plan.load(huge)


# --- globs ---------------------------------------------------------------------------------------------------


def by_regex(glob: str, path: str) -> bool:
    wild = {"**": r".*", "*": r"[^.]*", "?": r"[^.]"}
    pieces = re.split(r"(\*\*+|\*|\?)", glob)
    regex = "".join(wild.get(piece[:2] if "**" in piece else piece) or re.escape(piece) for piece in pieces)
    return re.fullmatch(regex, path, re.DOTALL) is not None


def test_short_globs_mean_what_their_regular_expressions_mean() -> None:
    """Checks all globs of up to four characters on all short paths."""
    globs = ["".join(letters) for size in range(5) for letters in itertools.product("a.?*", repeat=size)]
    paths = ["".join(letters) for size in range(5) for letters in itertools.product("ab.", repeat=size)]
    wrong = [(g, p) for g in globs for p in paths if matches_path(g, p) != by_regex(g, p)]
    assert wrong == []


@settings(max_examples=examples(150, 5_000), deadline=None)
@given(st.text("ab.?*", max_size=12), st.text("ab.?*", max_size=12))
def test_globs_mean_what_their_regular_expressions_mean(glob: str, path: str) -> None:
    assert matches_path(glob, path) == by_regex(glob, path)


@pytest.mark.parametrize(
    ("glob", "path", "matches"),
    [
        ("encoder.layers.*.norm", "encoder.layers.0.norm", True),
        ("encoder.layers.*.norm", "encoder.layers.0.x.norm", False),
        ("**.norm", "encoder.layers.0.norm", True),
        ("**norm", "norm", True),
        ("layers.?", "layers.1", True),
        ("layers.?", "layers.12", False),
        ("layers.[0-3]", "layers.1", False),
        ("*", "a.b", False),
        ("**", "", True),
        ("", "", True),
        ("", "a", False),
        ("****", "a.b", True),
        ("a.***.b", "a.x.y.b", True),
        ("a*a", "a", False),
        ("layers.0", "layers.0", True),
        ("a?b", "a.b", False),
    ],
)
def test_what_a_glob_matches(glob: str, path: str, matches: bool) -> None:
    assert matches_path(glob, path) is matches


@pytest.mark.timeout(20)
@pytest.mark.parametrize("glob", ["**a" * 200 + "z", "*a" * 200 + "z", "**?" * 200 + "z", "**a*.**?" * 100])
def test_globs_take_no_exponential_time(glob: str) -> None:
    assert not matches_path(glob, "a" * 2_000 + "b")


@pytest.mark.timeout(10)
@pytest.mark.parametrize("glob", ["**a**a**a**z", "**a" * 330, "*a" * 499 + "z", "**?a*" * 200 + "z"])
def test_a_glob_costs_one_pass_over_each_path(glob: str) -> None:
    paths = [".".join(["a" * 30] * depth) for depth in range(120)]
    for path in [*paths, *(f"{path}.z" for path in paths)]:
        matches_path(glob, path)


def test_a_pattern_has_an_end() -> None:
    assert Region("a" * 1_000, "fp32").pattern
    with pytest.raises(
        PlanError, match=r"the pattern has 200,000 characters\. Allowed: at most 1,000"
    ) as error:
        Region("x" * 200_000, "fp32")
    sentence(error)


@pytest.mark.parametrize("number", ["1_0", "١٢", "1e1_0", "10%0A", "\uff11", "1 0", "٣.5"])
@pytest.mark.parametrize("field", ["interval", "init"])
def test_a_number_in_a_line_is_of_plain_digits(field: str, number: str) -> None:
    with pytest.raises(PlanError, match=rf"LossScale\({field}='.*'\) is not allowed") as error:
        Plan.parse(f"fp16-mixed+loss_scale.{field}={number}")
    sentence(error)


@pytest.mark.parametrize("escaped", ["a%00b", "norm%0A", "%ED%B3%BF", "\ud800", "a\0", "type:Norm%0D"])
def test_a_pattern_is_of_characters_that_are_printed(escaped: str) -> None:
    with pytest.raises(PlanError, match="control character") as error:
        Plan.parse(f"bf16-mixed+regions.{escaped}=fp32")
    sentence(error)


@pytest.mark.parametrize(
    "items",
    [
        "compute=bf16+compute=fp16",
        "ops.exp=fp32+ops.exp=lower",
        "loss_scale.init=4+loss_scale.init=8",
        "loss_scale=none+loss_scale=default",
        "loss_scale=none+loss_scale.init=4",
        "loss_scale.init=4+loss_scale=none",
        "loss_scale.init=4+loss_scale=default",
    ],
)
def test_a_line_that_says_one_thing_twice_is_refused(items: str) -> None:
    """Otherwise the last value would win silently. JSON with a repeated key is refused as well."""
    with pytest.raises(PlanError, match="set the same thing") as caught:
        Plan.parse(f"fp16-mixed+{items}")
    for item in items.split("+"):
        assert item in str(caught.value)


def test_a_line_may_have_fields_of_the_default_loss_scale_and_regions_in_a_row() -> None:
    """Neither sets a value twice: for regions, the last match applies."""
    assert Plan.parse("bf16-mixed+loss_scale=default+loss_scale.init=4").loss_scale == LossScale(init=4)
    assert len(Plan.parse("bf16-mixed+regions.a=fp32+regions.a=bf16").regions) == 2


@pytest.mark.parametrize("pattern", ["*" * 3000, "*a" * 3000])
def test_a_message_about_a_long_pattern_is_short(pattern: str) -> None:
    """The message is short for a plan line and for a Region alike."""
    for make in (lambda: Plan.parse(f"bf16-mixed+regions.{pattern}=fp32"), lambda: Region(pattern, "fp32")):
        with pytest.raises(PlanError, match="Allowed: at most 1,000") as caught:
            make()
        assert len(str(caught.value)) < 400
