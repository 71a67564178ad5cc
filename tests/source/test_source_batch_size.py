"""The literal that sets the batch size: found if certain, refused if not."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.source import EditLocationError, Source, find_batch_size, locate
from slipstream.technique import parse
from slipstream.workload import Workload

BODY = "\n    return model, batch, loss, optimizer\n"
CERTAIN = {
    "plain": "def make(batch_size=32):" + BODY,
    "annotated": "def make(batch_size: int = 32) -> tuple:" + BODY,
    "keyword only": "def make(width, *, depth=2, batch_size=32):" + BODY,
    "config constant": "BATCH = 32  # samples\n\ndef make(batch_size=BATCH):" + BODY,
    "annotated constant": "BATCH: int = 32\n\ndef make(batch_size=BATCH):" + BODY,
    "split over lines": "def make(\n    width=8,\n    batch_size\\\n        =  32,  # samples\n):"
    + BODY,
    "decorated": "@cached\n@other(batch_size=8)\ndef make(batch_size=32):" + BODY,
    "other letters": "name = '𝒃𝒂𝒕𝒄𝒉 größe'\n\ndef make(name='ü', batch_size=32):" + BODY,
}
UNSAFE = {
    "no argument": ("def make(width=8):" + BODY, "no argument batch_size"),
    "no default": ("def make(batch_size):" + BODY, "no argument batch_size"),
    "computed": ("def make(batch_size=4 * 8):" + BODY, "'4 * 8' is not a plain number"),
    "from elsewhere": ("from config import BATCH\n\ndef make(batch_size=BATCH):" + BODY, "BATCH"),
    "assigned twice": ("B = 8\nB = 32\n\ndef make(batch_size=B):" + BODY, "assigned 2 times"),
    "on a condition": (
        "if big:\n    B = 32\n\ndef make(batch_size=B):" + BODY,
        "not a plain number",
    ),
    "set inside": ("def make(batch_size=32):\n    batch_size = 8" + BODY, "sets batch_size itself"),
    "a flag": ("def make(batch_size=True):" + BODY, "not a plain number"),
}


def source_of(text: str, function: str | None = "make", ending: str = "\n") -> tuple[Source, str]:
    content = text.replace("\n", ending)
    return Source.of(content.encode(), Path("train.py")), content


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("name", CERTAIN)
def test_exactly_one_token_differs(name: str, ending: str) -> None:
    source, content = source_of(CERTAIN[name], ending=ending)
    found = find_batch_size(locate(source, "make"))
    assert found.value == 32
    edited = found.set(64).content
    assert edited == content.replace("32", "64").encode()
    assert content.count("32") == 1
    again = find_batch_size(locate(Source.of(edited, Path("train.py")), "make"))
    assert again.value == 64
    assert again.set(32).content == content.encode()


@pytest.mark.parametrize("name", UNSAFE)
def test_an_uncertain_size_is_refused_with_the_reason(name: str) -> None:
    text, message = UNSAFE[name]
    source, _ = source_of(text)
    with pytest.raises(EditLocationError) as caught:
        find_batch_size(locate(source, "make"))
    assert message in caught.value.what


def test_a_script_is_edited_at_its_only_loader() -> None:
    script = (
        "from torch.utils.data import DataLoader\nN = 16\n"
        "for x in DataLoader(data, shuffle=True, batch_size=N):\n    step(x)\n"
    )
    found = find_batch_size(locate(Source.of(script.encode(), Path("train.py")), None))
    assert (found.value, found.line) == (16, 2)
    assert found.set(4).content == script.replace("16", "4").encode()
    several = script + "other = DataLoader(held_out, batch_size=8)\n"
    with pytest.raises(EditLocationError, match="several DataLoaders"):
        find_batch_size(locate(Source.of(several.encode(), Path("train.py")), None))


_ARGPARSE = """\
import argparse
from torch.utils.data import DataLoader
def loaders(args):
    return DataLoader(data, shuffle=True, batch_size=args.batch_size)
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", default=1)
    parser.add_argument("-b", "--batch-size", type=int, default=16)
    args = parser.parse_args()
    for x in loaders(args): step(x)
main()
"""


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("from torch.utils.data import DataLoader\nDataLoader(data, 16)\n", ()),
        ("from torch.utils.data import DataLoader\nN = 16\nDataLoader(data, N, True)\n", ()),
        (_ARGPARSE, ("-b", "--batch-size")),
        (
            _ARGPARSE.replace('"-b", "--batch-size"', '"-b", dest="batch_size"'),
            ("-b",),
        ),
    ],
)
def test_a_positional_size_and_the_default_of_an_option(text: str, flags: tuple[str, ...]) -> None:
    found = find_batch_size(locate(Source.of(text.encode(), Path("train.py")), None))
    assert (found.value, found.flags) == (16, flags)
    assert found.set(4).content == text.replace("16", "4").encode()


def test_an_explicit_option_overrides_its_default(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_ARGPARSE)
    (technique,) = parse("batch_size:x2")
    for arguments, diff in ((), "default=32"), (("--batch-size=8",), ""), (("-b", "8"), ""):
        change = technique.code(Workload.parse(str(path), *arguments))
        assert change is not None
        assert diff in change.diff
        assert bool(diff) != ("overrides the default 16" in change.note)
    path.write_text(_ARGPARSE.replace(", default=16", ""))
    with pytest.raises(EditLocationError, match=r"'args.batch_size' has no default"):
        find_batch_size(locate(Source.read(path), None))


def test_a_file_of_providers_is_edited_at_its_input_provider() -> None:
    text = "def skyline_input_provider(batch_size=16):\n    return draw(batch_size)\n"
    found = find_batch_size(locate(Source.of(text.encode(), Path("train.py")), None))
    assert found.set(32).content == text.replace("16", "32").encode()
