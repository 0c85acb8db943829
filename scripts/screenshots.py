"""Write the screenshots in docs/img: Chromium's view of the report pages that the documentation's examples write.

    python scripts/screenshots.py [NAME ...]

This needs chromium and chromedriver on the PATH. NAME is a page of docs/; without names, all screenshots are written.
"""

from __future__ import annotations

import base64
import io
import os
import re
import runpy
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

WIDTH = 1100


class Shot(NamedTuple):
    """A screenshot.

    Attributes:
        saves: Python expression evaluated after the examples; its value has ``save(folder)``.
        height: Height in pixels.
        blocks: Number of the page's examples to run.
        change: Script that changes the page before the screenshot, for example by a click.
        top: CSS selector of the element at the top.
    """

    saves: str
    height: int
    blocks: int = 1
    change: str = ""
    top: str = "html"


_BY_FP16 = "document.querySelector('th button[data-column=\"4\"]').click()"
SHOTS = {
    "forecast": Shot(
        "castwise.forecast(model, loss, batches, optimizer=torch.optim.AdamW)", 1060, change=_BY_FP16
    ),
    "compare": Shot("found", 1180),
    "operators": Shot("table", 760, top="section[data-name=Casts]"),
    "nonfinite": Shot("found", 870),
    "mismatch": Shot("found", 890),
    "monitor": Shot("monitor", 1000, blocks=2),
}


def write(name: str, folder: Path) -> Path:
    """Run a page's examples and save the report of their result; return the path of the report's page."""
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    script = folder / "train.py"
    script.write_text(
        "\n".join([*examples[: SHOTS[name].blocks], f"result = {SHOTS[name].saves}\n"]), encoding="utf-8"
    )
    os.chdir(folder)
    result = runpy.run_path(str(script))["result"]
    result.save(folder)
    return folder / f"{name}.html"


def main(names: list[str]) -> None:
    """Write the screenshots of some pages."""
    from PIL import Image
    from tests.report.browser import browser

    with tempfile.TemporaryDirectory() as scratch, browser(Path(scratch)) as window:
        for name in names:
            shot = SHOTS[name]
            folder = Path(scratch, name)
            folder.mkdir()
            window.show(write(name, folder), WIDTH)
            window.run(shot.change)
            top = window.run(f"return document.querySelector({shot.top!r}).getBoundingClientRect().top")
            clip = {"x": 0, "y": top, "width": WIDTH, "height": shot.height, "scale": 1}
            taken = window.devtools("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
            image = Image.open(io.BytesIO(base64.b64decode(taken["data"]))).convert("RGB")
            image = image.quantize(method=Image.Quantize.FASTOCTREE)  # this method keeps rare colours
            path = ROOT / "docs" / "img" / f"{name}-page.png"
            image.save(path, optimize=True)
            print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main(sys.argv[1:] or [*SHOTS])
