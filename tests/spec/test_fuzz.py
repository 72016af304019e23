"""Fuzz tests of the loader: every input gives a Spec or a SpecError."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slm_lab.spec.load.files import parse_json, parse_yaml
from slm_lab.spec.load.loader import dump_spec, load_specs
from slm_lab.spec.report import SpecError

FULL: dict[str, Any] = {
    "agent": {
        "name": "A",
        "algorithm": {
            "name": "PPO",
            "lam": 0.9,
            "clip_eps_spec": {"name": "linear_decay", "start_val": 0.2, "end_val": 0.1, "end_step": 10},
        },
        "memory": {"name": "OnPolicyBatchReplay"},
        "net": {
            "type": "ConvNet",
            "conv_hid_layers": [[32, [8, 8], 4, 0, 1]],
            "optim_spec": {"name": "Lookahead", "optimizer": "Adam", "lr": 0.1},
            "lr_scheduler_spec": {"name": "LinearToZero", "frame": 100},
        },
    },
    "env": {"name": "ALE/Pong-v5", "max_frame": 100, "frameskip": 3},
    "meta": {"max_session": 2, "search_resources": {"cpu": 1}, "num_cpus": 2},
    "search": {"agent": {"algorithm": {"lam__uniform": [0.1, 0.9]}}, "env.num_envs__choice": [1, 2]},
    "spec_params": {"x": [1, 2]},
}
ARC: dict[str, Any] = {
    "agent": {
        "algorithm": {"name": "ActorCritic"},
        "net": {
            "type": "TorchArcNet",
            "arc": {
                "modules": {"body": {"Sequential": [{"Tanh": None}]}},
                "graph": {"input": "x", "modules": {"body": ["x"]}, "output": "body"},
            },
        },
    },
    "env": {"name": "CartPole-v1", "max_frame": 100},
}

keys = st.sampled_from(
    ["name", "type", "agent", "algorithm", "net", "PPO", "_x", "$y", "a.b", "a[0]", "lam__uniform", "spec_params", "${x}", ""]
) | st.text(max_size=4)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["PPO", "MLPNet", "${x}", "${", "x:y", "a.b:c"])
    | st.text(max_size=6)
)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=8)
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def places(node: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) of a tree."""
    items = list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
    return [(node, key) for key, _ in items] + [place for _, inner in items for place in places(inner)]


def attempt(call: Callable[[], Any]) -> Any:
    """Return the result of `call`, or None if it raises a SpecError, which must be printable."""
    try:
        return call()
    except SpecError as problem:
        error = problem
    assert error.problems
    assert str(error).encode("utf-8")
    return None


def load_text(folder: Path, text: str, sets: list[str] | None = None) -> None:
    """Load all specs of a text; a SpecError must be printable, and a spec must survive a round trip."""
    file = folder / "fuzz.json"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    specs = attempt(lambda: load_specs(file, None, sets or []))
    for spec in specs or []:
        file.write_text(json.dumps(dump_spec(spec)))
        assert load_specs(file, None) == [spec]


JSON = st.text(alphabet='{}[]",:/*\\$ \n\r\t1-eETrunflas.\u00e9\ud800', max_size=40)
YAML = st.text(alphabet="{}[]&*:<!|>-?~ \n'\"#ab1.e+", max_size=30)


@quick
@given(JSON | YAML | st.text(max_size=30))
def test_any_text(text: str) -> None:
    attempt(lambda: parse_json(text))
    attempt(lambda: parse_yaml(text))


@quick
@given(values)
def test_any_json_as_file(tmp_path: Path, value: Any) -> None:
    load_text(tmp_path, json.dumps(value))


@quick
@given(st.dictionaries(st.sampled_from(["agent", "env", "meta", "search", "body", "spec_params"]), values))
def test_any_json_as_spec(tmp_path: Path, value: Any) -> None:
    load_text(tmp_path, json.dumps({"s": value}))


@settings(quick, max_examples=100)
@given(st.data(), values, st.sampled_from([FULL, ARC]))
def test_a_good_spec_with_any_part_replaced(tmp_path: Path, data: st.DataObject, value: Any, base: dict[str, Any]) -> None:
    spec = copy.deepcopy(base)
    container, key = data.draw(st.sampled_from(places(spec)))
    how = data.draw(st.sampled_from(["replace", "delete", "add"]))
    if how == "delete":
        del container[key]
    elif how == "add" and isinstance(container, dict):
        container[data.draw(keys)] = value
    else:
        container[key] = value
    load_text(tmp_path, json.dumps({"s": spec}))


path_texts = st.sampled_from(
    [
        "agent.algorithm.gamma",
        "agent.net.type",
        "agent[0].net.hid_layers[0]",
        "env.name",
        "x",
        "env",
        "meta",
        "agent.net.conv_hid_layers[0][1]",
        "a.b.c",
        ".",
    ]
)


@settings(quick, max_examples=20)  # each example loads a whole spec
@given(
    st.lists(
        st.tuples(path_texts | st.text(max_size=5), st.sampled_from(["1e6", "True", "null", "{}", "[1", "${x}", ""]) | st.text(max_size=4)),
        max_size=3,
    )
)
def test_any_set(tmp_path: Path, pairs: list[tuple[str, str]]) -> None:
    load_text(tmp_path, json.dumps({"s": FULL}), [f"{name}={value}" for name, value in pairs])
