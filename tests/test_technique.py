"""The grammar of techniques, combinations and the registry."""

from __future__ import annotations

import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream import technique
from slipstream.errors import (
    InvalidArgumentError,
    SlipstreamError,
    SlipstreamWarning,
    UnknownNameError,
    UsageError,
)
from slipstream.graph import TensorSpec
from slipstream.graph.flow import Match
from slipstream.technique import (
    ModuleTechnique,
    Stage,
    Technique,
    TechniqueSettings,
    Traits,
    combination_name,
    combine,
    parse,
)
from slipstream.techniques.precision import Amp


class Plain(TechniqueSettings):
    """The remainder of the protocol, for techniques of which only settings are tested."""

    name: ClassVar[str] = "plain"
    traits: ClassVar[Traits] = Traits(stage=Stage.MODEL)

    def why_not(self, graph: Any, workload: Any = None) -> str | None:
        return None

    def required_timings(self, graph: Any) -> list[Any]:
        return []

    def predict(self, graph: Any, context: Any) -> Any:
        return [*graph, str(self)]

    def apply(self, built: Any) -> None:
        pass

    def quality(self, graph: Any = None) -> Any:
        return None

    def code(self, workload: Any) -> None:
        return None


@dataclass(frozen=True)
class Shrink(Plain):
    """Settings of every kind."""

    ratio: float = 0.5
    rank: int | None = None
    how: Literal["svd", "random"] = "svd"
    warm: bool = False
    only: str = "*"
    except_: str = ""

    name: ClassVar[str] = "shrink"


@dataclass(frozen=True)
class Late(Plain):
    """No settings, a late stage, and a conflict."""

    name: ClassVar[str] = "late"
    traits: ClassVar[Traits] = Traits(stage=Stage.COMPILE, conflicts=frozenset(["amp"]))


@dataclass(frozen=True)
class Demanding(Plain):
    """A setting without a default."""

    budget: float

    name: ClassVar[str] = "demanding"


class Installed:
    """Fake of the registrations of other packages."""

    def __init__(self) -> None:
        self.module = types.ModuleType("another_package")
        self.points: list[EntryPoint] = []

    def add(self, name: str, kind: Any) -> None:
        setattr(self.module, kind.__name__, kind)
        self.points.append(EntryPoint(name, f"another_package:{kind.__name__}", technique.GROUP))


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Installed]:
    made = Installed()
    monkeypatch.setitem(sys.modules, "another_package", made.module)
    for kind in (Shrink, Late, Demanding):
        made.add(kind.name, kind)
    made.points.append(EntryPoint("amp", "slipstream.techniques.precision:Amp", technique.GROUP))
    monkeypatch.setattr(technique, "entry_points", lambda group: made.points)
    return made


words = st.text(st.characters(whitelist_categories=["Ll", "Nd"], whitelist_characters="._*"))
shrinks = st.builds(
    Shrink,
    ratio=st.floats(allow_nan=False, allow_infinity=False),
    rank=st.none() | st.integers(),
    how=st.sampled_from(["svd", "random"]),
    warm=st.booleans(),
    only=words.filter(bool),
    except_=words,
)


@given(technique=shrinks)
def test_a_spec_round_trips(technique: Shrink) -> None:
    assert parse(str(technique)) == (technique,)


@given(technique=shrinks)
def test_a_combination_is_parsed_in_stage_order(technique: Shrink) -> None:
    both = (technique, Amp())
    assert parse(combination_name(both)) == both
    assert parse(combination_name(both[::-1])) == both


def test_the_first_value_needs_no_key() -> None:
    assert parse("amp:bf16") == parse("amp:dtype=bf16") == parse("amp") == (Amp("bf16"),)
    assert parse("shrink:0.25,rank=3") == (Shrink(0.25, 3),)
    assert parse("amp:fp16") == (Amp("fp16"),)


def test_a_setting_named_like_a_keyword_is_written_without_the_underscore() -> None:
    (technique,) = parse("shrink:only=layers.*,except=*.norm")
    assert technique == Shrink(only="layers.*", except_="*.norm")
    assert str(technique) == "shrink:0.5,only=layers.*,except=*.norm"


def test_a_name_has_the_main_setting_and_differences_from_the_default() -> None:
    assert str(Amp()) == "amp:bf16"
    assert str(Shrink(warm=True, how="random")) == "shrink:0.5,how=random,warm=true"
    assert str(Late()) == "late"


def test_the_empty_technique_has_a_name() -> None:
    assert combination_name(()) == "as it is"


@pytest.mark.parametrize("text", ["shrink:warm=yes", "shrink:warm=1", "shrink:warm=TRUE"])
def test_true_has_several_spellings(text: str) -> None:
    assert parse(text) == (Shrink(warm=True),)


def test_none_is_a_value_of_optional_settings() -> None:
    assert parse("shrink:rank=none") == parse("shrink:rank=") == (Shrink(),)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("amb:bf16", UnknownNameError, " amp"),
        ("shrnk", UnknownNameError, " shrink?"),
        ("shrink:rnk=3", UnknownNameError, " rank?"),
        ("late:3", UnknownNameError, "'3'"),
        ("amp:bf17", InvalidArgumentError, "one of bf16, fp16"),
        ("shrink:half", InvalidArgumentError, "'half'"),
        ("shrink:half", InvalidArgumentError, " shrink:ratio=0.5"),
        ("shrink:rank=2.5", InvalidArgumentError, "'2.5'"),
        ("shrink:warm=maybe", InvalidArgumentError, "'maybe'"),
        ("shrink:0.5,3", UsageError, "'3' in 'shrink:0.5,3'"),
        ("shrink:0.5,ratio=0.25", UsageError, "ratio"),
        ("shrink:rank=1,rank=2", UsageError, "rank"),
        ("", UsageError, "empty"),
        ("amp+", UsageError, "empty"),
        (":bf16", UsageError, "empty"),
        ("amp+amp:fp16", UsageError, "twice"),
        ("late+amp", UsageError, "'late'"),
        ("amp+late", UsageError, "'late'"),
        ("demanding", UsageError, "demanding:budget="),
    ],
)
def test_invalid_specs_are_refused_with_an_explanation(
    text: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        parse(text)
    assert message in str(caught.value)


@given(text=st.text(max_size=30) | st.from_regex(r"(amp|shrink|late)[:+,=a-z0-9.]{0,12}"))
def test_any_text_is_a_technique_or_a_usage_error(text: str) -> None:
    try:
        found = parse(text)
    except UsageError:
        return
    assert parse(combination_name(found)) == found


def test_our_techniques_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = technique.registry()
    assert found["amp"] is Amp
    for name, kind in found.items():
        assert kind.name == name
        for member in ("traits", "why_not", "required_timings", "predict", "apply"):
            assert hasattr(kind, member), f"{name} has no {member}"


def test_a_technique_without_traits_is_reported_once(installed: Installed) -> None:
    @dataclass(frozen=True)
    class Undeclared(Plain):
        name: ClassVar[str] = "undeclared"
        traits: ClassVar[Traits] = TechniqueSettings.traits
        stage: ClassVar[int] = Stage.COMPILE

    installed.add("undeclared", Undeclared)
    with pytest.warns(SlipstreamWarning, match=r"'undeclared'(.|\n)*\bTraits\b"):
        technique.registry()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        technique.registry()


def test_a_technique_of_another_package_is_found_and_parsed(installed: Installed) -> None:
    @dataclass(frozen=True)
    class Theirs(Plain):
        strength: int = 1
        name: ClassVar[str] = "theirs"

    globals()["Theirs"] = Theirs
    installed.add("theirs", Theirs)
    assert technique.registry()["theirs"] is Theirs
    assert parse("theirs:3+amp:bf16") == (Theirs(3), Amp())


@pytest.mark.parametrize(
    "value",
    ["another_package:NotThere", "no_such_package:Kind", "amp", "json:dumps", "json:JSONDecoder"],
)
def test_a_broken_plug_in_is_skipped_unless_named(installed: Installed, value: str) -> None:
    installed.points.append(EntryPoint("broken", value, technique.GROUP))
    with pytest.warns(SlipstreamWarning, match=r"'broken'.*skipped"):
        assert {"amp", "shrink"} <= technique.registry().keys() - {"broken"}
    assert parse("amp:bf16+shrink") == (Shrink(), Amp())
    with pytest.raises(SlipstreamError, match="'broken'") as caught:
        parse("broken")
    assert value in str(caught.value)


def test_a_plug_in_that_exits_is_skipped(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exiting_package.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    installed.points.append(EntryPoint("exiting", "exiting_package:Kind", technique.GROUP))
    with pytest.warns(SlipstreamWarning, match="'exiting'"):
        assert "exiting" not in technique.registry()


def test_predictions_are_folded_in_stage_order() -> None:
    graph: Any = []
    assert combine(graph, [Late(), Shrink()], None) == ["shrink:0.5", "late"]  # type: ignore[arg-type]


def test_the_wall_clock_shows_work_moved_to_other_cores() -> None:
    from slipstream.techniques.threads import Threads

    assert technique.clock((Amp(), Threads(2))) == "wall"
    assert technique.clock((Amp(),)) == "cpu"


def test_a_combination_has_one_order_however_it_is_written() -> None:
    assert combination_name(parse("shrink+demanding:1")) == "demanding:1.0+shrink:0.5"
    assert parse("shrink+demanding:1") == parse("demanding:1+shrink")


REPLICAS = Traits(stage=Stage.DISTRIBUTION, replicas="makes")


@pytest.mark.parametrize(
    ("first", "other", "together"),
    [
        (REPLICAS, REPLICAS, False),
        (replace(REPLICAS, hook="provides"), Traits(replicas="uses", hook="occupies"), True),
        (REPLICAS, Traits(replicas="uses", hook="occupies"), False),
        (REPLICAS, Traits(replicas="uses"), True),
        (Traits(hook="occupies"), Traits(hook="occupies"), False),
        (Traits(conflicts=frozenset(["b"])), Traits(), False),
        (Traits(), Traits(), True),
    ],
)
def test_compatibility_follows_from_traits(first: Traits, other: Traits, together: bool) -> None:
    a, b = (
        type(name, (Plain,), {"name": name, "traits": t})
        for name, t in zip("ab", (first, other), strict=True)
    )
    assert technique.clash(a, b) is technique.clash(b, a) is not together  # type: ignore[arg-type]


def test_workers_of_a_technique_without_replicas_are_not_replicas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    both = technique.on_workers(parse("dataloader:4+ddp:2"), 3)
    assert combination_name(both) == "dataloader:4+ddp:3"
    with pytest.raises(UsageError, match="does not distribute"):
        technique.on_workers(parse("dataloader:4"), 3)


def test_a_misspelt_trait_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="replicas"):
        Traits(replicas="make")  # type: ignore[arg-type]


def test_amp_satisfies_the_protocol() -> None:
    assert isinstance(Amp(), Technique)


def test_finding_techniques_loads_nothing_that_only_their_use_needs() -> None:
    code = "import sys\nfrom slipstream import technique\ntechnique.registry()\n"
    code += "sys.exit(bool({'scipy', 'sklearn', 'onnx', 'rich'} & set(sys.modules)))\n"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_the_named_techniques_are_imported() -> None:
    code = """if True:
        import sys
        from slipstream import technique
        technique.parse("amp:bf16+channels_last")
        points = technique.entry_points(group=technique.GROUP)
        loaded = {point.name for point in points if point.value.partition(":")[0] in sys.modules}
        sys.exit(loaded != {"amp", "channels_last"} and f"{loaded}")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


@dataclass(frozen=True)
class Picky(ModuleTechnique):
    """Chooses modules without changing them."""

    only: str = "*"
    except_: str | None = None

    name: ClassVar[str] = "picky"


def match(module: str, refusal: str | None = None) -> Match:
    spec = TensorSpec("float32", (1,), (1,))
    return Match("linear", module, (0,), (), spec, spec, {}, refusal=refusal)


def test_chosen_modules_can_be_replaced_and_have_the_name() -> None:
    found = [match("a", "a is packed"), match("b.0"), match("b.1"), match("c")]
    assert Picky("b.*", "b.1").chosen(found) == [found[1]]
    assert Picky().chosen(found) == found[1:]


def test_an_empty_choice_has_a_reason() -> None:
    found = [match("a", "a is packed"), match("b")]
    assert Picky().no_match_reason([], "the step has no layer") == "the step has no layer"
    assert Picky().no_match_reason(found[:1], "") == "a is packed"
    assert Picky().no_match_reason(found, "") is None
    assert Picky("a").no_match_reason(found, "") == "only=a matches none of its modules; near: b"
    assert Picky("*", "b").no_match_reason(found, "") == "except=b leaves none of its modules"
