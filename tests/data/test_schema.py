"""The output schema is declared once, and no column of it can change with the rows."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from batchgen.config import OutputConfig
from batchgen.data.rows import KeptColumns
from batchgen.data.schema import OutputLayout, huggingface_features, output_layout, output_schema
from batchgen.errors import JobError
from batchgen.sampling_params import SamplingParams

SOURCE = pa.schema([("id", pa.int64()), ("topic", pa.string())])


def layout(source: pa.Schema = SOURCE, **output: object) -> OutputLayout:
    return output_layout(source, OutputConfig.model_validate({"path": "out", **output}), SamplingParams())


def test_list_layout_has_one_list_per_sample_field() -> None:
    schema = output_schema(layout())
    assert schema.names == ["id", "topic", "completions", "batchgen"]
    struct = schema.field("batchgen").type
    assert [field.name for field in struct] == [
        *("source", "row", "sample", "status", "error_code", "error_message", "prompt_tokens"),
        *("finish_reason", "stop_reason", "text_complete", "completion_tokens"),
        *("seed", "cumulative_logprob", "score"),
    ]
    assert struct.field("prompt_tokens").type == pa.int32()
    assert struct.field("seed").type == pa.list_(pa.int64())


def test_exploded_layout_has_plain_sample_fields() -> None:
    schema = output_schema(layout(samples="explode", token_ids=True))
    assert schema.names == ["id", "topic", "completion", "batchgen", "token_ids"]
    assert schema.field("completion").type == pa.string()
    assert schema.field("batchgen").type.field("seed").type == pa.int64()
    assert schema.field("token_ids").type == pa.list_(pa.int32())


def test_null_types_become_strings_at_any_depth() -> None:
    inner = pa.struct([("a", pa.null()), ("b", pa.list_(pa.null()))])
    schema = output_schema(layout(pa.schema([("x", pa.null()), ("y", inner)])))
    assert schema.field("x").type == pa.string()
    assert schema.field("y").type == pa.struct([("a", pa.string()), ("b", pa.list_(pa.string()))])


@pytest.mark.parametrize("name", ["completions", "batchgen"])
def test_taken_name_is_refused_with_the_way_out(name: str) -> None:
    with pytest.raises(JobError, match=rf"column {name}; set output\.prefix"):
        layout(pa.schema([(name, pa.string())]))


def test_prefix_renames_all_our_columns() -> None:
    source = pa.schema([("completions", pa.string()), ("batchgen", pa.string())])
    schema = output_schema(layout(source, prefix="second_", token_ids=True))
    assert schema.names == ["completions", "batchgen", "second_completions", "second_batchgen", "second_token_ids"]


def test_a_name_is_taken_only_in_the_layout_that_uses_it() -> None:
    assert "token_ids" in output_schema(layout(pa.schema([("token_ids", pa.string())]))).names


def test_huggingface_key_describes_every_column() -> None:
    metadata = output_schema(layout()).metadata
    assert metadata is not None
    features = json.loads(metadata[b"huggingface"])["info"]["features"]
    assert features["id"] == {"dtype": "int64", "_type": "Value"}
    assert features["completions"] == [{"dtype": "string", "_type": "Value"}]
    assert features["batchgen"]["cumulative_logprob"] == [{"dtype": "float64", "_type": "Value"}]


def test_huggingface_key_is_left_out_where_a_type_has_no_name_there() -> None:
    assert huggingface_features(pa.schema([("price", pa.decimal128(10, 2))])) is None
    assert output_schema(layout(pa.schema([("price", pa.decimal128(10, 2))]))).metadata is None


def test_logprobs_are_a_column_of_their_own() -> None:
    schema = output_schema(OutputLayout(SOURCE, "list", KeptColumns(logprobs=True)))
    kind = schema.field("logprobs").type
    assert kind.value_type.value_type.value_type == pa.struct(
        [("token_id", pa.int32()), ("logprob", pa.float64()), ("rank", pa.int32())]
    )
