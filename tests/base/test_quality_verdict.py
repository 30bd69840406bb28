from __future__ import annotations

import fcntl
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pagoda.base.errors import ConfigError
from pagoda.base.quality_bounds import (
    Bounds,
    Figures,
    Interval,
    is_surely_noticed,
    objections,
    too_loose,
)
from pagoda.base.quality_verdict import (
    VERSION,
    Result,
    Setting,
    default_directory,
    read_verdict,
    require_quality,
    weights_name,
)
from pagoda_tools.quality.write_verdict import check_place, write_verdict
from tests.groups import others_can_write

Edit = Callable[[dict], None]  # of the file's JSON

BLEND = Setting("blend", {"version": 1, "policy": "deviation", "recompute": 0.15})
CODEC = Setting("codec", {"version": 1, "codec": "q8", "chunk_tokens": 64})
BOUNDS = Bounds(kl=0.01, top1=0.99, answers=0.99, prompts=50)
LOOSE = Bounds(kl=0.5, top1=0.8, answers=0.93, prompts=20)
CAUGHT = {"zeroed KV": True}


def figures(**changes: Interval | None) -> Figures:
    good = Figures(
        kl=Interval(0.005, 0.004, 0.008),
        top1=Interval(0.995, 0.99, 1.0),
        same_text=Interval(0.9, 0.8, 1.0),
        answers=Interval(1.0, 0.99, 1.02),
        ttft=Interval(0.4, 0.3, 0.5),
        bytes=1.0,
    )
    return msgspec.structs.replace(good, **changes)


def result(
    setting: Setting = BLEND,
    found: Figures | None = None,
    bounds: Bounds = BOUNDS,
    *,
    prompts: int = 60,
    confidence: float = 0.95,
) -> Result:
    found = found or figures()
    reasons = objections(found, bounds, CAUGHT, prompts, confidence)
    return Result(
        setting,
        bounds,
        found,
        CAUGHT,
        prompts,
        "ab" * 16,
        16,
        confidence,
        0,
        "2026-01-02T03:04:05Z",
        not reasons,
        reasons,
    )


def written(
    place: Path, *results: Result, weights: tuple[str, ...] = ("w1",)
) -> Path:
    return write_verdict(
        place, model="a model", weights=weights, pagoda="0.1.0", results=results
    )


def refusal(
    setting: Setting, place: Path, weights: str = "w1", weights_epoch: int = 0
) -> str:
    with pytest.raises(ConfigError) as raised:
        require_quality(
            setting, weights=weights, weights_epoch=weights_epoch, verdicts=place
        )
    state = require_quality(
        setting,
        weights=weights,
        weights_epoch=weights_epoch,
        verdicts=place,
        unchecked=True,
    )
    assert state.checked == "unchecked"
    assert state.as_stats()["detail"] in {state.detail}
    assert "without a passing verdict" in state.detail
    return str(raised.value)


def edited(path: Path, change: Edit) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_a_passing_verdict_lets_the_feature_start(tmp_path: Path) -> None:
    path = written(tmp_path, result())
    assert path == tmp_path / "w1.json"
    for place in (tmp_path, path):
        for unchecked in (False, True):
            state = require_quality(
                BLEND, weights="w1", verdicts=place, unchecked=unchecked
            )
            assert state.checked == "passed"
            assert state.as_stats() == {
                "setting": "blend policy=deviation recompute=0.15",
                "checked": "passed",
                "detail": f"measured: {path}, 2026-01-02T03:04:05Z",
            }


def test_a_verdict_is_read_as_it_was_written(tmp_path: Path) -> None:
    wrote = [result(), result(CODEC, figures(answers=None))]
    found = read_verdict(
        written(tmp_path / "sub" / "v.json", *wrote, weights=("w1", "engine's"))
    )
    assert found.results == wrote
    assert found.model == "a model"
    assert found.weights == ["w1", "engine's"]
    assert found.version == VERSION


def test_without_a_verdict_the_error_says_what_to_run(tmp_path: Path) -> None:
    said = refusal(BLEND, tmp_path)
    assert "there is no verdict for the weights w1" in said
    assert "pagoda quality MODEL PROMPTS.jsonl --blend deviation:0.15" in said
    assert "unchecked = true" in said
    assert "--codec q8 --chunk-tokens 64 " in refusal(CODEC, tmp_path / "absent")
    layered = Setting(
        "blend",
        {"version": 1, "policy": "deviation", "recompute": 0.15, "layer": 2},
    )
    assert layered.flag == "--blend deviation:0.15:layer=2"


def test_verdicts_are_looked_for_in_the_users_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=str(tmp_path / "pagoda" / "quality")):
        require_quality(BLEND, weights="w1", verdicts="")
    written(tmp_path / "pagoda" / "quality", result())
    assert require_quality(BLEND, weights="w1", verdicts="").checked == "passed"


@pytest.mark.parametrize("mode", [0o606, 0o662, 0o660])
def test_a_verdict_that_others_could_have_written_is_refused(
    tmp_path: Path, mode: int
) -> None:
    file = written(tmp_path, result())
    assert (
        require_quality(BLEND, weights="w1", verdicts=tmp_path).checked
        == "passed"
    )
    file.chmod(mode)
    if others_can_write(mode):
        assert "others can write it (mode 0" in refusal(BLEND, tmp_path)
    file.chmod(0o644)
    if os.geteuid() == 0:
        os.chown(file, 65534, 65534)  # another user measured for all
    assert require_quality(BLEND, weights="w1", verdicts=file).checked == "passed"


@pytest.mark.parametrize(
    "variables", [{"XDG_CONFIG_HOME": "."}, {"HOME": "."}, {"HOME": "~"}]
)
def test_the_default_place_is_never_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"XDG_CONFIG_HOME": "", **variables}.items():
        monkeypatch.setenv(name, value)
    assert default_directory().is_absolute()
    assert tmp_path not in default_directory().parents


def test_weights_without_a_name_are_refused(tmp_path: Path) -> None:
    written(tmp_path, result())
    assert "Namespace.weights" in refusal(BLEND, tmp_path, weights="")


def test_another_models_verdict_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, result())
    assert "there is no verdict for the weights w2" in refusal(
        BLEND, tmp_path, weights="w2"
    )
    assert "is about other weights (w1), not w2" in refusal(
        BLEND, path, weights="w2"
    )
    path.rename(tmp_path / "w2.json")
    assert "is about other weights (w1), not w2" in refusal(
        BLEND, tmp_path, weights="w2"
    )


def test_weights_updated_in_place_are_others(tmp_path: Path) -> None:
    written(tmp_path, result())
    assert "w1+epoch3" in refusal(BLEND, tmp_path, weights_epoch=3)
    written(tmp_path, result(), weights=("w1", weights_name("w1", 3)))
    assert (
        require_quality(
            BLEND, weights="w1", weights_epoch=3, verdicts=tmp_path
        ).checked
        == "passed"
    )


def test_weights_with_an_adapter_are_others(tmp_path: Path) -> None:
    written(tmp_path, result())
    for epoch, name in ((0, "w1+adapters a b"), (3, "w1+epoch3+adapters a b")):
        with pytest.raises(ConfigError) as raised:
            require_quality(
                BLEND,
                weights="w1",
                weights_epoch=epoch,
                adapters="a b",
                verdicts=tmp_path,
            )
        said = str(raised.value)
        assert f"no verdict for the weights {name} " in said
        assert (
            f"--blend deviation:0.15 --weights '{name}', where MODEL has the adapter merged"
            in said
        )
        assert "if the engine" not in said
        written(
            tmp_path,
            result(),
            weights=("another", weights_name("w1", epoch, "a b")),
        )
        found = require_quality(
            BLEND,
            weights="w1",
            weights_epoch=epoch,
            adapters="a b",
            verdicts=tmp_path,
        )
        assert found.checked == "passed"
    assert weights_name("", 3, "a b") == ""


def test_a_further_name_of_the_weights_is_found_in_a_directory(
    tmp_path: Path,
) -> None:
    written(tmp_path, result(), weights=("w1", "org/model as vLLM names it"))
    (tmp_path / "zzz.json").write_text("{}")
    found = require_quality(
        BLEND, weights="org/model as vLLM names it", verdicts=tmp_path
    )
    assert found.checked == "passed"


def test_other_settings_are_refused(tmp_path: Path) -> None:
    written(tmp_path, result())
    other = Setting("blend", {**BLEND.options, "recompute": 0.05})
    assert (
        "is about other settings: blend policy=deviation recompute=0.15"
        in refusal(other, tmp_path)
    )
    newer = Setting("blend", {**BLEND.options, "version": 2})
    assert "blend policy=deviation recompute=0.15 version 1" in refusal(
        newer, tmp_path
    )
    assert "is about other settings" in refusal(CODEC, tmp_path)
    longer = Setting("blend", {**BLEND.options, "min_tokens": 64})
    assert "is about other settings" in refusal(longer, tmp_path)
    assert "--blend deviation:0.15:min_tokens=64 " in refusal(longer, tmp_path)
    same = Setting("blend", {**BLEND.options, "recompute": 0.1 + 0.05})
    assert (
        require_quality(same, weights="w1", verdicts=tmp_path).checked == "passed"
    )


def test_a_failed_setting_is_refused_with_its_reasons(tmp_path: Path) -> None:
    written(tmp_path, result(found=figures(kl=Interval(0.2, 0.1, 0.3))))
    said = refusal(BLEND, tmp_path)
    assert "was measured and FAILED" in said
    assert "KL divergence is 0.2000 nats" in said


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (
            "passed",
            lambda file: file["results"][0].update(passed=True, reasons=[]),
            "checksum",
        ),
        (
            "figures",
            lambda file: file["results"][0]["figures"]["kl"].update(high=0.01),
            "checksum",
        ),
        ("weights", lambda file: file["weights"].append("w2"), "checksum"),
        (
            "older",
            lambda file: file.update(version=VERSION - 1),
            "an older version",
        ),
        (
            "newer",
            lambda file: file.update(version=VERSION + 1, surprise={}),
            "a newer version",
        ),
        ("format", lambda file: file.update(format="recipe"), "is not a verdict"),
        (
            "field",
            lambda file: file["results"][0].pop("bounds"),
            "is not a verdict",
        ),
        (
            "null",
            lambda file: file["results"][0]["figures"]["kl"].update(high=None),
            "is not a verdict",
        ),
    ],
)
def test_a_changed_file_is_refused(
    tmp_path: Path, name: str, change: Edit, said: str
) -> None:
    edited(
        written(tmp_path, result(found=figures(kl=Interval(0.2, 0.1, 0.3)))),
        change,
    )
    assert said in refusal(BLEND, tmp_path)


def test_a_verdict_that_its_own_figures_contradict_is_refused(
    tmp_path: Path,
) -> None:
    bad = result(found=figures(kl=Interval(0.2, 0.1, 0.3)))
    # with a right checksum
    written(tmp_path, msgspec.structs.replace(bad, passed=True, reasons=[]))
    assert "contradicts itself" in refusal(BLEND, tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"[1]",
        b"{",
        b"\xff\xfe",
        b'{"format": 3}',
        b"{" * 100_000,
        b'{"format": "\xff"}',
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_bytes_that_are_no_verdict(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "w1.json").write_bytes(content)
    assert "is not a verdict of pagoda quality" in refusal(BLEND, tmp_path)


def test_a_verdict_about_no_weights(tmp_path: Path) -> None:
    path = written(tmp_path, result())
    nobody = msgspec.structs.replace(read_verdict(path), weights=[], checksum="")
    path.write_bytes(
        msgspec.json.encode(
            msgspec.structs.replace(nobody, checksum=nobody.digest()),
            order="sorted",
        )
    )
    assert "is about other weights" in refusal(BLEND, tmp_path)


def test_places_that_have_no_verdict(tmp_path: Path) -> None:
    """None of them waits, or raises anything else; with `unchecked` the feature starts all the
    same.
    """
    os.mkfifo(tmp_path / "w1.json")
    os.mkfifo(tmp_path / "other.json")
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    (tmp_path / "device.json").symlink_to("/dev/zero")
    (tmp_path / "directory.json").mkdir()
    assert "w1.json: is not a verdict of pagoda quality: not a file" in refusal(
        BLEND, tmp_path
    )
    for place, why in {
        "w1.json": "which cannot be read: Not a directory",
        "long" * 100: "which cannot be read: File name too long",
        "loop.json": "which cannot be read: Too many levels of symbolic links",
        "directory.json": "",
        "absent": "",
    }.items():
        said = refusal(BLEND, tmp_path / place)
        assert (
            f"there is no verdict for the weights w1 in {tmp_path / place}"
            in said
        )
        assert ("cannot be read" in said) is bool(why)
        assert why in said
    for place in (tmp_path, tmp_path / "w1.json"):
        assert (
            require_quality(
                BLEND, weights="w1", verdicts=place, unchecked=True
            ).checked
            == "unchecked"
        )
    with pytest.raises(ConfigError, match="is not a verdict"):
        read_verdict(tmp_path / "w1.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_verdict("a\0b")


def test_a_new_run_keeps_the_results_of_other_settings(tmp_path: Path) -> None:
    written(tmp_path, result(), weights=("w1", "also"))
    worse = result(found=figures(top1=Interval(0.5, 0.4, 0.6)))
    path = written(tmp_path, worse, result(CODEC))
    found = read_verdict(path)
    assert found.results == [worse, result(CODEC)]
    assert found.weights == ["w1", "also"]
    assert "FAILED" in refusal(BLEND, tmp_path)


def test_another_models_file_and_an_older_version_are_replaced(
    tmp_path: Path,
) -> None:
    path = written(tmp_path / "v.json", result(CODEC), weights=("w2",))
    assert read_verdict(written(path, result())).results == [result()]
    edited(path, lambda file: file.update(version=0))
    assert read_verdict(written(path, result())).weights == ["w1"]


def test_a_file_that_is_no_verdict_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "notes.json"
    path.write_text('{"mine": 1}')
    with pytest.raises(ConfigError, match="name another file"):
        written(path, result())
    assert path.read_text() == '{"mine": 1}'
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        written(tmp_path / "file" / "v.json", result())


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "bytes.json").write_bytes(b'{"format": "\xff"}')
    (tmp_path / "deep.json").write_bytes(
        b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    )
    for name in ("bytes.json", "deep.json"):
        with pytest.raises(ConfigError, match="name another file"):
            check_place(tmp_path / name)
    os.mkfifo(tmp_path / "pipe.json")
    for name in ("pipe.json", "long" * 100, "long" * 100 + ".json"):
        with pytest.raises(ConfigError, match="cannot be written"):
            check_place(tmp_path / name)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kl": Interval(0.005, 0.001, 0.011)}, "reaches 0.0110"),
        ({"top1": Interval(0.995, 0.92, 1.0)}, "begins at 92.0 %"),
        ({"answers": Interval(0.995, 0.92, 1.0)}, "right answers are 99.5 %"),
        ({"kl": Interval(math.nan, math.nan, math.nan)}, "KL divergence"),
        ({"top1": Interval(math.nan, math.nan, math.nan)}, "tokens are the same"),
        ({"answers": Interval(math.nan, math.nan, math.nan)}, "right answers"),
    ],
)
def test_the_worse_end_of_an_interval_decides(
    changes: dict[str, Interval], said: str
) -> None:
    (reason,) = objections(figures(**changes), BOUNDS, CAUGHT, 50, 0.95)
    assert said in reason


def test_too_few_prompts_and_controls_that_pass() -> None:
    assert objections(figures(answers=None), BOUNDS, CAUGHT, 50, 0.95) == []
    assert (
        "49 prompts are too few"
        in objections(figures(), BOUNDS, CAUGHT, 49, 0.95)[0]
    )
    assert "no control was run" in objections(figures(), BOUNDS, {}, 50, 0.95)[0]
    (reason,) = objections(
        figures(), BOUNDS, {**CAUGHT, "swapped": False}, 50, 0.95
    )
    assert "swapped keeps the bounds too" in reason


def test_bounds_that_are_looser_than_the_usual_ones_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worse = figures(kl=Interval(0.3, 0.2, 0.4))
    written(
        tmp_path, result(found=worse, bounds=LOOSE, prompts=30, confidence=0.9)
    )
    state = require_quality(BLEND, weights="w1", verdicts=tmp_path)
    said = (
        "passed loosened bounds: KL at most 0.5 instead of 0.095, same tokens at least 80.0 % "
        "instead of 93.0 %, "
        "30 prompts instead of 50, intervals of 90.0 % instead of 95.0 %"
    )
    assert state.checked == "loosened"
    assert state.detail.startswith(f"{said}; measured: {tmp_path}")
    (line,) = caplog.messages
    assert line == f"{BLEND} {state.detail}"
    assert result(CODEC, bounds=LOOSE).loosened.startswith(
        "KL at most 0.5 instead of 0.01, "
    )
    for usual in (
        result(),
        result(bounds=BOUNDS, prompts=50),
        result(bounds=msgspec.structs.replace(BOUNDS, prompts=5)),
    ):
        assert usual.loosened == ""
    no_answers = result(
        found=figures(answers=None),
        bounds=msgspec.structs.replace(BOUNDS, answers=0.6),
    )
    assert no_answers.loosened == ""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kl": 100.0}, "a KL divergence of 100 nats a token, at most 1"),
        ({"kl": math.inf}, "at most 1"),
        ({"kl": math.nan}, "at most 1"),
        ({"top1": 0.0}, "0.0 % same tokens, at least 50.0 %"),
        ({"top1": math.nan}, "same tokens"),
        ({"answers": 0.49}, "49.0 % right answers, at least 50.0 %"),
        ({"answers": math.nan}, "right answers"),
        ({"prompts": 3}, "3 prompts, at least 4"),
    ],
)
def test_bounds_that_anything_keeps_are_none(
    tmp_path: Path, changes: dict[str, float], said: str
) -> None:
    bounds = msgspec.structs.replace(BOUNDS, **changes)
    (reason,) = too_loose(bounds, 0.95)
    assert said in reason
    assert reason in objections(figures(), bounds, CAUGHT, 60, 0.95)
    loose = msgspec.structs.replace(
        result(bounds=bounds), passed=True, reasons=[]
    )
    # JSON has no other numbers
    if all(math.isfinite(value) for value in changes.values()):
        written(tmp_path, loose)
        assert "contradicts itself" in refusal(BLEND, tmp_path)


@pytest.mark.parametrize("confidence", [0.4, 0.0, math.nan])
def test_intervals_of_no_confidence_tell_nothing(confidence: float) -> None:
    assert any(
        "intervals of" in reason
        for reason in objections(figures(), BOUNDS, CAUGHT, 60, confidence)
    )


@pytest.mark.parametrize(
    ("changes", "noticed"),
    [
        ({"kl": Interval(0.5, 0.005, 9.0)}, False),  # it may keep the bound
        ({"kl": Interval(0.5, 0.02, 9.0)}, True),
        ({"top1": Interval(0.9, 0.5, 0.995)}, False),
        ({"top1": Interval(0.9, 0.5, 0.98)}, True),
        ({"answers": Interval(0.9, 0.5, 1.0)}, False),
        ({"answers": Interval(0.9, 0.5, 0.98)}, True),
        ({"kl": Interval(math.nan, math.nan, math.nan)}, False),
    ],
)
def test_a_control_is_noticed_if_it_surely_breaks_a_bound(
    changes: dict[str, Interval], noticed: bool
) -> None:
    assert is_surely_noticed(figures(**changes), BOUNDS) is noticed


def test_a_file_has_one_result_for_a_setting(tmp_path: Path) -> None:
    both = [result(), result(found=figures(kl=Interval(0.2, 0.1, 0.3)))]
    path = written(tmp_path, *both)
    assert read_verdict(path).results == both[:1]
    whole = msgspec.structs.replace(read_verdict(path), results=both, checksum="")
    path.write_bytes(
        msgspec.json.encode(
            msgspec.structs.replace(whole, checksum=whole.digest()),
            order="sorted",
        )
    )
    assert "two results for blend" in refusal(BLEND, tmp_path)


def test_a_seed_may_be_any_number(tmp_path: Path) -> None:
    path = written(tmp_path, msgspec.structs.replace(result(), seed=10**30))
    assert read_verdict(path).results[0].seed == 10**30


def test_in_a_directory_a_result_that_failed_counts(tmp_path: Path) -> None:
    bad = result(found=figures(kl=Interval(0.2, 0.1, 0.3)))
    for passing, failing in (("w1.json", "a.json"), ("a.json", "w1.json")):
        written(tmp_path / passing, result())
        assert (
            require_quality(BLEND, weights="w1", verdicts=tmp_path).checked
            == "passed"
        )
        written(tmp_path / failing, bad)
        assert f"FAILED ({tmp_path / failing})" in refusal(BLEND, tmp_path)
        written(tmp_path / failing, bad, weights=("w2",))  # of other weights
        assert (
            require_quality(BLEND, weights="w1", verdicts=tmp_path).checked
            == "passed"
        )
        (tmp_path / passing).unlink()


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    written(tmp_path, result())
    with open(tmp_path / "w1.json", "ab") as file:
        file.truncate(1 << 40)
    assert "too large" in refusal(BLEND, tmp_path)


_WRITER = """
import sys
from pathlib import Path
from tests.base.test_quality_verdict import Setting, result, written
place, number = Path(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for share in range(10):
    written(place, result(Setting("blend", {"version": 1, "policy": f"p{number}", "recompute": share / 10})))
"""  # noqa: E501


@pytest.mark.slow
def test_processes_that_write_one_file_at_once_lose_nothing(
    tmp_path: Path,
) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.communicate("\n", timeout=120)
        assert writer.returncode == 0
    assert len(read_verdict(tmp_path / "w1.json").results) == 30
    assert os.listdir(tmp_path) == ["w1.json"]


def test_a_writer_that_stands_still_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda_tools.quality.write_verdict._LOCK_SECONDS", 0.05)
    lock = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="another process writes there"):
        written(tmp_path, result())
    os.close(lock)
    written(tmp_path, result())


def test_a_newer_versions_file_is_not_replaced(tmp_path: Path) -> None:
    path = written(tmp_path, result(CODEC))
    edited(path, lambda file: file.update(version=VERSION + 1))
    for attempt in (lambda: check_place(path), lambda: written(path, result())):
        with pytest.raises(ConfigError, match="is of a newer version"):
            attempt()


def test_a_link_to_a_verdict_stays_one(tmp_path: Path) -> None:
    path = written(tmp_path / "shared" / "w1.json", result(CODEC))
    link = tmp_path / "w1.json"
    link.symlink_to(path)
    written(tmp_path, result())
    assert link.is_symlink()
    assert len(read_verdict(path).results) == 2


@pytest.mark.parametrize("name", ["", "\udcff"])
def test_names_that_no_verdict_can_have(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is not a name of weights"):
        written(tmp_path, result(), weights=("w1", name))
    path = write_verdict(
        tmp_path, model="\udcff", weights=["w1"], pagoda="0", results=[result()]
    )
    assert read_verdict(path).model == "?"


def test_importing_it_is_cheap() -> None:
    code = (
        "import sys, pagoda.base.quality_verdict; "
        "sys.exit(','.join({'numpy', 'torch', 'lmdb', 'rich'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
