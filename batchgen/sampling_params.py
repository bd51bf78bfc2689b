"""How completions are drawn: one record for the job file and for Python."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_SEED = 2**63 - 1


class BeamParams(BaseModel):
    """Beam search, with the semantics of transformers' `generate` at batch 1."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    width: Annotated[int, Field(ge=1, description="Beams kept at each step.")]
    length_penalty: Annotated[
        float, Field(description="A finished score is divided by (new tokens) ** length_penalty.")
    ] = 1.0
    early_stopping: Annotated[
        Literal[True, False, "never"],
        Field(description="true: stop at `width` finished beams; false: heuristic; never: until none can improve."),
    ] = False
    num_return: Annotated[int | None, Field(ge=1, description="Beams returned, best first; default: width.")] = None

    @model_validator(mode="after")
    def _check(self) -> BeamParams:
        if self.num_return is not None and self.num_return > self.width:
            raise ValueError(f"num_return is {self.num_return}, but only {self.width} beams are kept; raise width")
        return self


class SamplingParams(BaseModel):
    """Sampling controls; names follow OpenAI's and vLLM's, docs/sampling.md has the table of semantics."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    n: Annotated[int, Field(ge=1, description="Samples returned per prompt.")] = 1
    temperature: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="0 is greedy: the most likely token, the lowest id on ties.")
    ] = 1.0
    top_k: Annotated[
        int | None, Field(ge=-1, description="Keep the k most likely tokens; null, 0 and -1 keep all, 1 is greedy.")
    ] = None
    top_p: Annotated[
        float, Field(gt=0, le=1, description="Keep the smallest set of tokens with at least this probability.")
    ] = 1.0
    max_tokens: Annotated[
        int | None, Field(ge=0, description="Most tokens generated per sample; null: as many as the context leaves.")
    ] = None
    stop: Annotated[
        tuple[str, ...], Field(description="Strings that end a sample; the text is cut before the earliest match.")
    ] = ()
    stop_token_ids: Annotated[tuple[int, ...], Field(description="Token ids that end a sample, besides eos.")] = ()
    ignore_eos: Annotated[bool, Field(description="Go on past end-of-sequence ids.")] = False
    seed: Annotated[
        int | None,
        Field(ge=0, le=MAX_SEED, description="Seed of the random numbers; null: drawn once, shown and stored."),
    ] = None

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the argmax, so that no random number is drawn."""
        return self.temperature == 0 or self.top_k == 1
