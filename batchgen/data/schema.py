"""The declared schema of the output: known before the first row is generated, and the same in every shard."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from batchgen.config import OutputConfig
from batchgen.data.rows import KeptColumns
from batchgen.data.typed_columns import TypedColumn, typed_columns
from batchgen.errors import JobError
from batchgen.sampling_params import SamplingParams

TOKEN_LOGPROB = pa.struct([("token_id", pa.int32()), ("logprob", pa.float64()), ("rank", pa.int32())])

ROW_FIELDS: list[tuple[str, pa.DataType]] = [
    ("source", pa.int32()),
    ("row", pa.int64()),
    ("sample", pa.int32()),
    ("status", pa.string()),
    ("error_code", pa.string()),
    ("error_message", pa.string()),
]
SAMPLE_FIELDS: list[tuple[str, pa.DataType]] = [
    ("finish_reason", pa.string()),
    ("stop_reason", pa.string()),
    ("text_complete", pa.bool_()),
    ("completion_tokens", pa.int32()),
    ("seed", pa.int64()),
    ("cumulative_logprob", pa.float64()),
    ("score", pa.float64()),
]


class OutputLayout(NamedTuple):
    """Which columns the output has, and under which names."""

    source_schema: pa.Schema
    samples: Literal["list", "explode"]
    kept: KeptColumns = KeptColumns()
    prefix: str = ""
    typed: tuple[TypedColumn, ...] = ()
    """Columns that are filled from the values of the texts."""

    @property
    def exploded(self) -> bool:
        """Whether each sample is a row of its own."""
        return self.samples == "explode"

    @property
    def completion_name(self) -> str:
        return self.prefix + ("completion" if self.exploded else "completions")

    @property
    def struct_name(self) -> str:
        return self.prefix + "batchgen"

    def texts(self, row: Mapping[str, Any]) -> list[str]:
        """The texts of a row of the output; a sample that failed has none."""
        value = row[self.completion_name]
        listed = [value] if self.exploded else value or []
        return [text for text in listed if text is not None]

    def readable(self, names: Iterable[str]) -> list[str]:
        """Those columns of the output that people read beside its texts: no record, no ids, no log-probabilities."""
        bulky = {self.prefix + name for name in ("token_ids", "logprobs", "prompt_logprobs")}
        return [name for name in names if name not in bulky | {self.struct_name, self.completion_name}]


def output_layout(source_schema: pa.Schema, output: OutputConfig, sampling: SamplingParams) -> OutputLayout:
    """Lay out the columns of a job's output; JobError where a source column has one of our names."""
    kept = KeptColumns(
        token_ids=output.token_ids,
        logprobs=sampling.logprobs is not None,
        prompt_logprobs=sampling.prompt_logprobs is not None,
        reasoning=output.reasoning == "split",
    )
    typed = typed_columns(sampling.response_format, output.parse)
    layout = OutputLayout(_without_null_types(source_schema), output.samples, kept, output.prefix or "", typed)
    ours = [field.name for field in _own_fields(layout)]
    twice = sorted({name for name in ours if ours.count(name) > 1})
    if twice:
        raise JobError(
            f"the schema of sampling.response_format has the property {', '.join(twice)}, which is the name of another "
            "column of the output; set output.parse: struct, or name the property otherwise"
        )
    taken = sorted(set(ours) & set(source_schema.names))
    if taken:
        raise JobError(
            f"the input already has the column{'s' if len(taken) > 1 else ''} {', '.join(taken)}; set output.prefix "
            f"(such as 'second_') to name ours otherwise, or leave them out with input.columns"
        )
    return layout


def output_schema(layout: OutputLayout) -> pa.Schema:
    """The Arrow schema of every shard: source columns, then ours; metadata holds the `huggingface` features key."""
    schema = pa.schema([*layout.source_schema, *_own_fields(layout)])
    features = huggingface_features(schema)
    if features is None:
        return schema
    return schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def struct_type(layout: OutputLayout) -> pa.StructType:
    """Type of the column `batchgen`."""
    return pa.struct(
        [
            *ROW_FIELDS,
            ("prompt_tokens", pa.int32()),
            *((name, _per_sample(layout, kind)) for name, kind in SAMPLE_FIELDS),
        ]
    )


def typed_fields(layout: OutputLayout) -> list[pa.Field[pa.DataType]]:
    """The columns that are filled from the values of the texts."""
    return [pa.field(layout.prefix + column.name, _per_sample(layout, column.type)) for column in layout.typed]


def _own_fields(layout: OutputLayout) -> list[pa.Field[pa.DataType]]:
    fields = [
        pa.field(layout.completion_name, _per_sample(layout, pa.string())),
        *typed_fields(layout),
        pa.field(layout.struct_name, struct_type(layout)),
    ]
    if layout.kept.reasoning:
        fields.append(pa.field(layout.prefix + "reasoning", _per_sample(layout, pa.string())))
    if layout.kept.token_ids:
        fields.append(pa.field(layout.prefix + "token_ids", _per_sample(layout, pa.list_(pa.int32()))))
    if layout.kept.logprobs:
        per_token = pa.list_(pa.list_(TOKEN_LOGPROB))
        fields.append(pa.field(layout.prefix + "logprobs", _per_sample(layout, per_token)))
    if layout.kept.prompt_logprobs:
        # Of the row, not of a sample: one list also where samples are a list, null for the first token.
        fields.append(pa.field(layout.prefix + "prompt_logprobs", pa.list_(pa.list_(TOKEN_LOGPROB))))
    return fields


def _per_sample(layout: OutputLayout, kind: pa.DataType) -> pa.DataType:
    return kind if layout.exploded else pa.list_(kind)


def _without_null_types(schema: pa.Schema) -> pa.Schema:
    """A column that never held a value is a string column: a null type merges with nothing."""
    return pa.schema([pa.field(field.name, _concrete(field.type)) for field in schema])


def _concrete(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_concrete(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(_concrete(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _concrete(field.type)) for field in kind])
    return kind


def huggingface_features(schema: pa.Schema) -> dict[str, Any] | None:
    """The `datasets` library's description of the columns; None where it has no word for one of the types."""
    features = {field.name: _feature(field.type) for field in schema}
    return None if None in features.values() else features


def _feature(kind: pa.DataType) -> Any:
    if pa.types.is_dictionary(kind):
        return _feature(kind.value_type)
    if pa.types.is_struct(kind):
        inner = {field.name: _feature(field.type) for field in kind}
        return None if None in inner.values() else inner
    if pa.types.is_list(kind):
        # A list of one feature is read by every release of datasets; the named list types changed with 4.0.
        element = _feature(kind.value_type)
        return None if element is None else [element]
    dtype = _value_dtype(kind)
    return None if dtype is None else {"dtype": dtype, "_type": "Value"}


def _value_dtype(kind: pa.DataType) -> str | None:
    if pa.types.is_floating(kind):
        return f"float{kind.bit_width}"
    if pa.types.is_date(kind):
        return f"date{kind.bit_width}"
    plain = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_string, pa.types.is_large_string)
    if any(test(kind) for test in (*plain, pa.types.is_binary, pa.types.is_large_binary, pa.types.is_timestamp)):
        return str(kind)
    return None
