"""Draws docs/gallery: known models under O1 and O2, and a screenshot of the HTML page.

    python tools/gallery.py            # everything; the screenshot needs Chromium
    python tools/gallery.py unet       # one model

Pictures need the ``dot`` program or pygraphviz.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampgraph
from ampgraph.cli.torchvision_shim import allow_torchvision
from ampgraph.report.graph_view import human_bytes

sys.path.insert(0, str(Path(__file__).resolve().parent))
from browser import Browser, find_browser

ROOT = Path(__file__).resolve().parent.parent
PAGE, FOLDER = ROOT / "docs/gallery.md", ROOT / "docs/gallery"
LEVELS = ("O1", "O2")
TRAINING = "training.svg"


class TransformerBlock(nn.Module):
    """Attention and a feed-forward part, each behind a norm and with a residual."""

    def __init__(self, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ConvBlock(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.SiLU(inplace=True)
        )


class UNet(nn.Module):
    """Two levels down, two up, with skip connections."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.enter = ConvBlock(3, width)
        self.down1, self.down2 = ConvBlock(width, 2 * width), ConvBlock(2 * width, 4 * width)
        self.up2, self.up1 = ConvBlock(6 * width, 2 * width), ConvBlock(3 * width, width)
        self.leave = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.enter(x)
        second = self.down1(F.max_pool2d(first, 2))
        third = self.down2(F.max_pool2d(second, 2))
        second = self.up2(torch.cat((F.interpolate(third, scale_factor=2.0), second), 1))
        first = self.up1(torch.cat((F.interpolate(second, scale_factor=2.0), first), 1))
        return self.leave(first).sigmoid()


def resnet18() -> tuple[nn.Module, tuple]:
    allow_torchvision()
    import torchvision

    return torchvision.models.resnet18(), (torch.randn(8, 3, 224, 224),)


def gpt2() -> tuple[nn.Module, tuple]:
    import transformers

    config = transformers.GPT2Config(use_cache=False)
    return transformers.GPT2LMHeadModel(config), (torch.randint(0, config.vocab_size, (2, 64)),)


@dataclass(frozen=True)
class Entry:
    """One model: how it is built, and its pictures: file suffix to the options of `draw`."""

    title: str
    build: Callable[[], tuple[nn.Module, tuple]]
    pictures: dict[str, dict[str, Any]] = field(default_factory=lambda: {"": {}})


GALLERY = {
    "block": Entry("Transformer block", lambda: (TransformerBlock(), (torch.randn(4, 128, 256),))),
    "resnet18": Entry("ResNet-18", resnet18, {"": {"depth": 2}, "-layer2.0": {"focus": "layer2.0*"}}),
    "gpt2": Entry("GPT-2", gpt2, {"": {"depth": 2}, "-h.0": {"focus": "transformer.h.0*"}}),
    "unet": Entry("U-Net", lambda: (UNet(), (torch.randn(2, 3, 64, 64),)), {"": {"depth": 1}}),
}


def converted(name: str, level: str) -> ampgraph.AmpModule:
    """Returns a model of the gallery, in evaluation mode, for float16."""
    torch.manual_seed(0)
    model, args = GALLERY[name].build()
    return ampgraph.convert(model.eval(), args, policy=level, dtype=torch.float16)


def row(name: str, level: str, amp: ampgraph.AmpModule) -> str:
    """Returns a model's row of the table."""
    explanation = ampgraph.explain(amp)
    totals, autocast = explanation.totals, explanation.baselines["autocast"]
    cells = (
        f"[{GALLERY[name].title}](#{GALLERY[name].title.lower().replace(' ', '-')})",
        level,
        totals.casts,
        human_bytes(totals.activation_cast_bytes),
        human_bytes(autocast.activation_cast_bytes),
        ", ".join(f"[picture](gallery/{name}-{level}{suffix}.svg)" for suffix in GALLERY[name].pictures),
    )
    return f"| {' | '.join(map(str, cells))} |"


def draw(name: str) -> list[str]:
    """Draws one model; returns its rows of the table."""
    rows = []
    for level in LEVELS:
        amp = converted(name, level)
        rows.append(row(name, level, amp))
        for suffix, options in GALLERY[name].pictures.items():
            path = ampgraph.draw(amp, FOLDER / f"{name}-{level}{suffix}.svg", **options)
            print(f"{path.relative_to(ROOT)}: {human_bytes(path.stat().st_size)}")
    return rows


def training() -> None:
    """Draws the forward and backward of two layers, as AOTAutograd runs them under a loss scale."""
    x = torch.randn(8, 16)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    amp = ampgraph.convert(model, (x,), dtype=torch.float16, backend="aot_eager")
    amp(x).square().mean().backward()
    path = ampgraph.draw(amp, FOLDER / TRAINING, graph="both")
    print(f"{path.relative_to(ROOT)}: {human_bytes(path.stat().st_size)}")


def screenshot() -> None:
    """Writes how the page of GPT-2 opens, after a click on its first block."""
    page = ampgraph.draw(converted("gpt2", "O1"), ROOT / "out/gallery/gpt2.html")
    with Browser((1300, 820)) as browser:
        browser.open(page)
        browser.click('.folded[data-key="transformer/h.0"]')
        browser.screenshot(FOLDER / "page.png")


def with_rows(text: str, rows: list[str]) -> str:
    """Returns the page with the rows of its table that are about the same pictures replaced."""
    for line in rows:
        picture = re.search(r"\(gallery/[^)]*\)", line)
        assert picture
        pattern = re.compile(rf"^\|.*{re.escape(picture[0])}.*$", re.MULTILINE)
        if not pattern.search(text):
            raise SystemExit(f"{PAGE} has no row with {picture[0]}")
        text = pattern.sub(lambda _, line=line: line, text)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*GALLERY, []], help="which models; all by default")
    names = parser.parse_args().names
    rows = [line for name in names or GALLERY for line in draw(name)]
    PAGE.write_text(with_rows(PAGE.read_text(), rows))
    training()
    if find_browser():
        screenshot()
    else:
        print("no Chromium here: docs/gallery/page.png left as it is", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
