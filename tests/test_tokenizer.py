"""Tokenizers read back what they wrote, and malformed files end in one clear line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcretrofit.errors import RetrofitError
from mcretrofit.tokenizer import BytesTokenizer, byte_counts, load_tokenizer

SHARED = Path(__file__).parents[2] / "shared" / "tokenizers"
FILES = {
    "neox_20B_tokenizer.json": 50277,
    "torchtune_tiny_bpe_tokenizer.json": 2003,
    "rwkv_vocab_v20230424.txt": 65530,
}
TEXTS = {
    "plain": "The magic number for red apple is 824.",
    "spaces": "  two,\n\n\tthen  three   \n",
    "accents": "caf\u00e9 na\u00efve \u0153uvre",
    "chinese": "\u4eca\u5929\u662f\u7f8e\u597d\u7684\u4e00\u5929\u3002",
    "emoji": "a \U0001f600 and \U0001f469\u200d\U0001f680",
}


@pytest.fixture(scope="module", params=FILES, ids=lambda name: name.split("_")[0])
def shared(request):
    path = SHARED / request.param
    if not path.exists():
        pytest.skip(f"{path.name} is not beside this checkout")
    return load_tokenizer(path, FILES[request.param])


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_files_read_back_what_they_wrote(shared, text):
    if shared.vocab_size == 2003 and text != TEXTS["plain"]:
        pytest.skip("this small BPE was never given all bytes")
    ids = shared.encode(text)
    assert shared.decode(ids) == text
    assert all(0 <= i < shared.vocab_size for i in ids)
    assert sum(byte_counts(shared, ids)) == len(text.encode("utf-8"))


def test_files_know_their_size_and_their_end(shared):
    assert shared.vocab_size == FILES.get(shared.name)
    expected = {"neox_20B_tokenizer.json": 0, "torchtune_tiny_bpe_tokenizer.json": 2000}
    assert shared.eos_id == expected.get(shared.name, 0)


def test_world_matches_published_ids():
    path = SHARED / "rwkv_vocab_v20230424.txt"
    if not path.exists():
        pytest.skip(f"{path.name} is not beside this checkout")
    published = [33520, 4600, 332, 59219, 21509, 47, 33, 10381, 11639, 13091, 15597, 11685]
    published += [14734, 10250, 11639, 10080]
    world = load_tokenizer(path, 65536)
    assert world.encode(f"Today is a beautiful day. {TEXTS['chinese']}") == published
    # the rows that pad an embedding of 65,536 stand for nothing that could be printed
    assert world.decode([33520, 0, 65535]) == "Today\ufffd"


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_bytes_are_utf8(text):
    bytes_ = load_tokenizer(None, 256)
    assert bytes_.encode(text) == list(text.encode("utf-8"))
    assert bytes_.decode(bytes_.encode(text)) == text
    assert bytes_.name == "bytes" and bytes_.eos_id is None


def test_a_torn_character_is_marked():
    bytes_ = BytesTokenizer()
    assert bytes_.decode(bytes_.encode("\u00e9")[:1]) == "\ufffd"


def test_world_takes_the_longest_match(tmp_path):
    (tmp_path / "rwkv_vocab_small.txt").write_text(
        "1 'a' 1\n2 'b' 1\n3 'ab' 2\n4 'abba' 4\n5 b'\\xc3' 1\n6 '\\u2028' 3\n7 '''\"''' 1\n"
    )
    world = load_tokenizer(tmp_path, 256)
    assert world.encode("abbab") == [4, 2] and world.encode("abb") == [3, 2]
    assert world.decode([6, 7, 3]) == '\u2028"ab' and world.vocab_size == 8
    with pytest.raises(RetrofitError, match="rwkv_vocab_small.txt: no word starts with .* 0x7a"):
        world.encode("z")


@pytest.mark.parametrize(
    "line",
    [
        "2 'b'",
        "2 'bb' 1",
        "x 'b' 1",
        "1 'b' 1",
        "2 b 1",
        "2 'b 1",
        "2 __import__('os') 1",
        "",
        "2 '' 0",
    ],
    ids=repr,
)
def test_a_bad_world_line_is_named(tmp_path, line):
    path = tmp_path / "rwkv_vocab_bad.txt"
    path.write_text(f"1 'a' 1\n{line}\n3 'c' 1\n")
    with pytest.raises(RetrofitError) as caught:
        load_tokenizer(tmp_path, 256)
    assert str(caught.value).startswith(f"{path}, line 2: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", '{"version": "1.0"}', "[]"], ids=repr)
def test_a_bad_json_is_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(RetrofitError) as caught:
        load_tokenizer(tmp_path, 256)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_binary_file_is_named(tmp_path):
    (tmp_path / "rwkv_vocab_x.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RetrofitError, match="rwkv_vocab_x.txt cannot be read as UTF-8"):
        load_tokenizer(tmp_path, 256)


def test_missing_files_say_what_to_give(tmp_path):
    with pytest.raises(RetrofitError, match="give a tokenizer.json or an rwkv_vocab"):
        load_tokenizer(tmp_path, 50277)
    with pytest.raises(RetrofitError, match="vocabulary of 50277"):
        load_tokenizer(None, 50277)
    with pytest.raises(RetrofitError, match="neither a folder nor"):
        load_tokenizer(tmp_path / "absent", 256)
    for name in ("rwkv_vocab_a.txt", "rwkv_vocab_b.txt"):
        (tmp_path / name).write_text("1 'a' 1\n")
    with pytest.raises(RetrofitError, match=r"rwkv_vocab_a.txt and rwkv_vocab_b.txt: name"):
        load_tokenizer(tmp_path, 256)


def _write_json(folder: Path) -> Path:
    vocab = {"<unk>": 0, "red": 1, "apple": 2, "</s>": 3, "<stop>": 4}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": vocab[t], "content": t, "special": True} | special for t in ("</s>", "<stop>")]
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    data = {"version": "1.0", "added_tokens": added, "model": model}
    data["pre_tokenizer"] = {"type": "Whitespace"}
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(data))
    return path


def test_the_end_is_read_beside_the_file(tmp_path):
    _write_json(tmp_path)
    assert load_tokenizer(tmp_path, 5).eos_id == 3
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<stop>"}')
    assert load_tokenizer(tmp_path, 5).eos_id == 4
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    assert load_tokenizer(tmp_path, 5).eos_id == 3
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(RetrofitError, match="tokenizer_config.json is not a JSON object"):
        load_tokenizer(tmp_path, 5)


def test_ids_must_fit_the_model(tmp_path):
    path = _write_json(tmp_path)
    with pytest.raises(RetrofitError, match="ids up to 4, but the model embeds only 4"):
        load_tokenizer(path, 4)
