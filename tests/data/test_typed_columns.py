from __future__ import annotations

import json
from itertools import pairwise
from typing import Any, Literal

import pyarrow as pa
import pytest

from batchgen.config import OutputConfig
from batchgen.data.schema import OutputLayout, huggingface_features, output_layout, output_schema
from batchgen.data.table import output_table
from batchgen.data.typed_columns import ENUM, typed_columns, value_of
from batchgen.errors import JobError
from batchgen.records import RowError
from batchgen.response_format import ResponseFormat
from batchgen.sampling_params import SamplingParams
from tests.data.shards import row, sample
from tests.schema_suite import ACCEPTED, INTEGER, Accepted

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": ["integer", "null"]},
        "kind": {"enum": ["a", "b"]},
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}},
        "at": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "boolean"}}},
    },
    "required": ["name", "age"],
}
PERSON_TYPES = {
    "name": pa.string(),
    "age": pa.int64(),
    "kind": ENUM,
    "tags": pa.list_(ENUM),
    "at": pa.struct([("x", pa.float64()), ("y", pa.bool_())]),
}
SOURCE = pa.schema([("id", pa.int64())])


def form(schema: Any, **fields: Any) -> ResponseFormat:
    return ResponseFormat(type="json_schema", schema=schema, **fields)


def type_of(schema: Any, **fields: Any) -> pa.DataType:
    (column,) = typed_columns(form(schema, **fields), "struct")
    return column.type


def layout(source: pa.Schema = SOURCE, schema: Any = PERSON, **output: Any) -> OutputLayout:
    params = SamplingParams(response_format=form(schema))
    return output_layout(source, OutputConfig.model_validate({"path": "out", **output}), params)


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "string", "format": "date"}, pa.string()),
        ({"type": "integer"}, pa.int64()),
        ({"type": "number"}, pa.float64()),
        ({"type": ["number", "integer", "null"]}, pa.float64()),
        ({"type": "boolean"}, pa.bool_()),
        ({"type": "null"}, pa.string()),
        ({"enum": ["a", None]}, ENUM),
        ({"enum": [None]}, pa.string()),
        ({"enum": [1, 2]}, pa.int64()),
        ({"enum": [1, 2.5]}, pa.float64()),
        ({"enum": [1, "a"]}, pa.string()),
        ({"const": True}, pa.bool_()),
        ({"type": "array", "items": {"type": "integer"}}, pa.list_(pa.int64())),
        ({"type": "array", "items": {}}, pa.list_(pa.string())),
        ({"type": "array"}, pa.string()),
        ({"type": "array", "prefixItems": [INTEGER, {"type": "number"}], "items": False}, pa.list_(pa.float64())),
        ({"type": "array", "prefixItems": [INTEGER, {"type": "string"}], "items": False}, pa.string()),
        ({"type": "object"}, pa.string()),
        ({"type": "object", "properties": {}}, pa.string()),
        ({"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": True}, pa.string()),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, pa.int64()),
        ({"anyOf": [{"type": "integer"}, {"type": "number"}]}, pa.float64()),
        ({"anyOf": [{"enum": ["a"]}, {"type": "string"}]}, pa.string()),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, pa.string()),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, pa.int64()),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "boolean"}}}, pa.bool_()),
        ({}, pa.string()),
    ],
)  # fmt: skip
def test_the_type_of_a_schema(schema: Any, kind: pa.DataType) -> None:
    assert type_of(schema).equals(kind)


def test_a_recursion_is_json_text_where_it_comes_again() -> None:
    tree = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#"}}}
    assert type_of(tree).equals(pa.struct([("v", pa.int64()), ("next", pa.string())]))
    (column,) = typed_columns(form(tree), "struct")
    assert column.of({"v": 1, "next": {"v": 2}}) == {"v": 1, "next": '{"v": 2}'}


def test_references_cannot_make_a_type_without_end() -> None:
    names = [f"d{number}" for number in range(40)]
    defs: dict[str, Any] = {
        name: {"type": "object", "properties": {"a": {"$ref": f"#/$defs/{after}"}, "b": {"$ref": f"#/$defs/{after}"}}}
        for name, after in pairwise(names)
    }
    defs[names[-1]] = {"type": "integer"}
    assert pa.types.is_struct(type_of({"$ref": "#/$defs/d0", "$defs": defs}))


def test_columns_struct_and_text() -> None:
    def types(parse: Literal["columns", "struct", "text"]) -> dict[str, pa.DataType]:
        return {column.name: column.type for column in typed_columns(form(PERSON), parse)}

    assert types("columns") == PERSON_TYPES
    assert types("struct") == {"parsed": pa.struct(list(PERSON_TYPES.items()))}
    assert types("text") == {}
    assert typed_columns(ResponseFormat(type="regex", regex="a"), "columns") == ()


def test_formats_that_rows_select_from_fill_common_columns() -> None:
    def select(*schemas: Any) -> ResponseFormat:
        of = {str(number): form(schema) for number, schema in enumerate(schemas)}
        return ResponseFormat(type="select", by="{{ kind }}", of=of)

    other = {"type": "object", "properties": {"age": {"type": "string"}, "kind": {"enum": ["c"]}}}
    columns = {column.name: column for column in typed_columns(select(PERSON, other), "columns")}
    assert {name: column.type for name, column in columns.items()} == {**PERSON_TYPES, "age": pa.string()}
    assert [columns["age"].of(value) for value in ({"age": 3}, {"age": "old"}, {})] == ["3", '"old"', None]
    (mixed,) = typed_columns(select(PERSON, INTEGER), "columns")
    assert mixed.type == pa.string()
    assert [mixed.of(3), mixed.of({"a": 1})] == ["3", '{"a": 1}']
    choice = ResponseFormat(type="choice", choice=("a", "b"))
    assert typed_columns(ResponseFormat(type="select", by="x", of={"a": form(PERSON), "b": choice}), "columns") == ()


@pytest.mark.parametrize("case", ACCEPTED.values(), ids=ACCEPTED.keys())
@pytest.mark.parametrize("parse", ["columns", "struct"])
def test_every_valid_text_fills_its_columns_and_no_type_is_null(
    case: Accepted, parse: Literal["columns", "struct"]
) -> None:
    for column in typed_columns(form(case.schema), parse):
        assert not has_null_type(column.type)
        cells = [column.of(value_of(text)) for text in case.valid]
        assert pa.array([*cells, None], column.type).null_count >= 1


def has_null_type(kind: pa.DataType) -> bool:
    fields = [kind.field(index).type for index in range(kind.num_fields)]
    return pa.types.is_null(kind) or any(has_null_type(field) for field in fields)


def test_whole_numbers_of_any_size_are_text_by_choice() -> None:
    assert type_of({"type": "integer"}, integers="string").equals(pa.string())
    (column,) = typed_columns(form({"type": "integer"}, integers="string"), "struct")
    assert column.of(value_of("9" * 5000)) == "9" * 5000
    assert column.of(value_of("12")) == "12"


def test_samples_in_lists_have_lists_and_exploded_ones_have_not() -> None:
    schema = output_schema(layout())
    assert schema.names == ["id", "completions", *PERSON_TYPES, "batchgen"]
    assert schema.field("age").type == pa.list_(pa.int64())
    exploded = output_schema(layout(samples="explode", prefix="p_"))
    assert exploded.names == ["id", "p_completion", *(f"p_{name}" for name in PERSON_TYPES), "p_batchgen"]
    assert exploded.field("p_kind").type == ENUM


def test_a_property_named_as_a_column_is_refused_with_the_way_out() -> None:
    with pytest.raises(JobError, match=r"columns? name; set output\.prefix"):
        layout(pa.schema([("name", pa.string())]))
    with pytest.raises(JobError, match=r"the property batchgen, .*output\.parse: struct"):
        layout(schema={"type": "object", "properties": {"batchgen": {"type": "string"}}})
    assert "parsed" in output_schema(layout(pa.schema([("name", pa.string())]), parse="struct")).names


def test_features_describe_enums_by_their_values() -> None:
    features = huggingface_features(output_schema(layout(samples="explode")))
    assert features is not None
    assert features["kind"] == {"dtype": "string", "_type": "Value"}


ADA = {"name": "Ada", "age": 36, "kind": "a", "tags": ["x"], "at": {"x": 1, "y": True}}


def test_cells_of_whole_cut_and_missing_samples() -> None:
    cut = sample('{"name": "B', finish_reason="length")
    rows = [
        row(0, sample(json.dumps(ADA)), cut, error=RowError("incomplete_json", "cut")),
        row(1, error=RowError("null_prompt", "null")),
    ]
    source = pa.table({"id": [0, 1]}, schema=SOURCE)
    listed = output_table(source, rows, layout(), output_schema(layout())).to_pylist()
    assert listed[0]["name"] == ["Ada", None]
    assert listed[0]["at"] == [{"x": 1.0, "y": True}, None]
    assert listed[1]["name"] is None
    exploded = layout(samples="explode")
    cells = output_table(source, rows, exploded, output_schema(exploded)).to_pylist()
    assert [cell["age"] for cell in cells] == [36, None, None]
    assert [cell["completion"] for cell in cells] == [json.dumps(ADA), '{"name": "B', None]
