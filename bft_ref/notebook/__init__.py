"""What the notebooks of the book use: recorded facts, figures, sliders."""

from bft_ref.notebook.facts import chapter, fact
from bft_ref.notebook.figures import figure
from bft_ref.notebook.schematic import schematic
from bft_ref.notebook.sliders import SliderState, slider
from bft_ref.notebook.watch import watch

__all__ = [
    "SliderState",
    "chapter",
    "fact",
    "figure",
    "schematic",
    "slider",
    "watch",
]
