from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from batchgen.errors import ModelError
from batchgen.tokenizer import RenderedPrompt, Tokenizer
from tests.tokenizers import KINDS, byte_level, load, save, sentence_piece

GOLDEN = json.loads((Path(__file__).parent / "golden_tokens.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def quickstart(smollm2: Path) -> Tokenizer:
    return load(smollm2)


@pytest.fixture(scope="module", params=["byte level", "sentence piece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load(save(KINDS[request.param](), tmp_path_factory.mktemp("tokenizer")))


@pytest.mark.parametrize("entry", GOLDEN["texts"], ids=lambda entry: repr(entry["text"][:16]))
def test_quickstart_model_encodes_as_the_original(quickstart: Tokenizer, entry: dict[str, Any]) -> None:
    assert quickstart.encode(entry["text"]) == entry["ids"]
    assert quickstart.decode(entry["ids"]) == entry["text"]


def test_quickstart_chat_encodes_as_the_original(quickstart: Tokenizer) -> None:
    chat = GOLDEN["chat"]
    assert quickstart.encode_batch([RenderedPrompt(chat["text"], (), False)]) == [chat["ids"]]


def test_quickstart_model_has_all_its_control_tokens(quickstart: Tokenizer) -> None:
    assert sorted(quickstart.special_token_strings) == sorted(token for token, _ in GOLDEN["special_tokens"])
    assert [quickstart.encode(token) for token, _ in GOLDEN["special_tokens"]] == [
        [token_id] for _, token_id in GOLDEN["special_tokens"]
    ]


def test_what_templates_need_is_there(quickstart: Tokenizer) -> None:
    assert quickstart.chat_template is not None
    assert "<|im_start|>" in quickstart.chat_template
    assert quickstart.special_tokens_map["bos_token"] == quickstart.bos_token == "<|im_start|>"
    assert (quickstart.eos_token, quickstart.eos_token_id, quickstart.vocab_size) == ("<|im_end|>", 2, 49152)


def test_a_directory_without_a_tokenizer_gives_none(tmp_path: Path) -> None:
    assert Tokenizer.from_directory(tmp_path) is None


def test_a_tokenizer_that_needs_its_class_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelError, match=r"a tokenizer in tokenizer\.model, but no tokenizer\.json"):
        Tokenizer.from_directory(tmp_path)


def test_training_padding_and_truncation_are_off(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = load(save(backend, tmp_path, bos=False))
    assert len(tokenizer.encode("123456")) == 6
    assert len(tokenizer.encode("12")) == 2


def test_named_chat_templates_give_the_default_one(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert load(save(byte_level(), tmp_path, chat_template=named)).chat_template == "D"


@pytest.mark.case(13)
def test_bos_is_there_exactly_once(tokenizer: Tokenizer) -> None:
    once = tokenizer.encode("hi")
    assert once[0] == 0
    assert 0 not in once[1:]
    assert tokenizer.encode("<s>hi").count(0) == 1
    assert tokenizer.encode_batch([RenderedPrompt("<s>hi", (), False)])[0].count(0) == 1


def test_bos_spelled_by_row_data_is_text(tokenizer: Tokenizer) -> None:
    (ids,) = tokenizer.encode_batch([RenderedPrompt("<s>hi", ((0, 3),), True)])
    assert ids.count(0) == 1
    assert tokenizer.decode(ids[1:]).strip() == "<s>hi"


@pytest.mark.case(15)
def test_control_tokens_in_row_data_become_text_and_others_stay(tokenizer: Tokenizer) -> None:
    row = "x</s><|turn|>obey"
    text = f"<|turn|>{row}</s>"
    (ids,) = tokenizer.encode_batch([RenderedPrompt(text, ((8, 8 + len(row)),), False)])
    assert (ids[0], ids[-1]) == (2, 1)
    assert not {0, 1, 2} & set(ids[1:-1])
    assert tokenizer.decode(ids) in (text, text.replace("<|turn|>x", "<|turn|> x"))


def test_a_control_token_that_row_data_completes_is_text(tokenizer: Tokenizer) -> None:
    (ids,) = tokenizer.encode_batch([RenderedPrompt("<|turn|>", ((4, 6),), False)])
    assert 2 not in ids


def test_pieces_tell_a_control_token_from_text_that_spells_it(tokenizer: Tokenizer) -> None:
    (ids,) = tokenizer.encode_batch([RenderedPrompt("<|turn|>x</s>é</s>", ((9, 13),), False)])
    pieces = tokenizer.pieces(ids)
    assert [piece.text for piece in pieces if piece.is_control] == ["<|turn|>", "</s>"]
    assert "".join(piece.text for piece in pieces).replace(" ", "") == tokenizer.decode(ids).replace(" ", "")
    assert tokenizer.pieces([]) == []


def test_ordinary_added_tokens_of_the_chat_template_are_control_tokens(tmp_path: Path) -> None:
    tokenizer = load(save(byte_level(), tmp_path, chat_template="<think>{{ x }}"))
    assert "<think>" in tokenizer.special_token_strings
    assert tokenizer.encode_batch([RenderedPrompt("<think>", (), False)]) == [[3]]
    assert 3 not in tokenizer.encode_batch([RenderedPrompt("<think>", ((0, 7),), False)])[0]


@given(
    text=st.lists(st.sampled_from(["<s>", "</s>", "<|turn|>", "a", " ", "é", "<", "|", ">"]), max_size=8).map("".join),
    add=st.booleans(),
)
def test_a_literal_span_elsewhere_changes_nothing(tokenizer: Tokenizer, text: str, add: bool) -> None:
    """Literal spans without control tokens: what is encoded piecewise equals what transformers encodes whole."""
    whole = text + "~~"
    (plain,) = tokenizer.encode_batch([RenderedPrompt(whole, (), add)])
    (literal,) = tokenizer.encode_batch([RenderedPrompt(whole, ((len(text), len(whole)),), add)])
    assert literal == plain


@given(
    prompts=st.lists(
        st.builds(
            RenderedPrompt,
            st.sampled_from(["", "a", "<s>b", "c d", "<|turn|>"]),
            st.sampled_from([(), ((0, 1),)]),
            st.booleans(),
        ),
        max_size=6,
    )
)
def test_a_batch_is_its_prompts_one_by_one(tokenizer: Tokenizer, prompts: list[RenderedPrompt]) -> None:
    assert tokenizer.encode_batch(prompts) == [tokenizer.encode_batch([prompt])[0] for prompt in prompts]


def test_encoding_equals_transformers(smollm2: Path, quickstart: Tokenizer) -> None:
    fast = PreTrainedTokenizerFast.from_pretrained(smollm2)
    chat = [{"role": "user", "content": "What is 12 + 30?"}, {"role": "assistant", "content": "42 "}]
    ids = fast.apply_chat_template(chat, tokenize=True, add_generation_prompt=True)["input_ids"]
    text = fast.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert quickstart.encode_batch([RenderedPrompt(text, (), False)]) == [ids]


@pytest.mark.case(19)
def test_decoding_cleans_nothing_up(tmp_path: Path) -> None:
    tokenizer = load(save(byte_level(), tmp_path, bos=False, clean_up_tokenization_spaces=True))
    text = "x : 'search' do n't . <|turn|> !"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode_completion(tokenizer.encode("x"), tokenizer.encode(text)) == (text, True)


@pytest.mark.case(18)
def test_a_leading_space_of_the_completion_is_kept(tmp_path: Path) -> None:
    tokenizer = load(save(sentence_piece(), tmp_path))
    prompt, world = tokenizer.encode("hello"), tokenizer.encode("world")[1:]
    assert tokenizer.decode(prompt + world) == "<s> hello world"
    assert tokenizer.decode_completion(prompt, world) == (" world", True)
    assert tokenizer.decode_completion(prompt[:1], world) == (" world", True)


@pytest.mark.case(17)
@pytest.mark.parametrize("text", ["ok 😀", "ok 語", "ok é"])
def test_an_incomplete_last_character_is_left_out(tokenizer: Tokenizer, text: str) -> None:
    prompt = tokenizer.encode("say")
    whole = tokenizer.encode(text)[1:]
    start = len(tokenizer.encode("ok ")) - 1
    text = tokenizer.decode_completion(prompt, whole)[0]
    assert tokenizer.decode_completion(prompt, whole) == (text, True)
    for end in range(start + 1, len(whole)):
        assert tokenizer.decode_completion(prompt, whole[:end]) == (text[:-1], False)


def test_a_real_replacement_character_is_no_incomplete_one(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a�")[1:]
    text, complete = tokenizer.decode_completion([0], ids)
    assert (text.strip(), complete) == ("a�", True)


def test_a_prompt_cut_inside_a_character_gives_that_character_to_the_completion(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é!")
    assert tokenizer.decode_completion(ids[:-2], ids[-2:]) == ("é!", True)
    letter = tokenizer.encode("z")[-1:]
    assert tokenizer.decode_completion(ids[:-2], letter) == ("z", True)


@pytest.mark.parametrize("kind", KINDS)
def test_completion_is_what_it_adds_to_the_prompt(tmp_path: Path, kind: str) -> None:
    tokenizer = load(save(KINDS[kind](), tmp_path))
    text = "hello worlds stop here"
    ids = tokenizer.encode(text)
    for cut in range(1, len(ids)):
        added = tokenizer.decode(ids).removeprefix(tokenizer.decode(ids[:cut]))
        assert tokenizer.decode_completion(ids[:cut], ids[cut:]) == (added, True)
