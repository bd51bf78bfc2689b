from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.config import JobConfig, identity_defaults, job_schema, load_job
from batchgen.config_yaml import read_yaml
from batchgen.errors import ExitCode, JobFileError

JOB_FILES = Path(__file__).parent / "job_files"
VALID = sorted(JOB_FILES.glob("valid/*.yaml"))
INVALID = sorted(JOB_FILES.glob("invalid/*.yaml"))
SHIPPED = sorted((Path(__file__).parents[1] / "jobs").glob("*.yaml"))
SMALLEST = JOB_FILES / "valid/smallest.yaml"
EXPECT = "# expect: "


def problems_of(path: Path | str, overrides: Sequence[str] = ()) -> list[str]:
    with pytest.raises(JobFileError) as caught:
        load_job(path, overrides)
    return caught.value.problems


def write_job(directory: Path, text: str) -> Path:
    path = directory / "job.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
def test_valid_job_file_loads_and_matches_the_schema(path: Path) -> None:
    job = load_job(path)
    assert job.version == 1
    document = read_yaml(path.read_text(), path.name).data
    sections = {key: {} if value is None else value for key, value in document.items()}
    jsonschema.validate(sections, job_schema())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_job_is_valid(path: Path) -> None:
    job = load_job(path)
    assert (path.parent / str(job.input.path)).exists()
    jsonschema.validate(read_yaml(path.read_text(), path.name).data, job_schema())


@pytest.mark.parametrize("path", INVALID, ids=lambda path: path.stem)
def test_invalid_job_file_reports_what_it_says_it_must(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    lines = path.read_text().splitlines()
    expected = [line.removeprefix(EXPECT) for line in lines if line.startswith(EXPECT)]
    assert expected
    assert problems_of(path.name) == expected


def test_a_wrong_job_file_ends_with_exit_code_2() -> None:
    assert JobFileError.exit_code is ExitCode.JOB_REFUSED == 2


def test_defaults_are_those_that_the_smallest_job_gets() -> None:
    job = load_job(SMALLEST)
    assert (job.model.dtype, job.model.max_model_len) == ("auto", "auto")
    assert (job.sampling.n, job.sampling.temperature, job.sampling.top_p) == (1, 1.0, 1.0)
    assert (job.engine.block_size, job.engine.kv_cache_memory) == (16, "auto")
    assert (job.output.samples, job.output.shard_rows) == ("list", 4096)
    assert (job.run.grace, job.run.max_runtime) == (30.0, None)


def test_sizes_times_and_yaml_1_2_scalars_have_their_meaning() -> None:
    job = load_job(JOB_FILES / "valid/every_key.yaml", today=datetime.date(2026, 2, 3))
    assert job.engine.kv_cache_memory == 256 * 1024**2
    assert (job.run.max_runtime, job.run.grace, job.run.journal_interval) == (5400.0, 30.0, 5.0)
    assert job.sampling.stop == ("\n\n",)
    assert load_job(JOB_FILES / "valid/quoted_brace.yaml").run.max_runtime == 1000.0
    assert load_job(JOB_FILES / "valid/alias.yaml").input.columns == ["id", "no", "on", "007x"]


def test_config_is_frozen() -> None:
    job = load_job(SMALLEST)
    with pytest.raises(ValueError, match="frozen"):
        job.sampling.n = 2  # type: ignore[misc]


class TestOverrides:
    def test_set_changes_one_key_and_keeps_its_neighbours(self) -> None:
        job = load_job(JOB_FILES / "valid/every_key.yaml", ["sampling.temperature=0", "sampling.stop=[END, 'a b']"])
        assert job.sampling.temperature == 0
        assert job.sampling.stop == ("END", "a b")
        assert job.sampling.n == 4

    def test_the_last_of_two_wins(self) -> None:
        assert load_job(SMALLEST, ["sampling.n=2", "sampling.n=3"]).sampling.n == 3

    def test_a_value_may_hold_an_equals_sign(self) -> None:
        job = load_job(SMALLEST, ["prompt.column=null", "prompt.template=a=b"])
        assert job.prompt.template == "a=b"

    def test_a_whole_section_is_replaced(self) -> None:
        job = load_job(JOB_FILES / "valid/every_key.yaml", ["sampling={n: 2}"])
        assert (job.sampling.n, job.sampling.temperature) == (2, 1.0)

    def test_an_override_mends_a_wrong_file(self, tmp_path: Path) -> None:
        path = write_job(tmp_path, SMALLEST.read_text() + "sampling: {n: 0}\n")
        assert load_job(path, ["sampling.n=1"]).sampling.n == 1

    def test_an_alias_is_changed_in_one_place_only(self, tmp_path: Path) -> None:
        path = write_job(tmp_path, SMALLEST.read_text() + "engine: &x {}\nrun: *x\n")
        assert load_job(path, ["run.grace=1"]).engine.block_size == 16

    @pytest.mark.parametrize(
        ("override", "problem"),
        [
            ("sampling.temprature=1", '--set sampling.temprature: unknown key; did you mean "temperature"?'),
            ("sampling.n=two", '--set sampling.n: must be a whole number, got the text "two"'),
            ("sampling={n: 0}", "--set sampling.n: must be >= 1, got 0"),
            ("sampling.n", "--set sampling.n: must be section.key=value, such as sampling.temperature=0.5"),
            ("=1", "--set =1: must be section.key=value, such as sampling.temperature=0.5"),
            ("version.x=1", "--set version.x: version is no mapping"),
            ("sampling.stop=[a", "--set sampling.stop: not valid YAML: while parsing a flow sequence, expected "),
            ("sampling.n={n: 1, n: 2}", "--set sampling.n: n: given twice, first in line 1; keep one"),
            ("sampling=3", "--set sampling: must be a mapping of keys, got 3"),
            ("base_dir=/", "--set base_dir: unknown key"),
            ("variables={}", "--set variables: unknown key"),
            ("output.path=${x}", "--set output.path: ${x} is unknown; use ${run_date} or ${env:NAME}"),
        ],
    )
    def test_a_wrong_override_is_reported_as_one(self, override: str, problem: str) -> None:
        (found,) = problems_of(SMALLEST, [override])
        assert found.startswith(problem)

    def test_problems_of_file_and_overrides_come_together_the_file_first(self, tmp_path: Path) -> None:
        path = write_job(tmp_path, SMALLEST.read_text() + "run: {gracee: 1}\n")
        found = problems_of(path, ["nonsense", "sampling.n=0"])
        assert [line.split(": ")[0] for line in found] == [f"{path}:6:7", "--set nonsense", "--set sampling.n"]


class TestFile:
    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            (b"", ": the file is empty; a job has version, model, input, prompt and output"),
            (b"# only a comment\n", ": the file is empty; a job has version, model, input, prompt and output"),
            (b"- 1\n", ":1:1: must be a mapping of sections such as `model:` and `input:`"),
            (b"version: 1\n# caf\xe9\n", ":2: byte 0xE9 is not UTF-8"),
            (b"#" * (1 << 20) + b"\n", ": larger than 1 MiB; a job file names its data, it does not hold it"),
        ],
    )
    def test_a_file_that_is_no_job_is_refused(self, tmp_path: Path, content: bytes, problem: str) -> None:
        path = tmp_path / "job.yaml"
        path.write_bytes(content)
        assert problems_of(path) == [f"{path}{problem}"]

    def test_a_file_that_cannot_be_read_is_refused(self, tmp_path: Path) -> None:
        missing = tmp_path / "nope.yaml"
        assert problems_of(missing) == [
            f"{missing}: cannot be read: No such file or directory; batchgen init DATA writes a first job file"
        ]
        assert problems_of(tmp_path) == [f"{tmp_path}: cannot be read: Is a directory"]

    def test_a_byte_order_mark_and_windows_lines_change_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / "job.yaml"
        path.write_bytes(b"\xef\xbb\xbf" + SMALLEST.read_bytes().replace(b"\n", b"\r\n"))
        assert load_job(path).identity() == load_job(SMALLEST).identity()


class TestPaths:
    def test_paths_are_relative_to_the_job_file(self, tmp_path: Path) -> None:
        path = write_job(tmp_path, SMALLEST.read_text())
        job = load_job(path)
        assert job.base_dir == tmp_path
        assert job.output_dir == tmp_path / "out"
        assert load_job(path, [f"output.path={tmp_path}/x"]).output_dir == tmp_path / "x"

    def test_a_model_is_local_only_where_it_exists_or_is_written_as_a_path(self, tmp_path: Path) -> None:
        path = write_job(tmp_path, SMALLEST.read_text())
        (tmp_path / "here").mkdir()
        sources = {
            "here": str(tmp_path / "here"),
            "org/name": "org/name",
            "./gone": str(tmp_path / "gone"),
            "gone.gguf": str(tmp_path / "gone.gguf"),
            "package:a/b.gguf": "package:a/b.gguf",
            "/abs/model": "/abs/model",
        }
        assert {given: load_job(path, [f"model.path={given}"]).model_source for given in sources} == sources

    def test_output_path_takes_variables_and_the_date(self) -> None:
        overrides = ["output.path=${env:ROOT}/${run_date}/x"]
        job = load_job(SMALLEST, overrides, environ={"ROOT": "/data"}, today=datetime.date(2026, 2, 3))
        assert job.output_dir == Path("/data/2026-02-03/x")

    def test_output_path_is_kept_as_it_is_written(self) -> None:
        secret = "hunter2"
        job = load_job(SMALLEST, ["output.path=${env:KEY}/${run_date}"], environ={"KEY": secret})
        assert job.output.path == "${env:KEY}/${run_date}"
        assert secret not in job.model_dump_json() + repr(job)

    def test_what_output_path_comes_to_is_checked(self) -> None:
        with pytest.raises(JobFileError, match=r"output\.path: must be a local directory"):
            load_job(SMALLEST, ["output.path=${env:STORE}/x"], environ={"STORE": "s3://bucket"})

    def test_dollar_braces_elsewhere_are_text(self) -> None:
        job = load_job(SMALLEST, ["prompt={template: 'pay ${env:HOME}'}"])
        assert job.prompt.template == "pay ${env:HOME}"


class TestIdentity:
    @pytest.mark.parametrize(
        "override",
        [
            *("engine.block_size=32", "engine.kv_cache_memory=1GiB", "engine.device=cpu", "engine.threads=1"),
            *("run.grace=1", "run.max_error_rate=0", "output.path=elsewhere", "output.shard_rows=1"),
        ],
    )
    def test_operational_keys_are_no_part_of_it(self, override: str) -> None:
        assert load_job(SMALLEST, [override]).identity() == load_job(SMALLEST).identity()

    @pytest.mark.parametrize(
        ("override", "key"),
        [
            ("sampling.temperature=0.5", "sampling.temperature"),
            ("sampling.seed=3", "sampling.seed"),
            ("model.path=other/model", "model.path"),
            ("model.dtype=float32", "model.dtype"),
            ("model.max_model_len=100", "model.max_model_len"),
            ("prompt.column=other", "prompt.column"),
            ("prompt.truncate=left", "prompt.truncate"),
            ("input.columns=[id]", "input.columns"),
            ("input.limit=3", "input.limit"),
            ("output.samples=explode", "output.samples"),
            ("output.prefix=x_", "output.prefix"),
        ],
    )
    def test_whatever_can_change_a_row_is_named_in_it(self, override: str, key: str) -> None:
        before, after = load_job(SMALLEST).identity(), load_job(SMALLEST, [override]).identity()
        assert {name for name in before | after if before.get(name) != after.get(name)} == {key}

    def test_it_is_plain_json(self) -> None:
        identity = load_job(JOB_FILES / "valid/every_key.yaml").identity()
        assert json.loads(json.dumps(identity)) == identity
        assert identity["input.schema"] == {"id": "string"}


def test_defaults_of_the_identity_are_those_of_a_job_that_gives_only_what_it_must() -> None:
    identity = load_job(SMALLEST).identity()
    given = {"version", "model.path", "input.path", "prompt.column"}
    defaults = {**identity_defaults()}
    assert defaults.pop("prompt.column") is None
    assert defaults == {key: value for key, value in identity.items() if key not in given}


def test_every_key_has_a_description_and_either_a_default_or_is_required() -> None:
    schema = job_schema()
    for definition in schema["$defs"].values():
        for name, key in definition["properties"].items():
            assert key["description"].endswith((".", ";")), name
            assert "default" in key or name in definition["required"], name


def test_python_builds_the_same_record_as_a_file() -> None:
    built = JobConfig.model_validate(
        {
            "version": 1,
            "model": {"path": "some-org/some-model"},
            "input": {"path": "rows.jsonl"},
            "prompt": {"column": "prompt"},
            "output": {"path": "out"},
            "base_dir": SMALLEST.parent,
        }
    )
    assert built == load_job(SMALLEST)


@given(st.text(max_size=200))
def test_any_text_is_a_job_or_a_list_of_problems(text: str) -> None:
    document = read_yaml(text, "job.yaml")
    assert document.problems or document.data is None or isinstance(document.data, str | int | float | list | dict)
