"""The section `prompt` of the job file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from batchgen.config_values import Template

PROMPT_KINDS = ("template", "column", "messages", "messages_column", "request_column", "token_ids_column")
"""The keys of which a job gives exactly one."""
CHAT_KINDS = ("messages", "messages_column", "request_column")

_CHAT_KEYS = ("chat_template", "system", "assistant_prefill", "chat_template_kwargs", "tools")
_SYSTEM_ROLES = ("system", "developer")


class Message(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"], Field(description="Who speaks in this message.")
    ]
    content: Annotated[Template, Field(description="Jinja template over the row's columns.")]


class FewShotConfig(BaseModel):
    """Examples before the prompt of each row: the same template or messages over other values, with their answers."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", json_schema_extra={"oneOf": [{"required": ["examples"]}, {"required": ["path"]}]}
    )

    examples: Annotated[
        list[dict[str, Any]] | None,
        Field(
            min_length=1,
            description="One mapping of column to value for each example.",
            examples=[[{"question": "2 + 2?", "answer": "4"}]],
        ),
    ] = None
    # Left out of what is stored: `load_job` puts the examples of the file in their place.
    path: Annotated[
        str | None,
        Field(
            min_length=1,
            exclude=True,
            description="File of examples instead: JSON lines, or a list in JSON or YAML; relative to the job file.",
            examples=["shots.jsonl"],
        ),
    ] = None
    limit: Annotated[
        int | None, Field(ge=1, exclude=True, description="Take only the first examples of the file; null: all.")
    ] = None
    answer: Annotated[
        Template,
        Field(description="Jinja template of an example's answer, over its values.", examples=["{{ answer }}"]),
    ]
    separator: Annotated[str, Field(description="Text after each example; not used with messages.")] = "\n\n"

    @model_validator(mode="after")
    def _check(self) -> FewShotConfig:
        if self.path is not None and self.examples is None:
            raise ValueError("path is read with the job file; a job made in Python gives examples")
        if self.examples is None or self.path is not None:
            raise ValueError("give exactly one of examples and path")
        if self.limit is not None:
            raise ValueError("limit goes with path; remove it")
        return self


class PromptConfig(BaseModel):
    """How rows become prompts: one of template, column, messages, messages_column, request_column, token_ids_column."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        json_schema_extra={"oneOf": [{"required": [key]} for key in PROMPT_KINDS]},
    )

    template: Annotated[
        Template | None,
        Field(description="Jinja template over the row's columns.", examples=["Write about {{ topic }}."]),
    ] = None
    column: Annotated[
        str | None, Field(min_length=1, description="Column that holds the prompt as it is.", examples=["prompt"])
    ] = None
    messages: Annotated[
        list[Message] | None,
        Field(
            min_length=1,
            description="Chat messages, rendered through the model's chat template; each content is a Jinja template.",
            examples=[[{"role": "user", "content": "{{ question }}"}]],
        ),
    ] = None
    messages_column: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Column that holds a whole chat: a list of role and content, or such a list as JSON text.",
            examples=["messages"],
        ),
    ] = None
    request_column: Annotated[
        str | None,
        Field(
            min_length=1,
            description="Column that holds the body of an OpenAI request: messages or prompt, and parameters that "
            "stand before those of `sampling`.",
            examples=["body"],
        ),
    ] = None
    token_ids_column: Annotated[
        str | None,
        Field(min_length=1, description="Column that holds the prompt as a list of token ids.", examples=["input_ids"]),
    ] = None
    system: Annotated[
        Template | None,
        Field(description="Jinja template of a system message, put before chats that have none."),
    ] = None
    few_shot: Annotated[
        FewShotConfig | None, Field(description="Examples before the prompt, with template or messages.")
    ] = None
    assistant_prefill: Annotated[
        Template | None,
        Field(description="Jinja template of how the assistant's answer begins; the completion goes on after it."),
    ] = None
    allow_special_tokens: Annotated[
        bool, Field(description="Let control tokens spelt in row data act as such; false: they are plain text.")
    ] = False
    truncate: Annotated[
        Literal["error", "left", "right", "middle"],
        Field(description="A prompt that does not fit: an error row, or cut at this side."),
    ] = "error"
    chat_template: Annotated[
        Template | None, Field(description="Jinja chat template for chats; null: the model's.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, bool | int | float | str | None] | None,
        Field(description="Variables that the chat template reads.", examples=[{"enable_thinking": False}]),
    ] = None
    tools: Annotated[
        list[dict[str, Any]] | None,
        Field(description="Tools as JSON schemas, for chat templates that take them."),
    ] = None

    @property
    def kind(self) -> str:
        """The key of PROMPT_KINDS that is given."""
        return next(key for key in PROMPT_KINDS if getattr(self, key) is not None)

    @property
    def is_chat(self) -> bool:
        """Whether the prompt goes through a chat template."""
        return self.kind in CHAT_KINDS

    @model_validator(mode="after")
    def _check(self) -> PromptConfig:
        given = [key for key in PROMPT_KINDS if getattr(self, key) is not None]
        if len(given) != 1:
            found = f"got {' and '.join(given)}" if given else "got none"
            raise ValueError(f"give exactly one of {', '.join(PROMPT_KINDS[:-1])} and {PROMPT_KINDS[-1]}, {found}")
        for key in _CHAT_KEYS:
            if getattr(self, key) is not None and given[0] not in CHAT_KINDS:
                raise ValueError(f"{key} goes with {' or '.join(CHAT_KINDS)}; with {given[0]} remove it")
        if self.few_shot is not None and given[0] not in ("template", "messages"):
            raise ValueError(f"few_shot goes with template or messages; with {given[0]} remove it")
        if self.system is not None and self.messages and self.messages[0].role in _SYSTEM_ROLES:
            raise ValueError(f"messages begins with a message by {self.messages[0].role} already; remove system")
        return self
