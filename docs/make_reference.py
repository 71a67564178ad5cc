"""Make the API reference from docstrings: ``python docs/make_reference.py FOLDER``.

It needs pdoc (``pip install 'slipstream[docs]'``) and no network; the pages fetch nothing from
anywhere. A warning, such as a name in ``__all__`` that does not exist, is an error.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path

# What users and authors of techniques import; the rest is ours to change.
MODULES = (
    "slipstream",
    "slipstream.technique",
    "slipstream.graph",
    "slipstream.durations",
    "slipstream.workload",
    "slipstream.source",
    "slipstream.surgery",
    "slipstream.cluster",
    "slipstream.ranks",
    "slipstream.measure",
    "slipstream.data",
    "slipstream.quant",
    "slipstream.nn",
    "slipstream.sparse",
    "slipstream.techniques.embedding",
    "slipstream.techniques.distributed",
    "slipstream.techniques.loops",
    "slipstream.techniques.lowbit",
    "slipstream.techniques.lowrank",
    "slipstream.techniques.scan",
    "slipstream.techniques.quadratic",
    "slipstream.techniques.burst",
    "slipstream.techniques.pipeline",
    "slipstream.techniques.pretraining",
    "slipstream.techniques.spatial",
    "slipstream.techniques.recursive",
    "slipstream.techniques.ensembles",
    "slipstream.techniques.side_by_side.cuda",
    "slipstream.techniques.side_by_side.triton",
    "slipstream.search",
    "slipstream.hardware",
    "slipstream.nas",
    "slipstream.nas.codesign",
    "slipstream.engines.aggregation",
    "slipstream.engines.controller",
    "slipstream.engines.storage",
    "slipstream.synthesis",
    "slipstream.ship",
    "slipstream.ship.stability",
    "slipstream.ship.xray",
    "slipstream.runtimes",
    "slipstream.runtimes.preprocessing",
    "slipstream.runtimes.paths",
    "slipstream.runtimes.camera",
    "slipstream.mlperf.training",
    "slipstream.errors",
    "slipstream.provenance",
)


def resolve(name: str) -> None:
    """Put what a lazy package imports on first use where pdoc looks for it."""
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", ()):
        setattr(module, public, getattr(module, public))


def make(folder: Path) -> list[Path]:
    """Write the reference into `folder`; returns the pages.

    Raises:
        ImportError: pdoc is not installed.
        Warning: a docstring or an annotation cannot be rendered as it stands.
    """
    from pdoc import doc, render

    for name in MODULES:
        resolve(name)
    render.configure(docformat="google", show_source=False, footer_text="slipstream")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        modules = {name: doc.Module.from_name(name) for name in MODULES}
        pages = {
            f"{name.replace('.', '/')}.html": render.html_module(module, modules)
            for name, module in modules.items()
        }
        pages["index.html"] = render.html_index(modules)
        pages["search.js"] = render.search_index(modules)
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return sorted(folder.rglob("*.html"))


def main() -> None:
    """Write the reference and print its path."""
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/make_reference.py FOLDER")
    try:
        pages = make(Path(sys.argv[1]))
    except ImportError as error:
        sys.exit(f"{error}\n  try: pip install 'slipstream[docs]'")
    print(f"{len(pages)} pages; begin with {Path(sys.argv[1]) / 'index.html'}")


if __name__ == "__main__":
    main()
