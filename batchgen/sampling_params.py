"""How completions are drawn: one record for the job file and for Python."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from batchgen.bounds import MAX_COUNT
from batchgen.response_format import ResponseFormat

MAX_SEED = 2**63 - 1
MAX_SAMPLES = 2**16
"""Of one prompt: each is a record in memory from the moment when the prompt is admitted."""
MAX_FACTOR = 1e6
"""The logits are computed in float32; with this and the next a product of both stays finite there."""
MAX_BIAS = 1e30

_WHOLE_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}")

TokenId = Annotated[int, Field(ge=0, le=MAX_COUNT)]


def _written_once(key: Any) -> Any:
    """The number of a key that is text, as JSON and job files have it; ValueError for any other way to write one.

    Of two biases for one token, `1` and `01`, one would be lost.
    """
    if not isinstance(key, str):
        return key
    if _WHOLE_NUMBER.fullmatch(key) is None:
        raise ValueError(f"must be a token id, from 0 to {MAX_COUNT}")
    return int(key)


class BeamParams(BaseModel):
    """Beam search, with the semantics of transformers' `generate` at batch 1."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    width: Annotated[int, Field(ge=1, le=MAX_SAMPLES, description="Beams kept at each step.")]
    length_penalty: Annotated[
        float,
        Field(
            ge=-50,
            le=50,
            allow_inf_nan=False,
            description="A finished score is divided by (new tokens) ** length_penalty.",
        ),
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

    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES, description="Samples returned per prompt.")] = 1
    best_of: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_SAMPLES,
            description="Samples drawn, of which the n with the highest mean log-probability are returned.",
        ),
    ] = None
    temperature: Annotated[
        float,
        Field(
            ge=0,
            le=MAX_FACTOR,
            allow_inf_nan=False,
            description="0 is greedy: the most likely token, the lowest id on ties.",
        ),
    ] = 1.0
    top_k: Annotated[
        int | None,
        Field(ge=-1, le=MAX_COUNT, description="Keep the k most likely tokens; null, 0 and -1 keep all, 1 is greedy."),
    ] = None
    top_p: Annotated[
        float, Field(gt=0, le=1, description="Keep the smallest set of tokens with at least this probability.")
    ] = 1.0
    min_p: Annotated[
        float, Field(ge=0, le=1, description="Drop tokens less likely than this share of the most likely one.")
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Field(
            ge=1 / MAX_FACTOR,
            le=MAX_FACTOR,
            allow_inf_nan=False,
            description="Divides positive logits of tokens seen in prompt or output.",
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float, Field(ge=-2, le=2, description="Taken off the logits of tokens that were generated.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, Field(ge=-2, le=2, description="Taken off once for each time a token was generated.")
    ] = 0.0
    logit_bias: Annotated[
        dict[
            Annotated[TokenId, BeforeValidator(_written_once)],
            Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS, allow_inf_nan=False)],
        ],
        Field(description="Added to the logits of token ids, before the penalties; -100 as good as bans one."),
    ] = {}
    bad_words: Annotated[
        tuple[str, ...], Field(description="Words that are never generated, with and without a space before them.")
    ] = ()
    min_tokens: Annotated[
        int,
        Field(ge=0, le=MAX_COUNT, description="No eos, stop id or stop string ends a sample before this many tokens."),
    ] = 0
    max_tokens: Annotated[
        int | None,
        Field(
            ge=0,
            le=MAX_COUNT,
            description="Most tokens generated per sample; null: as many as the context leaves; 0: score only.",
        ),
    ] = None
    stop: Annotated[
        tuple[str, ...], Field(description="Strings that end a sample; the text is cut before the earliest match.")
    ] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], Field(description="Token ids that end a sample, besides eos.")] = ()
    include_stop: Annotated[bool, Field(description="Leave the stop string or stop token in the text.")] = False
    ignore_eos: Annotated[bool, Field(description="Go on past end-of-sequence ids.")] = False
    logprobs: Annotated[
        int | None,
        Field(
            ge=0,
            le=MAX_COUNT,
            description="Raw log-probabilities of each drawn token and of this many most likely ones.",
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None, Field(ge=0, le=MAX_COUNT, description="The same for each token of the prompt but the first.")
    ] = None
    seed: Annotated[
        int | None,
        Field(ge=0, le=MAX_SEED, description="Seed of the random numbers; null: drawn once, shown and stored."),
    ] = None
    beam: Annotated[BeamParams | None, Field(description="Beam search in place of sampling.")] = None
    response_format: Annotated[
        ResponseFormat | None, Field(description="What the text of every sample must be; docs/structured.md.")
    ] = None
    on_incomplete: Annotated[
        Literal["error", "retry"],
        Field(
            description="With response_format, when max_tokens cuts a sample: error: its row is an error; retry: it "
            "goes on, up to twice max_tokens."
        ),
    ] = "error"

    @model_validator(mode="after")
    def _check(self) -> SamplingParams:
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of is {self.best_of}, but n asks for {self.n} of them; raise best_of")
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, but max_tokens only {self.max_tokens}")
        if any(not word for word in (*self.stop, *self.bad_words)):
            raise ValueError("stop and bad_words must not hold an empty string")
        if self.beam is not None:
            self._check_beam()
        if self.response_format is not None:
            self._check_response_format()
        elif self.on_incomplete != "error":
            raise ValueError("on_incomplete goes with response_format; leave it out")
        return self

    def _check_response_format(self) -> None:
        if self.beam is not None:
            raise ValueError("response_format does not go with beam: beams are compared over all tokens; use n")
        for name in ("stop", "stop_token_ids", "min_tokens", "ignore_eos", "include_stop", "bad_words"):
            if getattr(self, name):
                raise ValueError(
                    f"{name} does not go with response_format, which says where a sample ends; leave it out"
                )
        if self.max_tokens == 0:
            raise ValueError(
                "max_tokens is 0, which generates nothing; leave response_format out to score prompts alone"
            )

    def _check_beam(self) -> None:
        for name, neutral in (("n", 1), ("best_of", None), ("top_k", None), ("top_p", 1.0), ("min_p", 0.0)):
            if getattr(self, name) != neutral:
                raise ValueError(
                    f"{name} goes with sampling, not with beam; leave it out (beam.num_return returns more)"
                )
        if self.max_tokens == 0:
            raise ValueError(
                "max_tokens is 0, which generates nothing to search; leave beam out to score prompts alone"
            )
        if self.temperature not in (0.0, 1.0):
            raise ValueError("temperature goes with sampling, not with beam; leave it out")

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the argmax, so that no random number is drawn."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def num_sequences(self) -> int:
        """Samples that are drawn; for beams the one that the search starts from."""
        return self.best_of or self.n

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens seen so far change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
