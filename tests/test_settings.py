"""Settings: one definition, checked in one place, for Python, YAML files and the command line."""

from __future__ import annotations

import inspect
import json
from importlib.metadata import version

import pytest
from conftest import tiny_batch, tiny_model

import greedy_gnorm as gg
from greedy_gnorm.cli.options import read_yaml
from greedy_gnorm.model.sites import find_sites
from greedy_gnorm.pruning.prepare import protection_for
from greedy_gnorm.records import compact
from greedy_gnorm.settings import (
    COMPARING,
    COMPRESSING,
    EVALUATING,
    MEBIBYTE,
    PRUNING,
    SCORING,
    SETTINGS,
    Savings,
    Settings,
)
from greedy_gnorm.units import Unit


@pytest.mark.parametrize(
    ("function", "names"),
    [(gg.prune, PRUNING), (gg.compress, COMPRESSING), (gg.score, SCORING), (gg.compare, COMPARING)],
    ids=["prune", "compress", "score", "compare"],
)
def test_the_functions_have_the_settings_as_keywords_in_the_same_order_with_the_same_defaults(function, names):
    parameters = inspect.signature(function).parameters
    own = {"latency"} if function is gg.prune else set()  # whether to measure it, where compress has a target
    shown = {name: parameter for name, parameter in parameters.items() if name in SETTINGS and name not in own}
    assert list(shown) == list(names)
    for name, parameter in shown.items():
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        usual = {"method": "joint-refit"} if function is gg.compress else {}
        assert Settings.of({**usual, name: parameter.default}) == Settings.of(usual), name
        assert parameter.annotation is not inspect.Parameter.empty
    assert not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    assert list(parameters)[:2] == ["model", "data"]


def test_evaluate_has_its_settings_as_keywords():
    parameters = inspect.signature(gg.evaluate).parameters
    shown = [name for name in parameters if name in SETTINGS and name != "examples"]  # a number of rows here
    assert shown == list(EVALUATING)
    assert Settings.of({name: parameters[name].default for name in shown}) == Settings()


@pytest.mark.parametrize("function", [gg.prune, gg.compress, gg.score, gg.compare, gg.evaluate, gg.bench])
def test_help_explains_every_keyword(function):
    explained = [line.strip().partition(":")[0] for line in inspect.getdoc(function).splitlines() if ": " in line]
    parameters = list(inspect.signature(function).parameters)
    assert [name for name in explained if name in parameters] == parameters


def test_the_module_shows_its_names():
    assert {"prune", "score", "compare", "load", "__version__"} <= set(dir(gg))
    assert set(gg.__all__) - {"Head", "HeadScores"} <= set(dir(gg))
    assert gg.__version__ == version("greedy-gnorm")


def test_lists_are_lists_and_dicts_are_dicts():
    given = Settings(
        stop=["drop=0.01", "heads=5"],
        protect=[(0, 3), [1, 2], Unit(2, 0), 11],
        label_map={"neg": "NEGATIVE", 1: "POSITIVE"},
        score_options={"variant": "A", "eps": 1e-5},
        device_map={"": "disk"},
        savings=["kept-layers", "gram"],
    )
    assert given.stop == ("drop=0.01", "heads=5")
    assert given.protect == ((0, 3), (1, 2), (2, 0), 11)
    assert given.label_map == {"neg": "NEGATIVE", "1": "POSITIVE"}
    assert Settings(stop="drop=0.01").stop == ("drop=0.01",)
    content = given.to_json()
    assert json.loads(json.dumps(content)) == content
    assert content["protect"] == [[0, 3], [1, 2], [2, 0], 11]
    assert Settings.of(content) == given
    assert list(content) == list(SETTINGS)


def test_zero_rows_are_all_rows_and_nothing_is_nothing():
    assert Settings(samples=0, eval_samples=0).samples is None
    assert Settings(label_map={}, score_options={}, protect=None) == Settings()


WRONG = [
    (
        {"stop": 5},
        "stop must be a rule or a list of rules, such as 'drop=0.01' or ['drop=0.01', 'heads=5'], not 5 (int).",
    ),
    ({"stop": ["knee", 3]}, "not ['knee', 3] (list)."),
    (
        {"protect": ["0.1"]},
        "protect must be a list of (layer, head) pairs and layers, such as [(0, 3), 11], not ['0.1']",
    ),
    ({"protect": "0.1"}, "such as [(0, 3), 11], not '0.1' (str)."),
    ({"protect": [(0, 1, 2)]}, "not [(0, 1, 2)]"),
    ({"protect": [-1]}, "not [-1]"),
    ({"label_map": "neg=NEGATIVE"}, "label_map must be a dict from the data's labels to the model's"),
    ({"label_map": {False: "x"}}, "not {False: 'x'}"),
    ({"score_options": "eps=1"}, "score_options must be a dict of names and values"),
    ({"score_options": {"eps": [1]}}, "not {'eps': [1]}"),
    ({"score_options": {"eps": float("inf")}}, "not {'eps': inf}"),
    ({"device_map": {}}, "device_map must be 'auto', 'balanced', or a dict that gives every module a place"),
    ({"device_map": {"": "meta"}}, "not {'': 'meta'}"),
    ({"device_map": '{"": "disk"}'}, "such as {'': 'disk'}, not '{\"\": \"disk\"}' (str)."),
    ({"savings": "gramm"}, "Unknown saving 'gramm'. Use 'all', 'none', or a list of: kept-layers, first-token, gram."),
    ({"savings": ["gram", "x"]}, "Unknown saving 'x'."),
    ({"savings": 5}, "savings must be 'all', 'none' or a list of names"),
    ({"samples": "x"}, "samples must be a valid integer, not 'x' (str)."),
    ({"samples": -3}, "samples must be at least 1, not -3 (int)."),
    ({"samples": 3.0}, "samples must be a valid integer"),
    ({"seed": True}, "seed must be a valid integer, not True (bool)."),
    ({"seed": -1}, "seed must be at least 0"),
    ({"seed": 2**63}, "seed must be less than 9223372036854775808"),
    ({"seed": None}, "seed must be"),
    ({"min_heads": -1}, "min_heads must be at least 0"),
    ({"heads_per_step": 0}, "heads_per_step must be at least 1"),
    ({"recompute": -1}, "recompute must be at least 0"),
    ({"tokens_per_batch": 0}, "tokens_per_batch must be at least 1"),
    ({"dtype": "int8"}, "dtype must be 'auto', 'float32', 'float64', 'bfloat16' or 'float16', not 'int8' (str)."),
    ({"text": 3}, "text must be a valid string"),
    ({"trust_remote_code": "yes"}, "trust_remote_code must be a valid boolean"),
    ({"metod": "ae"}, "Unknown setting 'metod'. Did you mean 'method'? Settings: method, stop, metric"),
]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=lambda each: str(each)[:40])
def test_a_wrong_value_is_one_line(given, message):
    with pytest.raises(gg.GnormError) as caught:
        Settings.of(given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "pydantic" not in str(caught.value)


def test_a_function_refuses_what_is_no_setting():
    with pytest.raises(TypeError, match="metod"):
        gg.prune(tiny_model("bert"), [tiny_batch()], metod="ae")
    with pytest.raises(gg.GnormError, match="samples must be at least 1"):
        gg.prune(tiny_model("bert"), [tiny_batch()], samples=-1)
    with pytest.raises(gg.GnormError, match="label_map must be a dict"):
        gg.score(tiny_model("bert"), [tiny_batch()], label_map="neg=0")


def test_settings_do_not_change_and_copies_are_checked():
    given = Settings(samples=7, protect=[1])
    with pytest.raises(Exception, match="frozen"):
        given.samples = 8
    copied = given.model_copy(update={"samples": 8, "stop": "all"})
    assert (copied.samples, copied.stop, copied.protect, given.samples) == (8, ("all",), (1,), 7)
    with pytest.raises(gg.GnormError, match="samples must be at least 1"):
        given.model_copy(update={"samples": -1})
    with pytest.raises(gg.GnormError, match="Unknown setting 'x'"):
        given.model_copy(update={"x": 1})


def test_savings():
    assert Savings.named("all", 3) == Savings(kept_bytes=3 * MEBIBYTE)
    assert Savings.named("none") == Savings(kept_layers=False, first_token=False, gram=False)
    assert Savings.named(["gram"]) == Savings(kept_layers=False, first_token=False)
    assert Settings(savings="gram") == Settings(savings=["gram"])


def test_protected_heads_are_those_of_the_models_layers():
    sites = find_sites(tiny_model("bert", num_hidden_layers=2), "heads")
    protection = protection_for(Settings(protect=[(0, 3), 1], min_heads=2), sites)
    assert protection.units == {Unit(0, 3), *(Unit(1, head) for head in range(4))}
    assert protection.least_per_site == 2
    for wrong, message in (
        ([2], "protect: this model has no layer 2; its layers are 0 to 1."),
        ([(0, 4)], "protect: layer 0 has no head 4; its heads are 0 to 3."),
        ([(9, 0)], "no layer 9"),
    ):
        with pytest.raises(gg.GnormError, match=message):
            protection_for(Settings(protect=wrong), sites)


COMPACT = [
    ("protect", "0.3,11", [(0, 3), 11]),
    ("protect", "L0H3, L11", [(0, 3), 11]),
    ("protect", "L0·H3", [(0, 3)]),
    ("protect", "[[0, 3], 11]", [[0, 3], 11]),
    ("label_map", "neg=NEGATIVE, pos=POSITIVE", {"neg": "NEGATIVE", "pos": "POSITIVE"}),
    ("label_map", '{"a,b": "x=y"}', {"a,b": "x=y"}),
    ("label_map", "0=1", {"0": "1"}),
    ("score_options", "variant=A,eps=1e-5,steps=3", {"variant": "A", "eps": 1e-5, "steps": 3}),
    ("savings", "kept-layers,gram", ["kept-layers", "gram"]),
    ("savings", "none", "none"),
    ("device_map", '{"": "disk"}', {"": "disk"}),
    ("device_map", "auto", "auto"),
]


@pytest.mark.parametrize(("name", "text", "value"), COMPACT)
def test_compact_forms(name, text, value):
    read = compact.parse(name, text)
    assert read == value
    given = Settings.of({name: read}).to_json()[name]
    again = compact.parse(name, compact.write(name, given))
    assert Settings.of({name: again}) == Settings.of({name: read})


def test_what_a_compact_form_can_not_say_is_written_as_json():
    for labels in ({"a,b": "c"}, {"a=b": "c"}, {"{a": "b"}, {" a": "b"}, {"": "b"}):
        assert compact.parse("label_map", compact.write("label_map", labels)) == labels
    assert compact.write("label_map", {"neg": "NEGATIVE"}) == "neg=NEGATIVE"
    assert compact.write("protect", [[0, 3], 11]) == "L0·H3,L11"
    assert compact.write("device_map", {"": 0}) == '{"": 0}'


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("protect", "0.3,x", "protect must be heads and layers such as 0.3,11 or L0H3,L11, not 'x'"),
        ("protect", "0.3.4", "not '0.3.4'"),
        ("protect", "-1", "not '-1'"),
        ("label_map", "neg", "label_map must be pairs such as neg=NEGATIVE,pos=POSITIVE, not 'neg'"),
        ("label_map", "=x", "must be pairs"),
        ("score_options", "eps", "score_options must be pairs such as variant=A,eps=1e-5, not 'eps'"),
        ("device_map", "{cpu", "device_map: '{cpu' is not valid JSON"),
    ],
)
def test_wrong_compact_forms(name, text, message):
    with pytest.raises(gg.GnormError) as caught:
        compact.parse(name, text)
    assert message in str(caught.value)


def test_a_yaml_file_reads_numbers_as_people_write_them(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("score_options: {eps: 1e-5, variant: A, steps: 3}\nlabel-map: {0: NEGATIVE}\n")
    content = read_yaml(path)
    assert content == {"score-options": {"eps": 1e-5, "variant": "A", "steps": 3}, "label-map": {0: "NEGATIVE"}}
    assert isinstance(content["score-options"]["eps"], float)


def test_options_of_a_score_have_the_type_of_their_default():
    model, batches = tiny_model("bert"), [tiny_batch()]
    for options, message in (
        ({"eps": "small"}, "The option eps of 'entropy' must be a number, not 'small'."),
        ({"variant": 3}, "The option variant of 'entropy' must be text, not 3."),
        ({"eps": True}, "must be a number, not True"),
        ({"epsilon": 1}, "The score 'entropy' has no option 'epsilon'. Options and defaults: variant=C, eps=1e-07."),
    ):
        with pytest.raises(gg.GnormError, match=message):
            gg.score(model, batches, score="entropy", score_options=options)
    one, other = (gg.score(model, batches, score="entropy", score_options={"eps": eps}) for eps in (1, 1.0))
    assert one.values.tolist() == other.values.tolist()
