"""Generated pages match their sources."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from pages import ROOT, commands, pages

from slipstream_bench import records
from slipstream_bench.rows import at_most


def script(name: str) -> ModuleType:
    """Load a script of the docs folder as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_results_pages_match_their_records() -> None:
    maker = script("make_results")
    assert maker.current() == maker.pages(), "try: make results"


def test_failing_rows_come_first(tmp_path: Path) -> None:
    row = '{{"bar": "{}", "value": 1, "unit": "x", "target": "|a| <= 2", "holds": {}, "n": 3}}\n'
    (tmp_path / "one.jsonl").write_text(row.format("good", "true") + row.format("bad", "false"))
    pages = script("make_results").pages(tmp_path)
    assert "| [one](results/one.md) | 1 | 0 | 1 | 0 |" in pages[Path("results.md")]
    text = pages[Path("results/one.md")]
    assert text.index("| bad | 1 x | \\|a\\| <= 2 | **falls short** | 3 |") < text.index("| good |")


def test_each_processor_has_a_table_and_attempts_are_counted(tmp_path: Path) -> None:
    for value, processor in ((1.0, "old"), (3.0, "new"), (1.0, "new")):
        row = at_most("a", value, 2.0, "x")
        records.append(tmp_path / "one.jsonl", replace(row, processor=processor, device="cpu"))
    text = script("make_results").pages(tmp_path)[Path("results/one.md")]
    assert text.index("\n## old\n") < text.index("\n## new\n")
    assert "| 1 of 1 |" in text
    assert "| 1 of 2 |" in text, "the first attempt on the new one fell short"
    assert text.count("| a | ") == 2


def test_the_api_reference_builds_without_warnings(
    tmp_path: Path, require: Callable[[str, bool, str], None]
) -> None:
    require("docs", importlib.util.find_spec("pdoc") is not None, "pip install 'slipstream[docs]'")
    import slipstream as ss

    made = script("make_reference").make(tmp_path)
    assert len(made) > 10
    text = (tmp_path / "slipstream.html").read_text("utf-8")
    for name in ss.__all__:
        room = getattr(getattr(ss, name), "__name__", name).replace(".", "/")
        assert f'id="{name}"' in text or f"{room}.html" in {
            page.relative_to(tmp_path).as_posix() for page in made
        }
    for page in made:
        loaded = re.findall(
            r"<(?:script|link|img)[^>]*(?:src|href)=\"(http[^\"]*)", page.read_text()
        )
        assert loaded == [], "the pages fetch nothing"


def test_shown_output_can_be_recorded_again(tmp_path: Path) -> None:
    recorder = script("make_tutorial")
    with_output = {
        page: [command.text for command in commands(page, text) if command.output]
        for page, text in pages().items()
    }
    assert set(recorder.PAGES) == {page for page, shown in with_output.items() if shown}
    for page in recorder.PAGES:
        assert recorder.SHOWN.findall(pages()[page]) == with_output[page]
    assert recorder.printed("python -c \"print('ends  ')\"", tmp_path) == "ends"
