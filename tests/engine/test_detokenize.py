import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from workmem.engines.embedded.detokenize import OutputText, StopMatcher
from workmem.testing.tiny_models import build_tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def run(tokenizer, ids, stops=()):
    output = OutputText(tokenizer, stops)
    pieces = [output.push(token) for token in ids]
    return [*pieces, output.finish()], output


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 268), max_size=40))
def test_any_tokens_give_the_text_of_decoding_them_at_once(tiny, ids):
    pieces, _ = run(tiny, ids)
    assert "".join(pieces) == tiny.decode(ids, skip_special_tokens=True)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30))
def test_no_piece_holds_half_a_character(tiny, text):
    assume(not any(word in text for word in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")))
    pieces, _ = run(tiny, tiny.encode(text).ids)
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@pytest.mark.model
def test_the_real_tokenizer_streams_what_it_decodes(smollm2):
    real = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    text = "Grüße, 日本語 und 👩‍👩‍👧 — naïve\n\n  code()\t{x: 1}<|im_end|>"
    pieces, _ = run(real, real.encode(text).ids)
    assert "".join(pieces) == text.removesuffix("<|im_end|>")


def test_a_character_cut_short_ends_as_a_replacement(tiny):
    ids = tiny.encode("a日").ids[:-1]
    pieces, _ = run(tiny, ids)
    assert pieces[:-1] == ["a", "", ""]
    assert pieces[-1] == tiny.decode(ids)[1:]
    assert set(pieces[-1]) == {"\ufffd"}


def stream(stops, pieces):
    matcher = StopMatcher(stops)
    out = "".join(matcher.push(piece) for piece in pieces)
    return out + matcher.finish(), matcher.matched


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("ab", max_size=5), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_any_chunking_gives_the_same_text_and_stop(pieces, stops):
    whole = "".join(pieces)
    want = stream(stops, list(whole))
    assert stream(stops, pieces) == want
    assert stream(stops, [whole]) == want
    ends = [whole.find(stop) + len(stop) for stop in stops if stop in whole]
    if not ends:
        assert want == (whole, None)
    else:
        assert whole[: min(ends)] == want[0] + want[1]
        assert not any(stop in want[0] for stop in stops)


def test_what_may_begin_a_stop_string_is_held_back():
    matcher = StopMatcher(["STOP"])
    assert matcher.push("abST") == "ab"
    assert matcher.push("AB") == "STAB"
    assert matcher.push("ST") == ""
    assert matcher.push("OP and more") == ""
    assert matcher.matched == "STOP"
    assert matcher.push("never seen") == ""
    assert matcher.finish() == ""


def test_a_stop_string_ends_the_text_over_tokens(tiny):
    pieces, output = run(tiny, tiny.encode("one\nObservation: two").ids, ["\nObservation"])
    assert "".join(pieces) == "one"
    assert output.stopped_by == "\nObservation"
